// The few functions of libnvidia-ml.so.1 that PyTorch calls: devices, no fabric, no NVLink.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#define API extern "C" __attribute__((visibility("default"))) int

// Of our libcuda.so.1.
extern "C" int softcuda_devices();

namespace {
constexpr int DONE = 0;
constexpr int NOT_SUPPORTED = 3;
constexpr int P2P_IS_FINE = 0;
}  // namespace

API nvmlInit() { return DONE; }
API nvmlInit_v2() { return DONE; }
API nvmlShutdown() { return DONE; }

API nvmlDeviceGetCount_v2(unsigned* count) {
  // All of the machine, whatever CUDA_VISIBLE_DEVICES says; and without cuInit, after which a process must not fork.
  *count = static_cast<unsigned>(softcuda_devices());
  return DONE;
}

// A device's handle is its number plus one.
API nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(index) + 1);
  return DONE;
}

API nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  unsigned number = 1;
  sscanf(bus, "%*x:%x", &number);
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(number));
  return DONE;
}

API nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  const size_t length = strlen(uuid);
  unsigned number = 0;
  if (length > 2) sscanf(uuid + length - 2, "%x", &number);
  return nvmlDeviceGetHandleByIndex_v2(number, device);
}

API nvmlDeviceGetUUID(void* device, char* text, unsigned length) {
  const auto number = static_cast<unsigned>(reinterpret_cast<uintptr_t>(device)) - 1;
  snprintf(text, length, "GPU-5c5c5c5c-5c5c-5c5c-5c5c-5c5c5c5c5c%02x", number);
  return DONE;
}

API nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return DONE;
}

API nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NOT_SUPPORTED; }
API nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
API nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }

API nvmlDeviceGetP2PStatus(void*, void*, int, int* status) {
  *status = P2P_IS_FINE;
  return DONE;
}

API nvmlSystemGetCudaDriverVersion_v2(int* version) {
  cuDriverGetVersion(version);
  return DONE;
}

extern "C" __attribute__((visibility("default"))) const char* nvmlErrorString(int error) {
  return error ? "not supported here" : "success";
}
