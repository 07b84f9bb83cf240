//! What the ranks of an all_to_all [ask](equality) each other first, and the call that waits for the answer.

use crate::algo::{Collective, equality, select};
use crate::engine::region::{Region, Spaces, Words};
use crate::engine::request::Request;
use crate::types::{DType, ReduceOp};

/// What is exchanged once the ranks have answered.
pub(crate) struct Question {
    call: Request,
    words: Words,
}

impl Question {
    /// The first part of a call: the least of what all ranks say; and what comes after it.
    pub(crate) fn before(mut call: Request) -> (Request, Question) {
        call.signature.algorithm = select::ASKED;
        let mut words = Words::new(equality::words(&call.collective).to_vec());
        let said = Region::of(&[words.buffer()]);
        let first = Request {
            collective: Collective::AllReduce { count: words.get().len() },
            signature: call.signature,
            reduce: Some(ReduceOp::Min),
            dtype: DType::U64,
            spaces: Spaces::new(said.clone(), said, DType::U64.size()),
            timeout: call.timeout,
        };
        (first, Question { call, words })
    }

    /// The second part, once the first has ended.
    pub(crate) fn answered(self) -> Request {
        let Question { mut call, words } = self;
        let least = [words.get()[0], words.get()[1]];
        call.collective = equality::answered(call.collective, least);
        call
    }
}
