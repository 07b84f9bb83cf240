#include "group.h"

#include <unistd.h>

#include <thread>

#include "settings.h"

namespace fakenccl {

namespace {

struct Group {
  int depth = 0;
  std::vector<Call> calls;
};

Group& group() {
  static thread_local Group group;
  return group;
}

// The calls of a group on one communicator and one stream: one kernel.
struct Launch {
  std::shared_ptr<Communicator> comm;
  CUstream stream;
  std::vector<Call> calls;

  void run() const {
    if (comm->begin_launch()) {
      const auto passed = this->passed();
      const uint64_t number = comm->launches();
      comm->tell(number, passed);
      std::vector<Transfer> transfers;
      for (const Call& call : calls) call.moves(transfers);
      if (comm->exchange(transfers)) {
        // Undefined there. What has come from a rank says that it has told this.
        for (const Transfer& transfer : transfers) {
          if (!transfer.is_send && transfer.length && comm->mixes(number, passed, transfer.peer)) {
            breach("registered memory meets other memory");
          }
        }
        for (const Call& call : calls) {
          if (call.computes) call.computes();
        }
      }
    }
    comm->end_launch();
  }

  // Whether all memory is registered that the calls pass.
  Communicator::Passed passed() const {
    auto passed = Communicator::Passed::Nothing;
    for (const Call& call : calls) {
      for (const auto& [begin, bytes] : call.memory) {
        if (!bytes) continue;
        if (!comm->is_enrolled(begin, bytes)) return Communicator::Passed::Plain;
        passed = Communicator::Passed::Registered;
      }
    }
    return passed;
  }

  Result submit() {
    if (comm->is_aborted()) return Success;
    CUstreamCaptureStatus capture;
    if (cuStreamIsCapturing(stream, &capture)) return UnhandledCudaError;
    const bool is_captured = capture != CU_STREAM_CAPTURE_STATUS_NONE;
    if (!is_captured) {
      if (const Result failed = comm->follow(stream)) return failed;
    }
    // It stays, since a graph may run it again.
    auto* body = new Launch(*this);
    if (cuLaunchHostFunc(stream, [](void* body) { static_cast<Launch*>(body)->run(); }, body)) return UnhandledCudaError;
    return is_captured ? Success : comm->followed_by_next(stream);
  }
};

std::vector<Launch> launches(std::vector<Call> calls) {
  std::vector<Launch> launches;
  for (Call& call : calls) {
    Launch* found = nullptr;
    for (Launch& launch : launches) {
      if (launch.comm == call.comm && launch.stream == call.stream) found = &launch;
    }
    if (!found) {
      launches.push_back({call.comm, call.stream, {}});
      found = &launches.back();
    }
    found->calls.push_back(std::move(call));
  }
  return launches;
}

Result submit(std::vector<Launch> launches) {
  for (Launch& launch : launches) {
    if (const Result failed = launch.submit()) return failed;
  }
  return Success;
}

// As NCCL: ranks connect at the first message in a direction, all those of a group at once, and nothing is on a stream before.
void connect(const std::vector<Launch>& all) {
  const auto each = [&](auto&& what) {
    for (const Launch& launch : all) {
      for (const Call& call : launch.calls) {
        if (call.peer >= 0) what(*launch.comm, call);
      }
    }
  };
  each([](Communicator& comm, const Call& call) { comm.connect(call.peer, call.is_send); });
  each([](Communicator& comm, const Call& call) {
    while (!comm.is_connected(call.peer, call.is_send)) usleep(50);
  });
}

// As NCCL: where communicators do not block, a thread puts their calls on streams.
int flush() {
  auto all = launches(std::move(group().calls));
  group().calls.clear();
  if (all.empty()) return Success;
  count("groups");
  for (const Launch& launch : all) {
    if (launch.comm->is_blocking != all[0].comm->is_blocking) {
      last_error() = "communicators that block and others are in one group";
      return InvalidUsage;
    }
  }
  if (all[0].comm->is_blocking) {
    connect(all);
    return submit(std::move(all));
  }
  CUcontext context;
  if (cuCtxGetCurrent(&context)) return UnhandledCudaError;
  for (const Launch& launch : all) {
    launch.comm->state = InProgress;
    launch.comm->begin_putting();
  }
  std::thread([all = std::move(all), context]() mutable {
    cuCtxSetCurrent(context);
    usleep(settings().launch_us);
    connect(all);
    std::vector<std::shared_ptr<Communicator>> comms;
    for (const Launch& launch : all) comms.push_back(launch.comm);
    const Result result = submit(std::move(all));
    for (const auto& comm : comms) comm->end_putting();
    for (const auto& comm : comms) {
      // What has gone wrong on the stream meanwhile stays.
      int expected = InProgress;
      comm->state.compare_exchange_strong(expected, result);
    }
  }).detach();
  return InProgress;
}

}  // namespace

int add(Call call) {
  group().calls.push_back(std::move(call));
  return group().depth ? Success : flush();
}

}  // namespace fakenccl

using namespace fakenccl;

API int ncclGroupStart() {
  group().depth++;
  return Success;
}

API int ncclGroupEnd() {
  if (!group().depth) {
    last_error() = "ncclGroupEnd: not in a group call.";
    return InvalidUsage;
  }
  return --group().depth ? Success : flush();
}
