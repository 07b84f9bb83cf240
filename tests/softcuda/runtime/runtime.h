// The CUDA runtime as a thin layer over the driver: each function finds a context and calls the driver's function of the
// same purpose. Numbers of errors are the same in both.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
// The header gives these names a version, or another meaning in C++.
#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPointByVersion
#undef cudaGraphInstantiate

#define API extern "C" __attribute__((visibility("default"))) cudaError_t

// Of the driver, beyond its interface.
extern "C" int softcuda_sticky_error();
extern "C" CUresult softcuda_launch_named(const char* kernel, unsigned* dims, void** parameters, CUstream stream);

namespace softcuda_runtime {

// Remembers an error for cudaGetLastError, and gives it back.
cudaError_t remember(cudaError_t error);
cudaError_t result(CUresult error);

// The current device; a thread without a context gets that of device 0.
int device();

int device_count();

inline CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// Calls the driver with a current context.
template <class Call>
cudaError_t with_context(Call call) {
  device();
  return result(call());
}

}  // namespace softcuda_runtime
