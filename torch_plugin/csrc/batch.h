// The works between startCoalescing and endCoalescing.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "message_batch.h"
#include "stream_end.h"
#include "streams.h"

namespace ncclx {

// An exception skips endCoalescing, so a batch holds works only while they are in flight, and of ended works only the first
// error. Of works on streams it holds no tensors.
class Batch {
 public:
  using InFlight = std::map<const void*, c10::intrusive_ptr<c10d::Work>>;

  // The works on streams: how they end, and where.
  struct Enqueued {
    std::vector<std::shared_ptr<StreamEnd>> ends;
    std::vector<c10::Stream> streams;
  };

  void add(c10::intrusive_ptr<c10d::Work> work) {
    const void* key = work.get();
    std::lock_guard<std::mutex> lock(mutex_);
    has_host_works_ = true;
    has_only_messages_ = has_only_messages_ && c10d::isP2POp(work->retrieveOpType());
    in_flight_.emplace(key, std::move(work));
  }

  void add(std::shared_ptr<StreamEnd> end, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    enqueued_.ends.push_back(std::move(end));
    auto& streams = enqueued_.streams;
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  }

  bool has_host_works() {
    std::lock_guard<std::mutex> lock(mutex_);
    return has_host_works_;
  }

  // Whether its works on host memory so far are sends and receives alone.
  bool has_only_messages() {
    std::lock_guard<std::mutex> lock(mutex_);
    return has_only_messages_;
  }

  // The streams that its works are on so far.
  std::vector<c10::Stream> streams() {
    std::lock_guard<std::mutex> lock(mutex_);
    return enqueued_.streams;
  }

  // The messages on device memory, which its end submits.
  Messages& messages() { return messages_; }

  bool is_on_device() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !enqueued_.ends.empty() || !messages_.ops.empty();
  }

  void remove(const c10d::Work* work, const std::exception_ptr& error, int32_t status) {
    InFlight::node_type dropped;  // dropped after the lock: it holds tensors
    std::lock_guard<std::mutex> lock(mutex_);
    dropped = in_flight_.extract(work);
    if (first_error_) return;
    first_error_ = error;
    first_status_ = status;
  }

  std::vector<c10::intrusive_ptr<c10d::Work>> in_flight() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (const auto& [_, work] : in_flight_) works.push_back(work);
    return works;
  }

  // The works in flight, and the first error with its status; the batch is empty afterwards.
  std::tuple<InFlight, std::exception_ptr, int32_t> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {std::exchange(in_flight_, {}), first_error_, first_status_};
  }

  Enqueued take_enqueued() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(enqueued_, {});
  }

 private:
  std::mutex mutex_;
  InFlight in_flight_;
  Enqueued enqueued_;
  Messages messages_;
  bool has_host_works_ = false;
  bool has_only_messages_ = true;
  std::exception_ptr first_error_;
  int32_t first_status_ = NCCLX_OK;
};

}  // namespace ncclx
