//! Graphs of CUDA, which the engine itself never makes.

use std::ffi::{CStr, c_void};

use ncclx_rs::sys::cuda::Stream;

use crate::harness::symbol;

/// Which calls of other threads spoil a capture: `CU_STREAM_CAPTURE_MODE_GLOBAL` and `_THREAD_LOCAL`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mode {
    Global = 0,
    ThreadLocal = 1,
}

/// What a capture has become.
#[derive(Debug)]
pub(crate) struct Graph {
    graph: *mut c_void,
    exec: *mut c_void,
}

// SAFETY: graphs may be used by any thread.
unsafe impl Send for Graph {}

fn function(name: &CStr) -> *mut c_void {
    symbol(name).expect("CUDA has it")
}

/// Begins a capture.
pub(crate) fn begin(stream: &Stream, mode: Mode) {
    // SAFETY: cuda.h declares it so.
    let begin: unsafe extern "C" fn(u64, u32) -> u32 =
        unsafe { std::mem::transmute(function(c"cuStreamBeginCapture_v2")) };
    // SAFETY: the stream lives.
    assert_eq!(unsafe { begin(stream.to_raw(), mode as u32) }, 0);
}

/// Ends a capture: the graph, or the driver's error.
pub(crate) fn end(stream: &Stream) -> Result<Graph, u32> {
    // SAFETY: cuda.h declares it so.
    let end: unsafe extern "C" fn(u64, *mut *mut c_void) -> u32 =
        unsafe { std::mem::transmute(function(c"cuStreamEndCapture")) };
    // SAFETY: as above.
    let instantiate: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, u64) -> u32 =
        unsafe { std::mem::transmute(function(c"cuGraphInstantiateWithFlags")) };
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the stream lives, and `graph` is a place for the result.
    match unsafe { end(stream.to_raw(), &raw mut graph) } {
        0 => {}
        error => return Err(error),
    }
    // SAFETY: the graph is whole, and `exec` a place for the result.
    assert_eq!(unsafe { instantiate(&raw mut exec, graph, 0) }, 0);
    Ok(Graph { graph, exec })
}

impl Graph {
    /// Captures what `body` puts on a stream.
    pub(crate) fn of(stream: &Stream, mode: Mode, body: impl FnOnce()) -> Graph {
        begin(stream, mode);
        body();
        end(stream).expect("nothing has spoilt it")
    }

    /// Puts it on a stream once more.
    pub(crate) fn replay(&self, stream: &Stream) {
        // SAFETY: cuda.h declares it so.
        let launch: unsafe extern "C" fn(*mut c_void, u64) -> u32 =
            unsafe { std::mem::transmute(function(c"cuGraphLaunch")) };
        // SAFETY: both live.
        assert_eq!(unsafe { launch(self.exec, stream.to_raw()) }, 0);
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        for (name, handle) in [(c"cuGraphExecDestroy", self.exec), (c"cuGraphDestroy", self.graph)] {
            // SAFETY: cuda.h declares both so.
            let destroy: unsafe extern "C" fn(*mut c_void) -> u32 = unsafe { std::mem::transmute(function(name)) };
            // SAFETY: made in `end`, and not used any more.
            assert_eq!(unsafe { destroy(handle) }, 0);
        }
    }
}
