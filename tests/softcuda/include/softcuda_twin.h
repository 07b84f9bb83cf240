// What a library of kernels' twins gives the driver: for a kernel k, the function softcuda_twin_k.
#pragma once

#include <cstddef>

namespace softcuda {

struct Twin {
  size_t count;         // of parameters
  const size_t* sizes;  // of each, in bytes
  // Runs all threads of a launch, one after the other; `dims`: of the grid, then of a block.
  void (*run)(void** parameters, const unsigned* dims);
};

}  // namespace softcuda
