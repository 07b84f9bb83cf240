// How operations on a CUDA stream end, as the engine tells it.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "errors.h"
#include "group_state.h"
#include "interrupt.h"

namespace ncclx {

// The end of the operations of one work. The engine's thread that watches holds it, and must not call CUDA, so that it has
// neither tensors nor events: to free either may be such a call.
class StreamEnd : public std::enable_shared_from_this<StreamEnd> {
 public:
  using Callback = std::function<void(const std::exception_ptr&)>;

  StreamEnd(const NcclxEngine* engine, std::shared_ptr<GroupState> group, c10d::OpType type)
      : engine_(engine), group_(std::move(group)), type_(type) {}

  ~StreamEnd() {
    for (NcclxHandle* handle : handles_) engine_->release(handle);
  }

  StreamEnd(const StreamEnd&) = delete;
  StreamEnd& operator=(const StreamEnd&) = delete;

  // Takes ownership of a submitted operation. Called before `follow`, as are the next two.
  void add(NcclxHandle* handle) { handles_.push_back(handle); }

  // Adds the operations of another work.
  void add(std::shared_ptr<StreamEnd> member) { members_.push_back(std::move(member)); }

  // Makes this end with `error` once the operations added so far have ended.
  void fail(std::exception_ptr error) { note(std::move(error)); }

  // Takes part in the group's hooks and counts. Called once.
  void follow() {
    if (group_->work_started()) watch_closely();
    pending_ = 1 + handles_.size() + members_.size();
    for (NcclxHandle* handle : handles_) {
      engine_->on_complete(handle, &StreamEnd::completed, new std::shared_ptr<StreamEnd>(shared_from_this()));
    }
    for (const auto& member : members_) {
      member->then([self = shared_from_this(), ended = member.get()](const std::exception_ptr& error) {
        self->one_done(error, ended->status_);
      });
    }
    one_done(nullptr);
  }

  // Has callbacks come soon after the end, though nobody waits for it.
  void watch_closely() const {
    for (NcclxHandle* handle : handles_) engine_->watch_closely(handle);
    for (const auto& member : members_) member->watch_closely();
  }

  // Whether all have ended, well or badly. Asks the engine, which knows it before its callbacks come.
  bool has_ended() const {
    return std::all_of(handles_.begin(), handles_.end(), [this](auto* handle) { return engine_->poll(handle) != 0; }) &&
           std::all_of(members_.begin(), members_.end(), [](const auto& member) { return member->has_ended(); });
  }

  // The first error of those that have ended.
  std::exception_ptr error() const {
    for (NcclxHandle* handle : handles_) {
      if (engine_->poll(handle) == 0) continue;
      NcclxError error;
      const int32_t status = engine_->wait(handle, 0, &error);
      if (status != NCCLX_OK && status != NCCLX_PENDING) return ncclx::exception(status, error.text);
    }
    for (const auto& member : members_) {
      if (auto error = member->error()) return error;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return first_error_;
  }

  // Blocks the thread until all have ended, or for `timeout`, if there is one; throws the first error.
  void wait(std::optional<Milliseconds> timeout) const {
    const auto start = std::chrono::steady_clock::now();
    const auto left = [&]() -> std::optional<Milliseconds> {
      if (!timeout) return std::nullopt;
      const auto passed = std::chrono::steady_clock::now() - start;
      return std::max(Milliseconds(1), *timeout - std::chrono::duration_cast<Milliseconds>(passed));
    };
    for (NcclxHandle* handle : handles_) {
      NcclxError error;
      const int32_t status = wait_for(engine_, handle, left().value_or(Milliseconds(-1)).count(), &error);
      if (status != NCCLX_OK) raise(status, error.text);
    }
    for (const auto& member : members_) member->wait(left());
    std::lock_guard<std::mutex> lock(mutex_);
    if (first_error_) std::rethrow_exception(first_error_);
  }

  // Calls it once, now or at the end.
  void then(Callback callback) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!has_settled_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback(first_error_);
  }

  bool has_timed_out() const { return status_ == NCCLX_TIMEOUT; }
  uint64_t sequence() const { return handles_.empty() ? 0 : engine_->sequence(handles_.front()); }
  uint64_t key() const { return key_; }

  // How long it took; throws before the engine has told the end.
  std::chrono::duration<float, std::milli> duration() const {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(has_settled_, "ncclx_rs: getDuration: the operation is still in flight");
    return finished_ - started_;
  }

 private:
  static void completed(void* context, int32_t status, const char* text) {
    const std::unique_ptr<std::shared_ptr<StreamEnd>> held(static_cast<std::shared_ptr<StreamEnd>*>(context));
    StreamEnd& self = **held;
    std::unique_ptr<GroupState::FailureCall> call;
    if (status != NCCLX_OK) {
      self.status_ = status;
      self.note(ncclx::exception(status, text));
      call = self.group_->record_failure(self.generation_, status);
    }
    self.one_done(nullptr);
    GroupState::call_failure_hooks(self.engine_, std::move(call));
  }

  void note(std::exception_ptr error) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!first_error_) first_error_ = std::move(error);
  }

  // A member's status is this one's, if it is the first that there is.
  void one_done(const std::exception_ptr& error, int32_t status = NCCLX_OK) {
    int32_t none = NCCLX_OK;
    status_.compare_exchange_strong(none, status);
    if (error) note(error);
    if (--pending_ == 0) all_done();
  }

  void all_done() {
    const GroupState::OwnWork own(*group_);
    std::vector<Callback> callbacks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_ = std::chrono::steady_clock::now();
      has_settled_ = true;
      callbacks.swap(callbacks_);
    }
    for (const Callback& callback : callbacks) callback(first_error_);
#if NCCLX_TORCH_GE(2, 15)
    if (!first_error_) group_->call_success_hooks(key_, finished_ - started_);
#endif
    group_->work_ended([this] {
      return std::make_shared<c10d::WorkInfo>(type_, sequence(), started_, finished_, finished_ - started_);
    });
  }

  const uint64_t key_ = next_completion_key();
  const NcclxEngine* engine_;
  const std::shared_ptr<GroupState> group_;
  const uint64_t generation_ = group_->generation();
  const c10d::OpType type_;
  std::vector<NcclxHandle*> handles_;
  std::vector<std::shared_ptr<StreamEnd>> members_;  // of a batch
  std::atomic<size_t> pending_{0};
  std::atomic<int32_t> status_{NCCLX_OK};
  // Guards what follows. All but the callbacks is final once it has settled.
  mutable std::mutex mutex_;
  std::exception_ptr first_error_;
  bool has_settled_ = false;
  std::vector<Callback> callbacks_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point finished_;
};

}  // namespace ncclx
