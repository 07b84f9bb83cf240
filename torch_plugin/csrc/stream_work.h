// c10d::Work over operations of the engine on a CUDA stream.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "stream_end.h"
#include "streams.h"

namespace ncclx {

// To wait for it orders the calling thread's current stream after the operations, and does not block the thread. An error
// that the engine finds later shows in `exception`, in getFutureResult, in the hooks and at the group's next call.
class StreamWork : public c10d::Work {
 public:
  enum class Waits { Stream, Host };

  // An end is shared with the engine's callbacks; `waits` says what a wait without a limit blocks.
  StreamWork(std::shared_ptr<StreamEnd> end, std::shared_ptr<DeviceStreams> streams, const c10::Stream& stream,
             Waits waits, int rank, c10d::OpType type, const char* title,
             const std::optional<std::vector<at::Tensor>>& inputs, std::vector<at::Tensor> results)
      : c10d::Work(rank, type, title, inputs),
        end_(std::move(end)),
        streams_(std::move(streams)),
        stream_(stream),
        waits_(waits),
        results_(std::move(results)) {}

  // Everything is on an internal stream. Called by the thread that put it there, under a guard of that stream.
  void enqueued_aside(std::vector<at::Tensor> tensors) {
    // The program may drop them before their turn on the stream comes.
    for (const at::Tensor& tensor : tensors) streams_->keep(tensor.storage().data_ptr(), stream_);
    kept_ = std::move(tensors);
    done_.emplace(stream_.device_type());
    done_->record(stream_);
    future_ = make_future();
  }

  // The sender of the message that this receives: known before it has come, as on a device only one can be meant.
  void comes_from(int source) { source_ = source; }

  // The profiler's range ends with the submission, as NCCL's: it covers what the host does.
  void end_profile() {
    if (const auto profiled = std::exchange(recordFunctionEndCallback_, nullptr)) profiled();
  }

  const std::shared_ptr<StreamEnd>& end() const { return end_; }

  bool isCompleted() override { return end_->has_ended(); }
  bool isSuccess() const override { return end_->has_ended() && !end_->error(); }
  std::exception_ptr exception() const override { return end_->error(); }

  bool wait(Milliseconds timeout = kNoTimeout) override {
    const bool is_limited = timeout != kNoTimeout;
    if (is_limited || waits_ == Waits::Host) {
      block(is_limited ? std::optional(timeout) : std::nullopt);
    } else if (const auto error = end_->error()) {
      std::rethrow_exception(error);
    }
    synchronize();
    return true;
  }

  // Blocks the thread until the operations have ended; throws their error.
  void block(std::optional<Milliseconds> timeout) const { end_->wait(timeout); }

  void synchronize() override {
    std::vector<at::Tensor> dropped;  // after the lock: to drop one may take Python's
    std::lock_guard<std::mutex> lock(mutex_);
    const c10::Stream current = streams_->current();
    if (current != stream_) {
      // What is on a program's own stream has an event only if another stream waits for it.
      if (!done_) done_.emplace(stream_.device_type()).record(stream_);
      done_->block(current);
    }
    dropped.swap(kept_);
  }

  // Not c10d's, which waits for the future: that is complete before the operations are.
  void blockCurrentStream() override { synchronize(); }

  void abort() override { TORCH_CHECK(false, "ncclx_rs: a single operation cannot be aborted; abort its group"); }

  std::vector<at::Tensor> result() override { return results_; }

  // Complete as soon as the operations are on their stream: what follows it is ordered after them by events.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) {
      const c10::StreamGuard on_stream(stream_);
      future_ = make_future();
    }
    return future_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    end_->watch_closely();
    end_->then([result, end = end_.get()](const std::exception_ptr& error) {
      const auto outcome = !error                 ? c10d::WorkResult::SUCCESS
                           : end->has_timed_out() ? c10d::WorkResult::TIMEOUT
                                                  : c10d::WorkResult::COMM_ERROR;
      result->markCompleted(c10::IValue(static_cast<int64_t>(outcome)));
    });
    return result;
  }

  int sourceRank() const override { return source_; }
  uint64_t getSequencenumber() const override { return end_->sequence(); }
  float getDuration() const override { return end_->duration().count(); }

#if NCCLX_TORCH_GE(2, 15)
  uint64_t getCompletionKey() const override { return end_->key(); }
#endif

 private:
  c10::intrusive_ptr<c10::ivalue::Future> make_future() const {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(),
                                                           std::vector<c10::Device>{streams_->device()});
    if (auto error = end_->error()) {
      future->setError(std::move(error));
    } else {
      future->markCompleted(c10::IValue(results_));
    }
    return future;
  }

  const std::shared_ptr<StreamEnd> end_;
  const std::shared_ptr<DeviceStreams> streams_;
  const c10::Stream stream_;
  const Waits waits_;
  const std::vector<at::Tensor> results_;
  int source_ = -1;
  std::mutex mutex_;  // guards what follows
  std::vector<at::Tensor> kept_;  // until a stream of the program waits for their end
  std::optional<c10::Event> done_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ncclx
