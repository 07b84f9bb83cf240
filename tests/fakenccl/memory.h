// Memory of devices, as programs allocate and register it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fakenccl {

// Whether all these bytes are memory of a device that is still there.
bool is_device_memory(uintptr_t begin, size_t bytes);

}  // namespace fakenccl
