// Streams and events.
#include "runtime.h"

using namespace softcuda_runtime;

API cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return with_context([&] { return cuStreamCreateWithPriority(stream, flags, priority); });
}

API cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return with_context([&] { return cuStreamCreate(stream, flags); });
}

API cudaStreamCreate(cudaStream_t* stream) {
  return with_context([&] { return cuStreamCreate(stream, 0); });
}

API cudaStreamDestroy(cudaStream_t stream) { return result(cuStreamDestroy_v2(stream)); }

API cudaStreamSynchronize(cudaStream_t stream) {
  return with_context([&] { return cuStreamSynchronize(stream); });
}

API cudaStreamQuery(cudaStream_t stream) {
  return with_context([&] { return cuStreamQuery(stream); });
}

API cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return with_context([&] { return cuStreamGetPriority(stream, priority); });
}

API cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  return with_context([&] { return cuStreamGetFlags(stream, flags); });
}

API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return with_context([&] { return cuStreamWaitEvent(stream, event, flags); });
}

API cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned flags) {
  return with_context([&] {
    return cuStreamAddCallback(stream, reinterpret_cast<CUstreamCallback>(function), data, flags);
  });
}

API cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return with_context([&] { return cuLaunchHostFunc(stream, function, data); });
}

API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return with_context([&] { return cuEventCreate(event, flags); });
}

API cudaEventCreate(cudaEvent_t* event) {
  return with_context([&] { return cuEventCreate(event, 0); });
}

API cudaEventDestroy(cudaEvent_t event) { return result(cuEventDestroy_v2(event)); }

API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return with_context([&] { return cuEventRecord(event, stream); });
}

API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return with_context([&] { return cuEventRecordWithFlags(event, stream, flags); });
}

API cudaEventQuery(cudaEvent_t event) { return result(cuEventQuery(event)); }

API cudaEventSynchronize(cudaEvent_t event) { return result(cuEventSynchronize(event)); }

API cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return result(cuEventElapsedTime_v2(milliseconds, start, end));
}
