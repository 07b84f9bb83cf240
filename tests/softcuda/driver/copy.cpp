// Copies and fills.
#include <cstring>
#include <memory>

#include "call.h"
#include "context.h"
#include "host_memory.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace softcuda {

namespace {

enum class Returns { AtOnce, WhenDone };

struct Plane {
  CUdeviceptr start;
  size_t pitch;
};

bool overlap(const char* one, const char* other, size_t bytes) { return one < other + bytes && other < one + bytes; }

// Writes as a device does: others may see the first half alone, and under weak order nothing before a fence.
void store(CUdeviceptr to, const char* from, size_t bytes) {
  Progress& progress = *running().progress;
  char* target = reach(to, bytes, progress.device, "written to");
  if (!target) return;
  if (settings().weak) return progress.stores.hold(to, std::vector<char>(from, from + bytes));
  if (overlap(target, from, bytes)) {
    memmove(target, from, bytes);
    return;
  }
  memcpy(target, from, bytes / 2);
  running().delay->between();
  memcpy(target + bytes / 2, from + bytes / 2, bytes - bytes / 2);
}

void move(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  Progress& progress = *running().progress;
  progress.stores.publish_for_read(from, bytes);
  const char* source = reach(from, bytes, progress.device, "read");
  if (source) store(to, source, bytes);
}

bool is_pageable(CUdeviceptr address, size_t bytes) {
  return !is_device_address(address) && !host_behind(address) && !is_pinned(address, bytes);
}

bool is_capturing(CUstream handle) {
  Lock lock(state());
  CUstream stream = resolve(handle);
  return stream && stream->capture;
}

CUresult finish(CUstream stream, CUresult submitted, Returns returns) {
  return submitted || returns == Returns::AtOnce ? submitted : wait_for_stream(stream);
}

CUresult copy(CUstream stream, CUdeviceptr to, CUdeviceptr from, size_t bytes, Returns returns) {
  if (!bytes) return CUDA_SUCCESS;
  amounts().copied_bytes += bytes;
  const bool captured = is_capturing(stream);
  // Between devices, and only there, even calls without "Async" return at once.
  if (is_device_address(to) && is_device_address(from)) returns = Returns::AtOnce;
  if (!captured && is_pageable(to, bytes)) returns = Returns::WhenDone;
  if (!captured && returns == Returns::AtOnce && is_pageable(from, bytes)) {
    // The caller may change its memory when the call returns.
    const auto staged = std::make_shared<std::vector<char>>(bytes);
    memcpy(staged->data(), reinterpret_cast<const void*>(from), bytes);
    return submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY, [=] { store(to, staged->data(), bytes); });
  }
  const CUresult submitted = submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY, [=] { move(to, from, bytes); });
  return finish(stream, submitted, captured ? Returns::AtOnce : returns);
}

CUresult copy_rows(CUstream stream, Plane to, Plane from, size_t width, size_t height, Returns returns) {
  if (!width || !height) return CUDA_SUCCESS;
  if (is_pageable(to.start, width) || is_pageable(from.start, width)) returns = Returns::WhenDone;
  const CUresult submitted = submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY, [=] {
    for (size_t row = 0; row < height; ++row) move(to.start + row * to.pitch, from.start + row * from.pitch, width);
  });
  return finish(stream, submitted, is_capturing(stream) ? Returns::AtOnce : returns);
}

Plane plane(CUmemorytype type, const void* host, CUdeviceptr device, size_t x, size_t y, size_t pitch) {
  const CUdeviceptr start = type == CU_MEMORYTYPE_HOST ? reinterpret_cast<CUdeviceptr>(host) : device;
  return {start + y * pitch + x, pitch};
}

CUresult copy_2d(const CUDA_MEMCPY2D& what, CUstream stream, Returns returns) {
  if (what.srcMemoryType == CU_MEMORYTYPE_ARRAY || what.dstMemoryType == CU_MEMORYTYPE_ARRAY) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const Plane to =
      plane(what.dstMemoryType, what.dstHost, what.dstDevice, what.dstXInBytes, what.dstY, what.dstPitch);
  const Plane from =
      plane(what.srcMemoryType, what.srcHost, what.srcDevice, what.srcXInBytes, what.srcY, what.srcPitch);
  return copy_rows(stream, to, from, what.WidthInBytes, what.Height, returns);
}

template <class Value>
CUresult fill(CUstream stream, CUdeviceptr to, Value value, size_t count, Returns returns) {
  if (!count) return CUDA_SUCCESS;
  if (to % sizeof(Value)) return CUDA_ERROR_INVALID_VALUE;
  if (is_device_address(to)) returns = Returns::AtOnce;
  const CUresult submitted = submit(stream, CU_GRAPH_NODE_TYPE_MEMSET, [=] {
    const std::vector<Value> values(count, value);
    store(to, reinterpret_cast<const char*>(values.data()), count * sizeof(Value));
  });
  return finish(stream, submitted, is_capturing(stream) ? Returns::AtOnce : returns);
}

CUdeviceptr address_of(const void* host) { return reinterpret_cast<CUdeviceptr>(host); }

}  // namespace
}  // namespace softcuda

using namespace softcuda;

API cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  ENTER(NotInCapture);
  return copy(nullptr, to, from, bytes, Returns::WhenDone);
}

API cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  ENTER(NotInCapture);
  return copy(nullptr, to, address_of(from), bytes, Returns::WhenDone);
}

API cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  ENTER(NotInCapture);
  return copy(nullptr, address_of(to), from, bytes, Returns::WhenDone);
}

API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  ENTER(NotInCapture);
  return copy(nullptr, to, from, bytes, Returns::WhenDone);
}

API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER(Plain);
  return copy(stream, to, from, bytes, Returns::AtOnce);
}

API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  ENTER(Plain);
  return copy(stream, to, address_of(from), bytes, Returns::AtOnce);
}

API cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER(Plain);
  return copy(stream, address_of(to), from, bytes, Returns::AtOnce);
}

API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER(Plain);
  return copy(stream, to, from, bytes, Returns::AtOnce);
}

API cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream stream) {
  ENTER(Plain);
  return copy(stream, to, from, bytes, Returns::AtOnce);
}

API cuMemcpy2D_v2(const CUDA_MEMCPY2D* what) {
  ENTER(NotInCapture);
  return copy_2d(*what, nullptr, Returns::WhenDone);
}

API cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* what, CUstream stream) {
  ENTER(Plain);
  return copy_2d(*what, stream, Returns::AtOnce);
}

API cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  ENTER(NotInCapture);
  return fill(nullptr, to, value, count, Returns::WhenDone);
}

API cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
  ENTER(NotInCapture);
  return fill(nullptr, to, value, count, Returns::WhenDone);
}

API cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
  ENTER(NotInCapture);
  return fill(nullptr, to, value, count, Returns::WhenDone);
}

API cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  ENTER(Plain);
  return fill(stream, to, value, count, Returns::AtOnce);
}

API cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  ENTER(Plain);
  return fill(stream, to, value, count, Returns::AtOnce);
}

API cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  ENTER(Plain);
  return fill(stream, to, value, count, Returns::AtOnce);
}
