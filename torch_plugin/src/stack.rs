//! The Python stack that an operation is called from, for the flight recorder.

use ncclx_rs::Frame;
use pyo3::intern;
use pyo3::prelude::*;

/// The innermost `most` frames of this thread's Python stack. There are none on threads without Python, such as autograd's,
/// and at the interpreter's end.
pub(crate) fn capture(most: usize) -> Vec<Frame> {
    let mut frames = Vec::new();
    // An error here cuts the stack short; the operation goes on.
    let _ = Python::try_attach(|py| walk(py, most, &mut frames));
    frames
}

fn walk(py: Python<'_>, most: usize, frames: &mut Vec<Frame>) -> PyResult<()> {
    let mut next = py.import(intern!(py, "sys"))?.getattr(intern!(py, "_getframe"))?.call0()?;
    while frames.len() < most && !next.is_none() {
        let code = next.getattr(intern!(py, "f_code"))?;
        frames.push(Frame {
            name: code.getattr(intern!(py, "co_name"))?.extract()?,
            filename: code.getattr(intern!(py, "co_filename"))?.extract()?,
            line: next.getattr(intern!(py, "f_lineno"))?.extract::<Option<u32>>()?.unwrap_or_default(),
        });
        next = next.getattr(intern!(py, "f_back"))?;
    }
    Ok(())
}
