// Kernels of the probes: for NVRTC, and for the host's compiler.
#ifndef __CUDACC__
#include "softcuda_kernel.h"
#else
#define SOFTCUDA_TWIN(name)
#endif

// Computes for so many rounds, on any number of threads; each writes a place of its own.
extern "C" __global__ void busy(unsigned long long* to, unsigned long long rounds) {
  unsigned long long value = threadIdx.x + 1;
  for (unsigned long long i = 0; i < rounds; ++i) value = value * 6364136223846793005ULL + 1442695040888963407ULL;
  to[(unsigned long long)blockIdx.x * blockDim.x + threadIdx.x] = value;
}
SOFTCUDA_TWIN(busy)

// Spins until a word is 1, at most for so many rounds: what the engine's kernels never do.
extern "C" __global__ void spin(volatile unsigned* word, unsigned long long most, unsigned long long* rounds) {
  unsigned long long i = 0;
  while (*word != 1 && i < most) ++i;
  *rounds = i;
}
SOFTCUDA_TWIN(spin)
