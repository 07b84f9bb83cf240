// Kernels that a library registers when it is loaded. Only those run that have a twin on the host, found by name.
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "runtime.h"

using namespace softcuda_runtime;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Registered {
  std::mutex mutex;
  std::unordered_map<const void*, std::string> names;  // by the address of the host's stub
};

Registered& registered() {
  static Registered* const registered = new Registered;
  return *registered;
}

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  void* stream;
};
thread_local Configuration configuration;

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** parameters, cudaStream_t stream) {
  std::string name = "(unregistered)";
  {
    std::lock_guard<std::mutex> lock(registered().mutex);
    const auto found = registered().names.find(function);
    if (found != registered().names.end()) name = found->second;
  }
  unsigned dims[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
  return with_context([&] { return softcuda_launch_named(name.c_str(), dims, parameters, stream); });
}

}  // namespace

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                   int*) {
  std::lock_guard<std::mutex> lock(registered().mutex);
  registered().names[host] = name;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}

API __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}

API __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

API __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** parameters, size_t, cudaStream_t stream) {
  return launch(reinterpret_cast<const void*>(kernel), grid, block, parameters, stream);
}

API cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** parameters, size_t, cudaStream_t stream) {
  return launch(function, grid, block, parameters, stream);
}

API cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** parameters) {
  return launch(function, config->gridDim, config->blockDim, parameters, config->stream);
}

API cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** parameters, size_t,
                                cudaStream_t stream) {
  return launch(function, grid, block, parameters, stream);
}

API cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

API cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
