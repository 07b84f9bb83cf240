// Streams of a CUDA device, through c10's guard for any device, so that the extension does not link CUDA.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace ncclx {

// The streams on which a group puts its operations.
class DeviceStreams {
 public:
  enum class Direction { Send, Receive, Access, WaitForSignal };

  DeviceStreams(c10::Device device, bool high_priority)
      : device_(device), high_priority_(high_priority), guard_(device.type()) {}

  c10::Device device() const { return device_; }

  // The calling thread's current stream.
  c10::Stream current() const { return guard_.getStream(device_); }

  // That of asynchronous collectives.
  c10::Stream internal() {
    std::lock_guard<std::mutex> lock(mutex_);
    return of_pool(internal_);
  }

  // That of messages from or to a peer, of accesses to its window or of waits for its signals. Each pair has its own, as far as there are some left, so that a message which the
  // peer has not sent yet holds up no other.
  c10::Stream of_messages(int peer, Direction direction) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [found, is_new] = pairs_.try_emplace({peer, direction}, pairs_.size() % kMessageStreams);
    return of_pool(messages_[found->second]);
  }

  // That of batches of messages, and on which the works of a batch come together.
  c10::Stream joint() {
    std::lock_guard<std::mutex> lock(mutex_);
    return of_pool(joint_);
  }

  c10::Stream joint(const std::vector<c10::Stream>& streams) {
    if (streams.size() == 1) return streams.front();
    const c10::Stream joint = this->joint();
    for (const c10::Stream& stream : streams) order(stream, joint);
    return joint;
  }

  // What is put on `after` from now on runs after what is on `before`.
  static void order(const c10::Stream& before, const c10::Stream& after) {
    if (before == after) return;
    c10::Event event(before.device_type());
    event.record(before);
    event.block(after);
  }

  // Memory freed from now on is not given out again before what is on the stream has run.
  void keep(const c10::DataPtr& memory, const c10::Stream& stream) const {
    guard_.recordDataPtrOnStream(memory, stream);
  }

 private:
  static constexpr size_t kMessageStreams = 8;

  c10::Stream of_pool(std::optional<c10::Stream>& stream) {
    if (!stream) {
      stream = guard_.getStreamFromGlobalPool(device_, high_priority_);
      warn_of_few_queues(++in_use_);
    }
    return *stream;
  }

  // Streams that share a queue of the device wait for each other's messages.
  static void warn_of_few_queues(int in_use) {
    const char* text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    const int queues = text ? std::atoi(text) : 0;
    static std::atomic<bool> has_warned{false};
    if (queues <= 0 || queues >= in_use || has_warned.exchange(true)) return;
    TORCH_WARN("ncclx_rs: CUDA_DEVICE_MAX_CONNECTIONS=", queues, " is less than the ", in_use,
               " streams of a group, so that messages may wait for others which they do not need; with a larger number, up to "
               "32, they do not");
  }

  const c10::Device device_;
  const bool high_priority_;
  const c10::impl::VirtualGuardImpl guard_;
  std::mutex mutex_;
  std::optional<c10::Stream> internal_;
  std::optional<c10::Stream> joint_;
  int in_use_ = 0;  // of the pool
  std::optional<c10::Stream> messages_[kMessageStreams];
  std::map<std::pair<int, Direction>, size_t> pairs_;
};

}  // namespace ncclx
