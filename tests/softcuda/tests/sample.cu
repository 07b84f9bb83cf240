// Kernels for the tests: for NVRTC, and for the host's compiler.
#ifndef __CUDACC__
#include "softcuda_kernel.h"
#else
#define SOFTCUDA_TWIN(name)
#endif

struct Sources {
  const float* from[4];
};

// Sums in the order of the sources, without fused multiply-adds.
extern "C" __global__ void fold(float* to, Sources sources, unsigned count, unsigned long long size, float factor) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += step) {
    float sum = sources.from[0][i];
    for (unsigned j = 1; j < count; ++j) sum += sources.from[j][i];
    to[i] = sum * factor;
  }
}
SOFTCUDA_TWIN(fold)

// Which thread of which block of a launch in three dimensions wrote each place.
extern "C" __global__ void places(unsigned* to) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  to[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
SOFTCUDA_TWIN(places)

// Has no twin.
extern "C" __global__ void lonely(unsigned* to) { *to = 1; }
