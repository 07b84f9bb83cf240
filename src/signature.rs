//! What every rank must agree on in one collective; PyTorch calls it a fingerprint.

use std::fmt;

use crate::algo::select;
use crate::op::CollectiveKind;
use crate::types::{DType, Rank, ReduceOp};

/// How [`Signature::disagreement`] begins where the ranks have called the same.
pub(crate) const RUN_OTHERWISE: &str = "the ranks disagree on how to run collective";

/// What every rank must agree on in one collective. Travels with every message, so that the first one tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Signature {
    /// The operation's [`CollectiveKind`]; zero for none.
    pub(crate) operation: u8,
    /// The element type's discriminant.
    pub(crate) dtype: u8,
    /// One more than the reduce operation's [`ReduceOp::index`]; zero for none.
    pub(crate) reduction: u8,
    /// What runs it, once that is chosen: the number of the algorithm.
    pub(crate) algorithm: u8,
    /// The root, or the window; where the ranks' blocks may differ in length, what tells these lengths from others; or zero.
    pub(crate) root: u32,
    /// The number of elements, where all ranks must have the same; in an all_to_all of two ranks what they exchange; or zero.
    pub(crate) count: u64,
}

impl Signature {
    /// The operation's name.
    pub(crate) fn operation(&self) -> &'static str {
        CollectiveKind::numbered(self.operation).map_or("unknown", CollectiveKind::name)
    }

    /// The name of the algorithm.
    pub(crate) fn algorithm(&self) -> &'static str {
        select::numbered(self.algorithm).unwrap_or("an unknown algorithm")
    }

    /// Sets what runs it, unless that is told by the answer to a question: of both parts of such a call the signature is the same.
    #[inline]
    pub(crate) fn run_by(&mut self, algorithm: u8) {
        if self.algorithm != select::ASKED {
            self.algorithm = algorithm;
        }
    }

    /// Whether another rank has called the same, however it runs that.
    pub(crate) fn calls_as(&self, theirs: &Signature) -> bool {
        Signature { algorithm: theirs.algorithm, ..*self } == *theirs
    }

    /// Whether another rank has called the same with as many elements, but divides them among the ranks otherwise.
    pub(crate) fn divides_otherwise(&self, theirs: &Signature) -> bool {
        use CollectiveKind::{AllGather, ReduceScatter};
        let has_blocks = matches!(CollectiveKind::numbered(self.operation), Some(AllGather | ReduceScatter));
        has_blocks && self.root != theirs.root && self.calls_as(&Signature { root: self.root, ..*theirs })
    }

    /// Whether another rank has called the same, but has other counts for what the two exchange.
    fn exchanges_otherwise(&self, theirs: &Signature) -> bool {
        let is_exchange = CollectiveKind::numbered(self.operation) == Some(CollectiveKind::AllToAll);
        is_exchange && self.calls_as(&Signature { count: self.count, ..*theirs })
    }

    /// How two ranks differ in the collective of this number, in words.
    pub(crate) fn disagreement(&self, number: u64, me: Rank, from: Rank, theirs: &Signature) -> String {
        if self.calls_as(theirs) {
            let (ours, theirs) = (self.algorithm(), theirs.algorithm());
            format!("{RUN_OTHERWISE} {number}: rank {me} chose {ours}, rank {from} {theirs}")
        } else if self.divides_otherwise(theirs) {
            format!(
                "the ranks disagree on the sizes of collective {number}: rank {me} and rank {from} both called {self}, but \
                 with other counts a rank"
            )
        } else if self.exchanges_otherwise(theirs) {
            let (ours, theirs) = (self.count, theirs.count);
            format!(
                "the ranks disagree on the sizes of collective {number}: rank {me} exchanges {ours} elements with rank {from}, \
                 which exchanges {theirs}"
            )
        } else {
            format!("the ranks disagree on collective {number}: rank {me} called {self}, rank {from} called {theirs}")
        }
    }

    /// As two words.
    pub(crate) fn to_words(self) -> [u64; 2] {
        let Signature { operation, dtype, reduction, algorithm, root, count } = self;
        let [a, b, c, d] = root.to_le_bytes();
        [u64::from_le_bytes([operation, dtype, reduction, algorithm, a, b, c, d]), count]
    }

    /// What [`to_words`](Signature::to_words) made; of other words anything.
    pub(crate) fn from_words([first, count]: [u64; 2]) -> Signature {
        let [operation, dtype, reduction, algorithm, root @ ..] = first.to_le_bytes();
        Signature { operation, dtype, reduction, algorithm, root: u32::from_le_bytes(root), count }
    }

    fn reduction(&self) -> &'static str {
        let index = usize::from(self.reduction).checked_sub(1);
        index.and_then(|index| ReduceOp::NAMES.get(index)).copied().unwrap_or("unknown")
    }
}

/// The operation in words, as `all_reduce(SUM, 20 × float32)`.
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use CollectiveKind as Kind;
        let (operation, reduction) = (self.operation(), self.reduction());
        let Signature { count, root, .. } = self;
        let dtype = DType::ALL.get(usize::from(self.dtype)).map_or("unknown", |dtype| dtype.name());
        match Kind::numbered(self.operation) {
            Some(Kind::Barrier | Kind::WindowRegister | Kind::WindowDeregister | Kind::WindowFence) => {
                write!(f, "{operation}()")
            }
            Some(Kind::AllToAll) => write!(f, "{operation}({dtype})"),
            Some(Kind::AllReduce | Kind::ReduceScatter) => write!(f, "{operation}({reduction}, {count} × {dtype})"),
            Some(Kind::Reduce) => write!(f, "{operation}({reduction}, {count} × {dtype}, root {root})"),
            Some(Kind::Broadcast | Kind::Gather | Kind::Scatter) => {
                write!(f, "{operation}({count} × {dtype}, root {root})")
            }
            Some(Kind::AllGatherPersistent) => write!(f, "{operation}({count} × {dtype}, window {root})"),
            Some(Kind::AllGather) | None => write!(f, "{operation}({count} × {dtype})"),
        }
    }
}
