// What devices say of themselves: one that can do all that the documentation knows, as far as it is done here.
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "call.h"
#include "context.h"
#include "settings.h"

namespace softcuda {

namespace {

// Attributes that are not here are 0. A test sets others with SOFTCUDA_ATTRIBUTES.
const std::unordered_map<int, int>& capabilities() {
  static const auto* const table = new std::unordered_map<int, int>{
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7fffffff},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
      {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 1 << 20},
      {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1000000},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
      {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 1},
  };
  return *table;
}

}  // namespace

int attribute_of(int device, CUdevice_attribute attribute) {
  const auto chosen = settings().attributes.find(attribute);
  if (chosen != settings().attributes.end()) return chosen->second;
  if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) return number_on_machine(device) + 1;
  if (attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) return !settings().host_pointers_differ;
  const auto known = capabilities().find(attribute);
  return known == capabilities().end() ? 0 : known->second;
}

}  // namespace softcuda

using namespace softcuda;

API cuDriverGetVersion(int* version) {
  ENTER(Anywhere);
  *version = settings().driver_version;
  return CUDA_SUCCESS;
}

API cuDeviceGetCount(int* count) {
  ENTER(AnyDevice);
  *count = device_count();
  return CUDA_SUCCESS;
}

API cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER(AnyDevice);
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

API cuDeviceGetName(char* name, int length, CUdevice device) {
  ENTER(AnyDevice);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, static_cast<size_t>(length), "Software CUDA (host memory)");
  return CUDA_SUCCESS;
}

API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  ENTER(AnyDevice);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  memset(uuid, 0x5c, sizeof *uuid);
  uuid->bytes[15] = static_cast<char>(number_on_machine(device));
  return CUDA_SUCCESS;
}

API cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

API cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  ENTER(AnyDevice);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = settings().memory;
  return CUDA_SUCCESS;
}

API cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
  ENTER(AnyDevice);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", number_on_machine(device) + 1);
  return CUDA_SUCCESS;
}

API cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  ENTER(AnyDevice);
  if (!is_device(device) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && settings().peers;
  return CUDA_SUCCESS;
}

API cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice peer) {
  ENTER(AnyDevice);
  if (!is_device(device) || !is_device(peer) || device == peer) return CUDA_ERROR_INVALID_DEVICE;
  *value = settings().peers && attribute != CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED;
  return CUDA_SUCCESS;
}

// How many the machine has, for libnvidia-ml, which must not start CUDA.
SOFTCUDA_EXPORT int softcuda_devices() { return settings().devices; }

API cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  ENTER(AnyDevice);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute_of(device, attribute);
  return CUDA_SUCCESS;
}
