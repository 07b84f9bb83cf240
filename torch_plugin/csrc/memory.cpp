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
  const auto [by_library, why] = allocates();
  const py::gil_scoped_acquire lock;
  const py::object found = py::module_::import("ncclx_rs._memory").attr("allocator_of")(by_library, why);
  auto* instance = reinterpret_cast<py::detail::instance*>(found.ptr());
  auto* allocator = static_cast<c10::Allocator*>(instance->get_value_and_holder().value_ptr());
  return {allocator, [](c10::Allocator*) {}};
}

at::Tensor NcclxBackend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.has_device() || !options.device().is_cuda()) {
    refuse("allocate_tensor", "device", "a CUDA device", options.has_device() ? options.device().str() : "none");
  }
  const auto [by_library, why] = allocates();
  const py::gil_scoped_acquire lock;
  const auto make = py::module_::import("ncclx_rs._memory").attr("empty_on_device");
  return make(size, c10::typeMetaToScalarType(options.dtype()), options.device(), by_library, why).cast<at::Tensor>();
}

std::pair<bool, std::string> NcclxBackend::allocates() {
  const auto comm = comm_or_none();
  if (!comm) return {false, ""};
  NcclxError error;
  uint32_t by_library = 0;
  const int32_t status = engine_->allocates(comm->get(), &by_library, &error);
  if (status != NCCLX_OK) raise(status, error.text);
  return {by_library != 0, error.text};
}

void NcclxBackend::register_memory(const at::Tensor& tensor) {
  Written written;
  Operands operands("tensor_register", written, tensor.device());
  operands.lend(tensor, "tensor");
  const auto comm = this->comm();
  auto* const kept = new c10::Storage(tensor.storage());
  const auto let_go = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  NcclxError error;
  const int32_t status = engine_->memory_register(comm->get(), operands.outputs().data(), kept, let_go, &error);
  if (status != NCCLX_OK) raise(status, error.text);
}

void NcclxBackend::deregister_memory(const at::Tensor& tensor) {
  const auto comm = comm_or_none();
  // All that was registered ends with the communicator.
  if (!comm) return;
  Written written;
  Operands operands("tensor_deregister", written, tensor.device());
  operands.lend(tensor, "tensor");
  NcclxError error;
  const int32_t status = engine_->memory_deregister(comm->get(), operands.outputs().data(), &error);
  if (status != NCCLX_OK) raise(status, error.text);
}

}  // namespace ncclx
