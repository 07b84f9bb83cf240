//! A backend that fails in every way, for the tests of the loader.
//!
//! The hint `fault` makes `join` fail (`error`) or panic (`panic`). all_reduce panics in `submit`, broadcast in `wait`; send
//! is unsupported; recv ignores its timeout and ends only by an abort; reduce times out, and barrier fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ncclx_rs_backend::{Backend, Error, ErrorKind, Join, OpKind, Operation, Tensor, Work, export_backend};

struct Faulty {
    aborted: Arc<AtomicBool>,
}

impl Backend for Faulty {
    const NAME: &'static str = "faulty";
    const VERSION: &'static str = "0.7";
    const METHODS: &'static [&'static str] = &["echo", "fail", "panic"];

    fn join(join: Join) -> Result<Self, Error> {
        let fault = join.hints.iter().find(|(name, _)| name == "fault").map(|(_, fault)| fault.as_str());
        match fault {
            Some("error") => return Err(Error::failure(format!("no way into {} for rank {}", join.name, join.rank))),
            Some("panic") => panic!("join fell over"),
            _ => {}
        }
        let key = format!("rank{}", join.rank);
        let store = |cause| Error::failure(format!("the store: {cause}"));
        join.store.set(&key, &[0, 255, 7]).map_err(store)?;
        join.store.wait(&key, join.timeout).map_err(store)?;
        let value = join.store.get(&key, join.timeout).map_err(store)?;
        match join.store.get("never", Duration::from_millis(20)) {
            Err(_) if value == [0, 255, 7] => Ok(Faulty { aborted: Arc::default() }),
            other => Err(Error::failure(format!("the store gave {value:?} and {other:?}"))),
        }
    }

    fn submit(&self, operation: Operation) -> Result<Box<dyn Work>, Error> {
        let fault = match operation.kind {
            OpKind::AllReduce(_) => panic!("submit fell over"),
            OpKind::Broadcast { .. } => Fault::Panics,
            OpKind::Recv { .. } => Fault::Hangs,
            OpKind::Reduce { .. } => Fault::Fails(ErrorKind::Timeout),
            OpKind::Barrier => Fault::Fails(ErrorKind::Failure),
            _ => return Err(Error::unsupported(&operation.name, Self::NAME)),
        };
        Ok(Box::new(Pending { fault, aborted: Arc::clone(&self.aborted) }))
    }

    fn call(&self, method: &str, arguments: &str, tensors: &mut [Tensor<'_>]) -> Result<String, Error> {
        match method {
            "echo" => {
                for tensor in tensors {
                    tensor.as_mut_slice::<f32>()?.fill(7.0);
                }
                Ok(arguments.to_owned())
            }
            "panic" => panic!("call fell over"),
            _ => Err(Error::failure("it failed as asked")),
        }
    }

    fn abort(&self, _reason: &str) {
        self.aborted.store(true, Ordering::Relaxed);
    }

    fn finalize(&self) -> Result<(), Error> {
        Ok(())
    }
}

enum Fault {
    Panics,
    Hangs,
    Fails(ErrorKind),
}

struct Pending {
    fault: Fault,
    aborted: Arc<AtomicBool>,
}

impl Work for Pending {
    fn wait(&self, timeout: Duration) -> Option<Result<(), Error>> {
        match self.fault {
            Fault::Panics => panic!("wait fell over"),
            Fault::Fails(kind) => Some(Err(Error::new(kind, "it went wrong, as it always does"))),
            Fault::Hangs => {
                let began = Instant::now();
                while !self.aborted.load(Ordering::Relaxed) {
                    if began.elapsed() >= timeout {
                        return None;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Some(Err(Error::new(ErrorKind::Lost, "aborted")))
            }
        }
    }
}

export_backend!(Faulty);
