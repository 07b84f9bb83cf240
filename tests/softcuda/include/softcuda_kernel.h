// Lets the host's compiler take a kernel's source, which NVRTC takes as it is:
//
//     #ifndef __CUDACC__
//     #include "softcuda_kernel.h"
//     #else
//     #define SOFTCUDA_TWIN(name)
//     #endif
//     extern "C" __global__ void scale(float* values, float factor, unsigned count) { ... }
//     SOFTCUDA_TWIN(scale)
//
// Compiled into a shared library that SOFTCUDA_TWINS names, it runs where the driver is asked to launch `scale`. Threads run
// one after the other: shared memory and barriers are not offered, so that a kernel that uses them does not compile.
// Compile with -ffp-contract=off, unless the kernel asks for fused multiply-adds.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "softcuda_twin.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

namespace softcuda {

struct Dim {
  unsigned x, y, z;
};
inline thread_local Dim block_size, grid_size, thread_in_block, block_in_grid;

template <auto kernel>
struct TwinOf;

template <class... Parameters, void (*kernel)(Parameters...)>
struct TwinOf<kernel> {
  static constexpr size_t SIZES[] = {sizeof(Parameters)...};

  template <size_t... Index>
  static void call(void** parameters, std::index_sequence<Index...>) {
    kernel(*static_cast<Parameters*>(parameters[Index])...);
  }

  static void run(void** parameters, const unsigned* dims) {
    grid_size = {dims[0], dims[1], dims[2]};
    block_size = {dims[3], dims[4], dims[5]};
    each(grid_size, block_in_grid, [&] {
      each(block_size, thread_in_block, [&] { call(parameters, std::index_sequence_for<Parameters...>()); });
    });
  }

  template <class Body>
  static void each(const Dim& size, Dim& index, Body body) {
    for (index.z = 0; index.z < size.z; ++index.z) {
      for (index.y = 0; index.y < size.y; ++index.y) {
        for (index.x = 0; index.x < size.x; ++index.x) body();
      }
    }
  }

  static const Twin* twin() {
    static const Twin twin{sizeof...(Parameters), SIZES, run};
    return &twin;
  }
};

}  // namespace softcuda

#define threadIdx softcuda::thread_in_block
#define blockIdx softcuda::block_in_grid
#define blockDim softcuda::block_size
#define gridDim softcuda::grid_size

#define SOFTCUDA_TWIN(name)                                                                            \
  extern "C" __attribute__((visibility("default"))) const softcuda::Twin* softcuda_twin_##name() { \
    return softcuda::TwinOf<name>::twin();                                                             \
  }
