//! A backend in a shared library: it has ncclx's engine for all ordinary operations, and an additional one,
//! `quantized_all_reduce`, which sends blocks of 8-bit numbers.
//!
//!     cargo build --release --package quantized_backend
//!     export NCCLX_RS_BACKEND_LIB_PATH_QUANTIZED=$PWD/target/release/libquantized_backend.so
//!     torchrun --standalone --nproc-per-node 2 examples/quantized_backend/quantized_all_reduce.py

mod bridge;
mod quantized;

use std::sync::Arc;
use std::time::Duration;

use ncclx_rs::{CommOptions, Communicator, Rank};
use ncclx_rs_backend::{Backend, Error, Join, Operation, Tensor, Work, export_backend};
use serde::{Deserialize, Serialize};

use crate::bridge::{EngineStore, InFlight, api_error};

struct Quantized {
    comm: Communicator,
}

/// The arguments of `quantized_all_reduce` by name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Arguments {
    /// How many elements share a scale.
    block: usize,
}

impl Default for Arguments {
    fn default() -> Self {
        Arguments { block: 256 }
    }
}

/// The result of `quantized_all_reduce`.
#[derive(Serialize)]
struct Answer {
    /// The bytes that went to other ranks.
    bytes_sent: usize,
}

impl Backend for Quantized {
    const NAME: &'static str = "quantized";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const METHODS: &'static [&'static str] = &["quantized_all_reduce"];

    fn join(join: Join) -> Result<Self, Error> {
        if join.device != "cpu" {
            return Err(Error::usage(format!("quantized: expected tensors on the cpu, got {}", join.device)));
        }
        let options = CommOptions {
            name: join.name,
            rank: Rank(join.rank),
            size: join.size as usize,
            timeout: Some(join.timeout),
            hints: join.hints,
            store: Arc::new(EngineStore(join.store)),
        };
        let comm = Communicator::new(options).map_err(|error| api_error(&error.into()))?;
        Ok(Quantized { comm })
    }

    fn submit(&self, operation: Operation) -> Result<Box<dyn Work>, Error> {
        let work = self.comm.submit(bridge::op(operation)?).map_err(|error| api_error(&error))?;
        Ok(Box::new(InFlight(work)))
    }

    fn call(&self, method: &str, arguments: &str, tensors: &mut [Tensor<'_>]) -> Result<String, Error> {
        let wrong = |what: String| Error::usage(format!("{method}: {what}"));
        let Arguments { block } = serde_json::from_str(arguments).map_err(|error| wrong(error.to_string()))?;
        if block == 0 {
            return Err(wrong("argument `block`: expected at least 1 element, got 0".to_owned()));
        }
        let [tensor] = tensors else { return Err(wrong(format!("expected one tensor, got {}", tensors.len()))) };
        let data = tensor.as_mut_slice::<f32>().map_err(|error| wrong(error.text))?;
        let bytes_sent = quantized::all_reduce(&self.comm, data, block).map_err(|error| api_error(&error))?;
        serde_json::to_string(&Answer { bytes_sent }).map_err(|error| Error::failure(error.to_string()))
    }

    fn set_timeout(&self, timeout: Duration) {
        self.comm.set_timeout(timeout);
    }

    fn abort(&self, reason: &str) {
        self.comm.abort(reason);
    }

    fn finalize(&self) -> Result<(), Error> {
        self.comm.shutdown().map_err(|error| api_error(&error))
    }
}

export_backend!(Quantized);
