//! Where tensors lie, for the classes that the package gives tensors.

use pyo3::prelude::*;

/// A contiguous tensor's address; `None` if its storage does not have its bytes. That of a wrapper subclass has no memory, and any
/// may have been resized.
pub(crate) fn address_of(tensor: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let number = |method| tensor.call_method0(method)?.extract::<usize>();
    let (address, element) = (number("data_ptr")?, number("element_size")?);
    let begin = number("storage_offset")?.saturating_mul(element);
    let len = number("numel")?.saturating_mul(element);
    let room: usize = tensor.call_method0("untyped_storage")?.call_method0("nbytes")?.extract()?;
    // Without memory, the storage is at address zero.
    let has_memory = len == 0 || (address != begin && begin.saturating_add(len) <= room);
    Ok(has_memory.then_some(address))
}
