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

  // The graph that its stream is captured for; null if it is not. With the number of the capture.
  Result graph(CUgraph& captured, cuuint64_t* capture = nullptr) const {
    CUstreamCaptureStatus status;
    captured = nullptr;
    return cuStreamGetCaptureInfo(stream, &status, capture, &captured, nullptr, nullptr, nullptr) ||
                   status == CU_STREAM_CAPTURE_STATUS_INVALIDATED
               ? UnhandledCudaError
               : Success;
  }

  Result submit() {
    if (comm->is_aborted()) return Success;
    CUgraph captured;
    cuuint64_t capture;
    if (const Result failed = graph(captured, &capture)) return failed;
    return captured ? submit_to(captured, capture) : submit_once();
  }

 private:
  Result submit_once() {
    if (const Result failed = comm->follow(stream)) return failed;
    const auto run = [](void* launch) {
      const std::unique_ptr<Launch> own(static_cast<Launch*>(launch));
      own->run();
    };
    auto own = std::make_unique<Launch>(*this);
    if (cuLaunchHostFunc(stream, run, own.get())) return UnhandledCudaError;
    own.release();
    return comm->followed_by_next(stream);
  }

  // The graph runs it again and again, and holds the communicator until it is gone.
  Result submit_to(CUgraph captured, cuuint64_t capture) {
    const auto run = [](void* launch) {
      count("replayed");
      static_cast<Launch*>(launch)->run();
    };
    const auto destroy = [](void* launch) {
      const std::unique_ptr<Launch> own(static_cast<Launch*>(launch));
      own->comm->let_go();
    };
    auto own = std::make_unique<Launch>(*this);
    CUuserObject object;
    if (cuUserObjectCreate(&object, own.get(), destroy, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)) return UnhandledCudaError;
    comm->hold();
    Launch* const launch = own.release();
    if (cuGraphRetainUserObject(captured, object, 1, CU_GRAPH_USER_OBJECT_MOVE)) return UnhandledCudaError;
    count("captured");
    if (const Result failed = comm->follow_in(capture, stream)) return failed;
    if (cuLaunchHostFunc(stream, run, launch)) return UnhandledCudaError;
    return comm->followed_in(stream);
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
// That allocates, which spoils a capture that minds what other threads do.
Result connect(const std::vector<Launch>& all) {
  const auto each = [&](auto&& what) {
    for (const Launch& launch : all) {
      for (const Call& call : launch.calls) {
        if (call.peer >= 0) what(*launch.comm, call);
      }
    }
  };
  bool is_new = false;
  each([&](Communicator& comm, const Call& call) { is_new |= comm.connect(call.peer, call.is_send); });
  CUgraph captured = nullptr;
  if (const Result failed = all[0].graph(captured)) return failed;
  CUdeviceptr buffer;
  if (is_new && captured && (cuMemAlloc(&buffer, 1) || cuMemFree(buffer))) return UnhandledCudaError;
  each([](Communicator& comm, const Call& call) {
    while (!comm.is_connected(call.peer, call.is_send)) usleep(50);
  });
  return Success;
}

// As NCCL.
Result refuse_mixtures(const std::vector<Launch>& all) {
  CUgraph first, other;
  if (const Result failed = all[0].graph(first)) return failed;
  for (const Launch& launch : all) {
    if (const Result failed = launch.graph(other)) return failed;
    if (!first == !other) continue;
    last_error() = "Either none or all communicators in a ncclGroup() can be CUDA graph captured.";
    return InvalidUsage;
  }
  return Success;
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
  if (const Result refused = refuse_mixtures(all)) return refused;
  if (all[0].comm->is_blocking) {
    if (const Result failed = connect(all)) return failed;
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
    std::vector<std::shared_ptr<Communicator>> comms;
    for (const Launch& launch : all) comms.push_back(launch.comm);
    Result result = connect(all);
    if (!result) result = submit(std::move(all));
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
