// Tensors in memory that the other processes of the host can map: the host's, and that of CUDA devices. Included by
// register.cpp.
#include <ATen/ATen.h>

#include "backend.h"
#include "errors.h"
#include "ncclx_abi.h"

namespace ncclx {

// A tensor of `bytes` zeros. The memory lives as long as the tensor's storage.
inline at::Tensor shared_memory(const NcclxEngine* engine, int64_t bytes) {
  NcclxMemory* memory = nullptr;
  void* ptr = nullptr;
  NcclxError error{};
  const int32_t status = engine->memory_new(static_cast<uint64_t>(bytes), &memory, &ptr, &error);
  if (status != NCCLX_OK) raise(status, error.text);
  return at::from_blob(ptr, {bytes}, [engine, memory](void*) { engine->memory_free(memory); }, at::kByte);
}

bool NcclxBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  NcclxError error;
  return device >= 0 && device < engine_->cuda_devices(&error);
}

// The package's object for it, which lives as long as the process. The extension does not link CUDA, so PyTorch's class is
// not known here; but it and its bases have one base each, the first of which is c10's.
std::shared_ptr<c10::Allocator> NcclxBackend::getMemAllocator() {
  const py::gil_scoped_acquire lock;
  const py::object found = py::module_::import("ncclx_rs._memory").attr("cuda_allocator")();
  auto* instance = reinterpret_cast<py::detail::instance*>(found.ptr());
  auto* allocator = static_cast<c10::Allocator*>(instance->get_value_and_holder().value_ptr());
  return {allocator, [](c10::Allocator*) {}};
}

at::Tensor NcclxBackend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.has_device() || !options.device().is_cuda()) {
    refuse("allocate_tensor", "device", "a CUDA device", options.has_device() ? options.device().str() : "none");
  }
  const py::gil_scoped_acquire lock;
  const auto make = py::module_::import("ncclx_rs._memory").attr("empty_on_device");
  return make(size, c10::typeMetaToScalarType(options.dtype()), options.device()).cast<at::Tensor>();
}

}  // namespace ncclx
