#include "communicator.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "memory.h"
#include "settings.h"

namespace fakenccl {

namespace {

struct Living {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Communicator>> all;
  // Those that are being given back.
  std::set<std::shared_ptr<Communicator>> ending;
};

// As NCCL's threads, what is left goes with the process.
void cut_all();

Living& living() {
  static auto* const living = [] {
    atexit(cut_all);
    return new Living;
  }();
  return *living;
}

void cut_all() {
  std::lock_guard<std::mutex> lock(living().mutex);
  for (const auto& known : living().all) known.second->cut();
  for (const auto& known : living().ending) known->cut();
}

std::shared_ptr<Communicator> take(void* handle) {
  std::lock_guard<std::mutex> lock(living().mutex);
  const auto found = living().all.find(handle);
  if (found == living().all.end()) return nullptr;
  auto taken = found->second;
  living().all.erase(found);
  living().ending.insert(taken);
  return taken;
}

void has_ended(const std::shared_ptr<Communicator>& taken) {
  std::lock_guard<std::mutex> lock(living().mutex);
  living().ending.erase(taken);
}

// Sleeps longer the longer it has been in vain.
void pause(int turn) {
  if (turn < 20) {
    sched_yield();
  } else {
    usleep(turn < 200 ? 20 : 200);
  }
}

// The bytes of ncclConfig_t in a version.
size_t config_size(int version) {
  static const std::pair<int, size_t> sizes[] = {{23200, 120}, {23100, 112}, {23000, 96},
                                                 {22900, 88},  {22800, 80},  {22700, 72}};
  for (const auto& [since, size] : sizes) {
    if (version >= since) return size;
  }
  return 0;
}

Result refuse(Result result, const std::string& why) {
  last_error() = why;
  return result;
}

}  // namespace

std::shared_ptr<Communicator> find(void* handle) {
  std::lock_guard<std::mutex> lock(living().mutex);
  const auto found = living().all.find(handle);
  return found == living().all.end() ? nullptr : found->second;
}

bool is_enrolled_somewhere(uintptr_t begin, size_t bytes) {
  std::lock_guard<std::mutex> lock(living().mutex);
  return std::any_of(living().all.begin(), living().all.end(),
                     [&](const auto& known) { return known.second->touches(begin, bytes); });
}

Result breach(const std::string& why) {
  count("breaches");
  fprintf(stderr, "fakenccl: %s\n", why.c_str());
  return refuse(InvalidUsage, why);
}

void* publish(std::shared_ptr<Communicator> made) {
  std::lock_guard<std::mutex> lock(living().mutex);
  void* const handle = made.get();
  living().all[handle] = std::move(made);
  return handle;
}

Result check(const Config& config) {
  if (config.magic != 0xcafebeef) return refuse(InvalidArgument, "ncclConfig_t argument not initialized");
  if (config.size != config_size(settings().version)) {
    return refuse(InvalidArgument, "ncclConfig_t is " + std::to_string(config.size) + " bytes, as no header of this version");
  }
  if (config.min_ctas > config.max_ctas && config.max_ctas != INT_MIN) {
    return refuse(InvalidArgument, "minCTAs " + std::to_string(config.min_ctas) + " is above maxCTAs " +
                                       std::to_string(config.max_ctas));
  }
  if (config.net_name && strcmp(config.net_name, "Socket")) {
    return refuse(InvalidArgument, std::string("there is no network ") + config.net_name);
  }
  return Success;
}

Result draw(UniqueId& id) {
  memset(&id, 0, sizeof id);
  const int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  const bool is_read = file >= 0 && read(file, id.bytes, 16) == 16;
  if (file >= 0) close(file);
  return is_read ? Success : SystemError;
}

Communicator::Communicator(int rank, int size, CUdevice device, bool is_blocking, std::unique_ptr<Shared> shared,
                           Family family)
    : rank(rank),
      size(size),
      is_blocking(is_blocking),
      device_(device),
      shared_(std::move(shared)),
      family_(std::move(family)) {
  cuEventCreate(&end_, CU_EVENT_DISABLE_TIMING);
  cuEventCreate(&captured_end_, CU_EVENT_DISABLE_TIMING);
}

Result Communicator::fault(Fault::When when, const char* why) {
  const Fault& fault = settings().fault;
  if (fault.rank != rank || fault.when != when) return Success;
  if (fault.is_error) {
    failure = why;
  } else {
    while (!is_aborted()) usleep(200);
  }
  return SystemError;
}

Result Communicator::join() {
  if (const Result failed = fault(Fault::When::Init, "no interface was found")) return failed;
  Card& own = shared_->card(rank);
  own.version = settings().version;
  cuDeviceGetUuid_v2(&own.device, device_);
  own.is_there = 1;
  for (int other = 0; other < size; other++) {
    for (int turn = 0; !shared_->card(other).is_there; turn++) {
      if (is_aborted()) return SystemError;
      pause(turn);
    }
  }
  if (rank == 0) shared_->hide();
  for (int other = 0; other < size; other++) {
    const Card& card = shared_->card(other);
    if (card.version != own.version) {
      failure = "rank " + std::to_string(other) + " has another version";
      return InvalidUsage;
    }
    if (other != rank && !memcmp(&card.device, &own.device, sizeof own.device)) {
      failure = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(other);
      return InvalidUsage;
    }
  }
  return Success;
}

bool Communicator::connect(int peer, bool is_send) {
  Channel& channel = is_send ? shared_->channel(rank, peer) : shared_->channel(peer, rank);
  return !channel.is_connected[is_send].exchange(1);
}

bool Communicator::is_connected(int peer, bool is_send) const {
  const Channel& channel = is_send ? shared_->channel(rank, peer) : shared_->channel(peer, rank);
  return channel.is_connected[!is_send] || is_aborted();
}

std::pair<char*, size_t> Transfer::next() const {
  const size_t before = head ? sizeof *head : 0;
  if (done < before) return {reinterpret_cast<char*>(head.get()) + done, before - done};
  return {bytes + (done - before), length - (done - before)};
}

bool Communicator::exchange(std::vector<Transfer>& transfers) {
  for (int turn = 0;; turn++) {
    bool is_done = true, has_moved = false;
    std::vector<bool> is_taken(2 * size);
    for (Transfer& transfer : transfers) {
      if (transfer.done == transfer.total()) continue;
      is_done = false;
      const int way = 2 * transfer.peer + transfer.is_send;
      if (is_taken[way]) continue;
      is_taken[way] = true;
      Channel& channel =
          transfer.is_send ? shared_->channel(rank, transfer.peer) : shared_->channel(transfer.peer, rank);
      const uint64_t written = channel.written, read = channel.read;
      const size_t came = channel.is_cut ? 0 : written - read;
      const size_t ready = transfer.is_send ? Channel::ROOM - (written - read) : came;
      const size_t at = (transfer.is_send ? written : read) % Channel::ROOM;
      const auto [bytes, left] = transfer.next();
      const size_t length = std::min({ready, left, Channel::ROOM - at});
      if (!length) continue;
      has_moved = true;
      if (transfer.is_send) {
        memcpy(channel.bytes + at, bytes, length);
        channel.written += length;
      } else {
        memcpy(bytes, channel.bytes + at, length);
        channel.read += length;
      }
      transfer.done += length;
      if (transfer.differs()) {
        fail("rank " + std::to_string(transfer.peer) + " sends " + std::to_string(*transfer.head) + " bytes, rank " +
             std::to_string(rank) + " receives " + std::to_string(transfer.length));
        return false;
      }
    }
    if (is_done) return true;
    if (is_aborted()) return false;
    if (has_moved) turn = 0;
    pause(turn);
  }
}

Result Communicator::follow(CUstream stream) {
  std::lock_guard<std::mutex> lock(order_);
  // Graphs record it, too.
  const bool is_ordered = last_ == stream && !capture_;
  if (has_last_ && !is_ordered && cuStreamWaitEvent(stream, end_, 0)) return UnhandledCudaError;
  return Success;
}

Result Communicator::followed_by_next(CUstream stream) {
  std::lock_guard<std::mutex> lock(order_);
  last_ = stream;
  has_last_ = true;
  return cuEventRecord(end_, stream) ? UnhandledCudaError : Success;
}

Result Communicator::follow_in(cuuint64_t capture, CUstream stream) {
  std::lock_guard<std::mutex> lock(order_);
  const bool is_first = capture != capture_;
  capture_ = capture;
  has_last_ = true;
  const CUevent before = is_first ? end_ : captured_end_;
  return cuStreamWaitEvent(stream, before, is_first ? CU_EVENT_WAIT_EXTERNAL : 0) ? UnhandledCudaError : Success;
}

Result Communicator::followed_in(CUstream stream) {
  std::lock_guard<std::mutex> lock(order_);
  if (cuEventRecord(captured_end_, stream)) return UnhandledCudaError;
  return cuEventRecordWithFlags(end_, stream, CU_EVENT_RECORD_EXTERNAL) ? UnhandledCudaError : Success;
}

void* Communicator::enroll(uintptr_t begin, size_t bytes) {
  static std::atomic<uintptr_t> handles{0};
  const uintptr_t handle = 16 * ++handles;
  std::lock_guard<std::mutex> lock(enrolled_mutex_);
  enrolled_[handle] = {begin, bytes};
  return reinterpret_cast<void*>(handle);
}

bool Communicator::dismiss(void* handle) {
  std::lock_guard<std::mutex> lock(enrolled_mutex_);
  return enrolled_.erase(reinterpret_cast<uintptr_t>(handle));
}

bool Communicator::is_enrolled(uintptr_t begin, size_t bytes) {
  std::lock_guard<std::mutex> lock(enrolled_mutex_);
  return std::any_of(enrolled_.begin(), enrolled_.end(), [&](const auto& known) {
    const auto& [start, length] = known.second;
    return start <= begin && begin + bytes <= start + length;
  });
}

bool Communicator::touches(uintptr_t begin, size_t bytes) {
  std::lock_guard<std::mutex> lock(enrolled_mutex_);
  return std::any_of(enrolled_.begin(), enrolled_.end(), [&](const auto& known) {
    const auto& [start, length] = known.second;
    return start < begin + bytes && begin < start + length;
  });
}

size_t Communicator::dismiss_all() {
  std::lock_guard<std::mutex> lock(enrolled_mutex_);
  const size_t left = enrolled_.size();
  for (const auto& [handle, place] : enrolled_) {
    count("left");
    if (!is_device_memory(place.first, place.second)) breach("memory was freed before its registration has ended");
  }
  enrolled_.clear();
  return left;
}

void Communicator::tell(uint64_t launch, Passed passed) {
  shared_->card(rank).passed[launch % 64] = 4 * launch + static_cast<uint64_t>(passed);
}

bool Communicator::mixes(uint64_t launch, Passed passed, int peer) const {
  const uint64_t told = shared_->card(peer).passed[launch % 64];
  const auto theirs = static_cast<Passed>(told % 4);
  return told / 4 == launch && theirs != passed && theirs != Passed::Nothing && passed != Passed::Nothing;
}

bool Communicator::begin_launch() {
  running_++;
  turn_.lock();
  const Fault& fault = settings().fault;
  const bool goes_wrong = ++launches_ == fault.launch && fault.rank == rank && fault.when == Fault::When::Launch;
  if (goes_wrong && fault.is_later) {
    std::thread([self = shared_from_this()] {
      usleep(200000);
      self->failure = "a connection was lost later";
      self->state = SystemError;
      count("failures");
    }).detach();
    return !is_aborted();
  }
  if (goes_wrong && fault.is_error) fail("a connection was lost");
  while (goes_wrong && !is_aborted()) usleep(200);
  return !is_aborted();
}

void Communicator::fail(const std::string& why) {
  failure = why;
  state = SystemError;
  while (!is_aborted()) usleep(200);
}

void Communicator::end_launch() {
  turn_.unlock();
  running_--;
}

void Communicator::abort() {
  if (family_) *family_ = true;
  end();
}

void Communicator::destroy() {
  shared_->card(rank).is_leaving = 1;
  while (!(is_received() && all_leave()) && !is_aborted()) usleep(100);
  end();
}

bool Communicator::all_leave() const {
  if (!settings().leaves_together) return true;
  for (int other = 0; other < size; other++) {
    if (!shared_->card(other).is_leaving) return false;
  }
  return true;
}

bool Communicator::is_received() const {
  for (int peer = 0; peer < size; peer++) {
    const Channel& channel = shared_->channel(rank, peer);
    if (channel.written != channel.read) return false;
  }
  return true;
}

void Communicator::cut() {
  for (int peer = 0; peer < size; peer++) {
    Channel& channel = shared_->channel(rank, peer);
    if (channel.written != channel.read) channel.is_cut = 1;
  }
}

void Communicator::end() {
  shared_->card(rank).is_leaving = 1;
  is_aborted_ = true;
  {
    std::lock_guard<std::mutex> lock(making_mutex_);
    if (making_) making_->is_aborted_ = true;
  }
  // As NCCL from 2.26 on: what is on streams runs out, and the end waits for graphs, whose replays do nothing until then.
  while (running_ || graphs_) usleep(100);
  cut();
  dismiss_all();
  // NCCL frees memory, which spoils captures of other threads unless this one is relaxed.
  cuMemFree(0);
  cuEventDestroy_v2(end_);
  cuEventDestroy_v2(captured_end_);
  count("ends");
}

}  // namespace fakenccl

