// Kernels' twins on the host: found by name, run over the alias of device memory.
#pragma once

#include <cuda.h>

#include <memory>

#include "softcuda_twin.h"

namespace softcuda {

// From the libraries that SOFTCUDA_TWINS names; null, and a word about it, if none has it.
const Twin* find_twin(const char* kernel);

// Submits a launch; the parameters are copied. If the kernel's code is gone when it runs, that breaks the device.
CUresult launch(CUstream stream, const Twin& twin, std::weak_ptr<const void> code, const unsigned* dims, void** parameters);
// Of code that never goes.
std::weak_ptr<const void> lasting_code();

}  // namespace softcuda
