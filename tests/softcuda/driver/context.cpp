#include "context.h"

#include <algorithm>
#include <vector>

#include "call.h"
#include "faults.h"
#include "settings.h"
#include "stream.h"

namespace softcuda {

namespace {

thread_local CUcontext current = nullptr;
thread_local std::vector<CUcontext> outer;

constexpr int MAX_DEVICES = 16;

}  // namespace

int device_count() { return std::min(static_cast<int>(settings().visible.size()), MAX_DEVICES); }

bool is_device(int device) { return device >= 0 && device < device_count(); }

int number_on_machine(int device) { return settings().visible[static_cast<size_t>(device)]; }

int number_in_process(int device) {
  const auto& visible = settings().visible;
  const auto found = std::find(visible.begin(), visible.end(), device);
  return found == visible.end() ? -1 : static_cast<int>(found - visible.begin());
}

int current_device() { return current ? current->device : 0; }

CUcontext primary_context(int device) {
  static CUctx_st* const contexts = [] {
    auto* made = new CUctx_st[MAX_DEVICES]{};
    for (int i = 0; i < MAX_DEVICES; ++i) made[i].device = i;
    return made;
  }();
  return &contexts[device];
}

CUresult sticky_error(int device) { return static_cast<CUresult>(primary_context(device)->sticky.load()); }

void break_device(int device, CUresult error) {
  int none = CUDA_SUCCESS;
  primary_context(device)->sticky.compare_exchange_strong(none, error);
}

void work_on(int device) { current = primary_context(device); }

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_EXPORT int softcuda_sticky_error() { return sticky_error(current_device()); }

API cuInit(unsigned) {
  ENTER(Anywhere);
  if (CUresult planted = fault_of(__func__, site.uses)) return planted;
  return initialise();
}

API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER(AnyDevice);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (CUresult sticky = sticky_error(device)) return sticky;
  Lock lock(state());
  *context = primary_context(device);
  ++(*context)->references;
  return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  ENTER(AnyDevice);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Lock lock(state());
  if (!primary_context(device)->references) return CUDA_ERROR_INVALID_CONTEXT;
  // What it holds stays, unlike on a real device: users who ask for leaks hear of it.
  --primary_context(device)->references;
  return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  ENTER(AnyDevice);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Lock lock(state());
  *flags = primary_context(device)->flags;
  *active = primary_context(device)->references > 0;
  return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  ENTER(AnyDevice);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Lock lock(state());
  primary_context(device)->flags = flags;
  return CUDA_SUCCESS;
}

API cuCtxGetCurrent(CUcontext* context) {
  ENTER(AnyDevice);
  *context = current;
  return CUDA_SUCCESS;
}

API cuCtxSetCurrent(CUcontext context) {
  ENTER(AnyDevice);
  current = context;
  return CUDA_SUCCESS;
}

API cuCtxPushCurrent_v2(CUcontext context) {
  ENTER(AnyDevice);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  outer.push_back(current);
  current = context;
  return CUDA_SUCCESS;
}

API cuCtxPopCurrent_v2(CUcontext* context) {
  ENTER(AnyDevice);
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = current;
  current = outer.empty() ? nullptr : outer.back();
  if (!outer.empty()) outer.pop_back();
  return CUDA_SUCCESS;
}

API cuCtxGetDevice(CUdevice* device) {
  ENTER(AnyDevice);
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current->device;
  return CUDA_SUCCESS;
}

API cuCtxGetId(CUcontext context, unsigned long long* id) {
  ENTER(AnyDevice);
  if (!context) context = current;
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  // A device has one context.
  *id = static_cast<unsigned long long>(context->device) + 1;
  return CUDA_SUCCESS;
}

API cuCtxGetFlags(unsigned* flags) {
  ENTER(AnyDevice);
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  *flags = current->flags;
  return CUDA_SUCCESS;
}

API cuCtxGetApiVersion(CUcontext, unsigned* version) {
  ENTER(AnyDevice);
  *version = static_cast<unsigned>(settings().driver_version);
  return CUDA_SUCCESS;
}

API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER(AnyDevice);
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}

API cuCtxSynchronize() {
  ENTER(NotInCapture);
  return wait_for_device(current_device());
}

API cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
  ENTER(AnyDevice);
  if (!peer || !settings().peers || peer->device == current_device()) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  return CUDA_SUCCESS;
}
