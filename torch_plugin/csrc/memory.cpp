// Tensors in shared memory, which the other processes of the host can map.
#include <ATen/ATen.h>

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

}  // namespace ncclx
