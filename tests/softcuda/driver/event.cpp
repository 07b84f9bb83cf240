// Events: a count of records and one of completions, in shared memory if processes share it.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "call.h"
#include "capture.h"
#include "context.h"
#include "event.h"
#include "leaks.h"
#include "memory.h"
#include "stream.h"

namespace softcuda {

std::shared_ptr<EventState> map_event(int file) {
  void* page = mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (page == MAP_FAILED) return nullptr;
  // A new file is all zeros, which is a state that nothing was recorded in.
  return {static_cast<EventState*>(page), [](EventState* state) { munmap(state, PAGE); }};
}

namespace {

uint64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void complete(EventState& event, uint64_t record) {
  running().progress->stores.publish();
  event.time = nanoseconds();
  uint64_t done = event.done;
  // Two streams may record one event, and end in the other order.
  while (done < record && !event.done.compare_exchange_weak(done, record)) {
  }
  notify_waiters();
}

std::string describe(const EventState& event, uint64_t record) {
  return "record " + std::to_string(record) + " of an event, of which " + std::to_string(event.done) + " are done";
}

void await(const EventState& event, uint64_t record) {
  wait_until(
      running().progress->device, [&] { return event.done >= record; }, [&] { return describe(event, record); });
}

bool is_complete(const EventState& event) { return event.done >= event.recorded; }

CUresult record(CUevent event, CUstream handle, unsigned flags) {
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream || !check_handle(Kind::Event, event)) return CUDA_ERROR_INVALID_HANDLE;
  if (event->device != stream->device) {
    return breach(CUDA_ERROR_INVALID_HANDLE, "%s: an event of device %d on a stream of device %d", current_call(),
                  event->device, stream->device);
  }
  const auto state = event->state;
  if (stream->capture && !(flags & CU_EVENT_RECORD_EXTERNAL)) {
    if (stream->capture->spoilt) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->capture = stream->capture;
    event->tail = stream->tail;
    return CUDA_SUCCESS;
  }
  event->capture = nullptr;
  if (stream->capture) {
    // Each launch of the graph records it: who waits for it after a launch waits for what the graph does before.
    return submit(handle, CU_GRAPH_NODE_TYPE_EVENT_RECORD, nullptr, [state] {
      const uint64_t number = ++state->recorded;
      return [state, number] { complete(*state, number); };
    });
  }
  const uint64_t number = ++state->recorded;
  return submit(handle, CU_GRAPH_NODE_TYPE_EVENT_RECORD, [state, number] { complete(*state, number); });
}

// The stream joins the capture that the event was recorded in.
CUresult join(CUstream stream, const CUevent_st& event) {
  if (!event.capture->active) return CUDA_ERROR_CAPTURED_EVENT;
  if (stream->capture && stream->capture != event.capture) {
    return spoil(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE, "it waited for an event of another capture");
  }
  if (stream->legacy) {
    return spoil(*event.capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the default stream waited for an event of it");
  }
  if (!stream->capture) {
    stream->capture = event.capture;
    stream->tail.clear();
  }
  for (CUgraphNode node : event.tail) {
    if (std::find(stream->tail.begin(), stream->tail.end(), node) == stream->tail.end()) stream->tail.push_back(node);
  }
  return CUDA_SUCCESS;
}

CUresult wait(CUstream handle, CUevent event, unsigned flags) {
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream || !check_handle(Kind::Event, event)) return CUDA_ERROR_INVALID_HANDLE;
  const bool external = flags & CU_EVENT_WAIT_EXTERNAL;
  if (event->capture && !external) return join(stream, *event);
  const auto state = event->state;
  if (stream->capture && external) {
    // For what was recorded before the launch.
    return submit(handle, CU_GRAPH_NODE_TYPE_WAIT_EVENT, nullptr, [state] {
      const uint64_t number = state->recorded;
      return [state, number] { await(*state, number); };
    });
  }
  const uint64_t number = state->recorded;
  if (!number) return CUDA_SUCCESS;
  if (stream->capture) {
    return spoil(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "it waited for an event from outside of it");
  }
  if (state->done >= number) return CUDA_SUCCESS;
  return submit(handle, CU_GRAPH_NODE_TYPE_WAIT_EVENT, [state, number] { await(*state, number); });
}

}  // namespace
}  // namespace softcuda

using namespace softcuda;

API cuEventCreate(CUevent* created, unsigned flags) {
  ENTER(Plain);
  const bool shared = flags & CU_EVENT_INTERPROCESS;
  if (shared && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
  auto* event = new CUevent_st;
  event->flags = flags;
  event->device = current_device();
  if (shared) {
    event->file = memfd_create("softcuda-event", MFD_CLOEXEC);
    if (event->file >= 0 && !ftruncate(event->file, PAGE)) event->state = map_event(event->file);
  } else {
    event->state = std::make_shared<EventState>();
  }
  if (!event->state) {
    if (event->file >= 0) close(event->file);
    delete event;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  note_made(Kind::Event, key_of(event));
  *created = event;
  return CUDA_SUCCESS;
}

API cuEventDestroy_v2(CUevent event) {
  ENTER(Plain);
  Lock lock(state());
  if (!check_handle(Kind::Event, event)) return CUDA_ERROR_INVALID_HANDLE;
  if (event->file >= 0) close(event->file);
  note_gone(Kind::Event, key_of(event));
  delete event;
  return CUDA_SUCCESS;
}

API cuEventRecord(CUevent event, CUstream stream) {
  ENTER(Plain);
  return record(event, stream, 0);
}

API cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
  ENTER(Plain);
  return record(event, stream, flags);
}

API cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  ENTER(Plain);
  return wait(stream, event, flags);
}

API cuEventQuery(CUevent event) {
  ENTER(NotInCapture);
  Lock lock(state());
  if (!check_handle(Kind::Event, event)) return CUDA_ERROR_INVALID_HANDLE;
  if (event->capture) return CUDA_ERROR_CAPTURED_EVENT;
  return is_complete(*event->state) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API cuEventSynchronize(CUevent event) {
  ENTER(NotInCapture);
  std::shared_ptr<EventState> pending;
  uint64_t number;
  int device;
  {
    Lock lock(state());
    if (!check_handle(Kind::Event, event)) return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture) return CUDA_ERROR_CAPTURED_EVENT;
    pending = event->state;
    number = pending->recorded;
    device = event->device;
  }
  wait_until(
      device, [&] { return pending->done >= number; }, [&] { return describe(*pending, number); });
  return sticky_error(device);
}

API cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  ENTER(NotInCapture);
  Lock lock(state());
  if (!check_handle(Kind::Event, start) || !check_handle(Kind::Event, end)) return CUDA_ERROR_INVALID_HANDLE;
  const bool timed = !((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING);
  if (!timed || !start->state->recorded || !end->state->recorded) return CUDA_ERROR_INVALID_HANDLE;
  if (!is_complete(*start->state) || !is_complete(*end->state)) return CUDA_ERROR_NOT_READY;
  const auto elapsed = static_cast<int64_t>(end->state->time - start->state->time);
  *milliseconds = static_cast<float>(static_cast<double>(elapsed) / 1e6);
  return CUDA_SUCCESS;
}

API cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}