using namespace fakenccl;

API int ncclGetVersion(int* version) {
  *version = settings().version;
  return Success;
}

API const char* ncclGetErrorString(int code) {
  switch (code) {
    case Success: return "no error";
    case UnhandledCudaError: return "unhandled cuda error";
    case SystemError: return "unhandled system error";
    case InvalidArgument: return "invalid argument";
    case InvalidUsage: return "invalid usage";
    case InProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

API const char* ncclGetLastError(void*) { return last_error().c_str(); }

API int ncclGetUniqueId(UniqueId* id) {
  count("ids");
  return draw(*id);
}

API int ncclCommInitRankConfig(void** handle, int size, UniqueId id, int rank, const Config* config) {
  *handle = nullptr;
  if (size < 1 || rank < 0 || rank >= size) return refuse(InvalidArgument, "there is no such rank");
  if (const Result refused = check(*config)) return refused;
  CUcontext context;
  CUdevice device;
  if (cuCtxGetCurrent(&context) || cuCtxGetDevice(&device)) return refuse(UnhandledCudaError, "no context");
  std::unique_ptr<Shared> shared(Shared::open(id, size));
  if (!shared) return refuse(SystemError, "no shared memory");
  const auto family = config->split_share == 1 ? std::make_shared<std::atomic<bool>>(false) : nullptr;
  auto made = std::make_shared<Communicator>(rank, size, device, config->blocking != 0, std::move(shared), family);
  *handle = publish(made);
  if (made->is_blocking) {
    const Result result = made->join();
    return result ? refuse(result, made->failure) : Success;
  }
  made->state = InProgress;
  std::thread([made, context] {
    cuCtxSetCurrent(context);
    made->state = made->join();
  }).detach();
  return InProgress;
}

// All ranks pass the same ids, so they meet where their sum says.
API int ncclCommInitRankScalable(void** handle, int size, int rank, int count_of_ids, UniqueId* ids, const Config* config) {
  *handle = nullptr;
  if (settings().version < 22300) return refuse(InvalidUsage, "this version has one root");
  if (count_of_ids < 1 || count_of_ids > size) return refuse(InvalidArgument, "there are no such roots");
  count("several_roots");
  UniqueId sum = ids[0];
  for (int id = 1; id < count_of_ids; id++) {
    for (size_t at = 0; at < sizeof sum.bytes; at++) sum.bytes[at] = char(sum.bytes[at] + ids[id].bytes[at]);
  }
  return ncclCommInitRankConfig(handle, size, sum, rank, config);
}

namespace {

int refuse_family(int* state) {
  *state = refuse(InvalidUsage, "a communicator was aborted that this one shares resources with");
  return Success;
}

}  // namespace

API int ncclCommGetAsyncError(void* handle, int* state) {
  const auto comm = find(handle);
  if (!comm) return refuse(InvalidArgument, "no communicator");
  *state = comm->state;
  if (*state == Success && comm->is_aborted()) return refuse_family(state);
  if (*state != Success && *state != InProgress) last_error() = comm->failure;
  return Success;
}

API int ncclCommAbort(void* handle) {
  const auto comm = take(handle);
  if (!comm) return refuse(InvalidArgument, "no communicator");
  count("aborts");
  comm->abort();
  has_ended(comm);
  return Success;
}

API int ncclCommDestroy(void* handle) {
  const auto known = find(handle);
  if (!known) return refuse(InvalidArgument, "no communicator");
  // As NCCL, which frees nothing then.
  if (const int state = known->state) {
    breach("ncclCommDestroy of a communicator that has failed: it stays");
    return state == InProgress ? int(InvalidArgument) : state;
  }
  const auto comm = take(handle);
  if (!comm) return refuse(InvalidArgument, "no communicator");
  count("destroys");
  // NCCL ends them after what it needs for that.
  if (const size_t left = comm->dismiss_all()) breach(std::to_string(left) + " registrations were left to ncclCommDestroy");
  comm->destroy();
  has_ended(comm);
  return Success;
}
