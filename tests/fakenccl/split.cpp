// Splits of communicators, which take no unique id.
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "communicator.h"
#include "settings.h"

namespace fakenccl {

bool Communicator::is_idle() {
  std::lock_guard<std::mutex> lock(order_);
  return !running_ && (!has_last_ || cuEventQuery(end_) == CUDA_SUCCESS);
}

Result Communicator::split(Place place, bool is_blocking, std::shared_ptr<Communicator>& made) {
  if (const Result failed = fault(Fault::When::Split, "no memory for a part")) return failed;
  const uint32_t number = ++splits_;
  const auto all = [&](auto&& is_there) {
    for (int other = 0; other < size; other++) {
      while (!is_there(shared_->card(other))) {
        if (is_aborted()) return false;
        usleep(50);
      }
    }
    return true;
  };
  // Before that, ranks may still read the last one's.
  if (!all([&](const Card& card) { return card.read >= number - 1; })) return SystemError;
  Card& own = shared_->card(rank);
  own.color = place.color;
  own.key = place.key;
  if (const Result failed = draw(own.id)) return failed;
  own.told = number;
  if (!all([&](const Card& card) { return card.told >= number; })) return SystemError;
  std::vector<std::pair<int, int>> members;  // keys and ranks
  for (int other = 0; other < size; other++) {
    const Card& card = shared_->card(other);
    if (card.color == place.color) members.push_back({card.key, other});
  }
  std::sort(members.begin(), members.end());
  const UniqueId id = shared_->card(members[0].second).id;
  own.read = number;
  if (place.color < 0) return Success;
  const auto at = std::find(members.begin(), members.end(), std::make_pair(place.key, rank)) - members.begin();
  const int ranks = static_cast<int>(members.size());
  std::unique_ptr<Shared> shared(Shared::open(id, ranks));
  if (!shared) return SystemError;
  made = std::make_shared<Communicator>(static_cast<int>(at), ranks, device_, is_blocking, std::move(shared), family_);
  {
    std::lock_guard<std::mutex> lock(making_mutex_);
    if (is_aborted()) return SystemError;
    making_ = made;
  }
  const Result joined = made->join();
  made->state = joined;
  std::lock_guard<std::mutex> lock(making_mutex_);
  making_ = nullptr;
  if (joined) failure = made->failure;
  return joined;
}

}  // namespace fakenccl

using namespace fakenccl;

// Absent in libraries that are as old.
#ifndef FAKENCCL_WITHOUT

namespace {

int refuse(int result, const char* why) {
  last_error() = why;
  return result;
}

}  // namespace

API int ncclCommSplit(void* handle, int color, int key, void** place, const Config* config) {
  const auto comm = find(handle);
  if (!comm) return refuse(InvalidArgument, "no communicator");
  if (settings().version < 21800) return refuse(InvalidUsage, "this version has no ncclCommSplit");
  if (!place) return refuse(InvalidArgument, "there is no place for the new communicator");
  if (color < -1) return refuse(InvalidArgument, "a color is no negative number, or NCCL_SPLIT_NOCOLOR");
  if (config) {
    if (const Result refused = check(*config)) return refused;
  }
  const int state = comm->state;
  if (state == InProgress) return refuse(InvalidArgument, "the communicator is not ready");
  if (state != Success) return refuse(state, comm->failure.c_str());
  if (comm->is_aborted()) return refuse(InvalidUsage, "what it shares was aborted");
  // As NCCL: it might wait for ever.
  if (!comm->is_idle()) return refuse(InvalidUsage, "operations of the communicator are still on a stream");
  CUcontext context;
  if (cuCtxGetCurrent(&context)) return refuse(UnhandledCudaError, "no context");
  *place = nullptr;
  count("splits");
  const bool is_blocking = config ? config->blocking != 0 : comm->is_blocking;
  // As NCCL: the new communicator is in its place before the one that is split is ready again, also if it has failed.
  const auto run = [=] {
    std::shared_ptr<Communicator> made;
    const Result result = comm->split({color, key}, is_blocking, made);
    if (made) __atomic_store_n(place, publish(made), __ATOMIC_RELEASE);
    return result;
  };
  if (comm->is_blocking) {
    const Result result = run();
    return result ? refuse(result, comm->failure.c_str()) : Success;
  }
  comm->state = InProgress;
  comm->begin_putting();
  std::thread([=] {
    cuCtxSetCurrent(context);
    usleep(settings().launch_us);
    comm->state = run();
    comm->end_putting();
  }).detach();
  return InProgress;
}

#endif
