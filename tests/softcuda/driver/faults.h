// Failures on demand: calls that fail at a chosen use, devices that fall off.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace softcuda {

// What the `use`-th use of a call shall return; CUDA_SUCCESS for most.
CUresult fault_of(const char* call, uint64_t use);

// Counts what queues run, for SOFTCUDA_FALL_OFF.
void count_operation(int device);

}  // namespace softcuda
