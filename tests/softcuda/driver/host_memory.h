// Host memory that devices may use: allocated by CUDA, or the caller's own, registered.
#pragma once

#include <cuda.h>

#include <cstddef>

namespace softcuda {

// Whether devices may use all of it; `owned`: whether CUDA allocated it, so that its addresses are those of the device.
bool is_pinned(CUdeviceptr address, size_t bytes);
bool is_owned(CUdeviceptr address, size_t bytes);

// The host's address behind a device's address of registered memory, where the two differ; else null.
void* host_behind(CUdeviceptr address);

// The device's address of pinned memory; 0 of other memory.
CUdeviceptr device_address_of(void* host);

}  // namespace softcuda
