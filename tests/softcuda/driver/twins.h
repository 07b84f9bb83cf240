// Kernels' twins on the host: found by name, run over the alias of device memory.
#pragma once

#include <cuda.h>

#include "softcuda_twin.h"

namespace softcuda {

// From the libraries that SOFTCUDA_TWINS names; null, and a word about it, if none has it.
const Twin* find_twin(const char* kernel);

// Submits a launch; the parameters are copied.
CUresult launch(CUstream stream, const Twin& twin, const unsigned* dims, void** parameters);

}  // namespace softcuda
