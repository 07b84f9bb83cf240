// Kernels: none has a twin yet.
#include "call.h"
#include "log.h"

using namespace softcuda;

SOFTCUDA_EXPORT CUresult softcuda_launch_named(const char* kernel, unsigned*, void**, CUstream) {
  say("kernel %s has no twin on the host", kernel);
  return CUDA_ERROR_NO_BINARY_FOR_GPU;
}
