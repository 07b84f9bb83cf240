// c10d::Work over one or several operations of the engine on host memory.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "batch.h"
#include "errors.h"
#include "group_state.h"
#include "interrupt.h"
#include "tensors.h"

namespace ncclx {

class NcclxWork : public c10d::Work {
 public:
  NcclxWork(const NcclxEngine* engine, std::shared_ptr<GroupState> group, int rank, c10d::OpType type, const char* title,
            const std::optional<std::vector<at::Tensor>>& inputs, std::vector<at::Tensor> results)
      : c10d::Work(rank, type, title, inputs),
        engine_(engine),
        group_(std::move(group)),
        results_(std::move(results)) {}

  ~NcclxWork() override {
    for (NcclxHandle* handle : handles_) engine_->release(handle);
  }

  // The operands of a further operation, kept until all operations are done.
  Operands& operands(const char* operation) { return operands_.emplace_back(operation, written_); }

  // Whether the operations write to that memory.
  bool writes(const Extent& extent) const { return written_.overlaps(extent); }

  // Takes ownership of a submitted operation.
  void add(NcclxHandle* handle) { handles_.push_back(handle); }

  // Adds this work to a batch until it ends. Called before `follow`.
  void join(std::shared_ptr<Batch> batch) {
    batch_ = std::move(batch);
    batch_->add(c10::intrusive_ptr<NcclxWork>::unsafe_reclaim_from_nonowning(this));
  }

  // Makes this the work of a batch, to which no more works are added.
  void add(Batch& batch) {
    auto [in_flight, error, status] = batch.take();
    for (auto& [_, work] : in_flight) members_.push_back(std::move(work));
    status_ = status;
    if (error) note(error);
  }

  // Makes this a work of an earlier generation of members than the one at its construction.
  void is_of(uint64_t generation) { generation_ = generation; }

  // Makes this work end with `error` once the operations added so far are done.
  void fail(std::exception_ptr error) { note(error); }

  // Waits for the added operations in the background. Called once, after the last was added.
  void follow() {
    group_->work_started();
    pending_ = 1 + members_.size();
    follow_from(0);
    for (auto& member : members_) {
      auto self = c10::intrusive_ptr<NcclxWork>::unsafe_reclaim_from_nonowning(this);
      const auto* ended = static_cast<const NcclxWork*>(member.get());  // a batch has no other works; `self` keeps it
      member->getFuture()->addCallback([self, ended](c10::ivalue::Future& future) {
        self->one_done(future.hasError() ? future.exception_ptr() : nullptr, ended->status_);
      });
    }
    one_done(nullptr);
  }

  // The same, but this thread makes the engine's progress until the operations are done. `wait` raises their errors. If a
  // signal's handler raises, that is thrown, and the background waits for the rest.
  void drive() {
    group_->work_started();
    pending_ = 1;
    std::unique_ptr<GroupState::FailureCall> call;
    std::exception_ptr interrupted;
    for (size_t i = 0; i < handles_.size(); ++i) {
      NcclxError error;
      int32_t status;
      try {
        const GroupState::OwnWork own(*group_);
        status = wait_for(engine_, handles_[i], -1, &error);
      } catch (...) {
        interrupted = std::current_exception();
        follow_from(i);
        break;
      }
      if (status == NCCLX_OK) continue;
      if (auto first = failed(status, error.text)) call = std::move(first);
    }
    one_done(nullptr);
    GroupState::call_failure_hooks(engine_, std::move(call));
    if (interrupted) std::rethrow_exception(interrupted);
  }

  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return completed_ && !exception_;
  }

  bool wait(Milliseconds timeout = kNoTimeout) override {
    const auto start = std::chrono::steady_clock::now();
    auto left = [&] {
      if (timeout == kNoTimeout) return Milliseconds(-1);
      const auto passed = std::chrono::steady_clock::now() - start;
      return std::max(Milliseconds(1), timeout - std::chrono::duration_cast<Milliseconds>(passed));
    };
    for (NcclxHandle* handle : handles_) {
      if (pending_ == 0) break;
      NcclxError error;
      if (wait_for(engine_, handle, left().count(), &error) == NCCLX_PENDING) raise(NCCLX_PENDING, error.text);
    }
    // In a callback of the future this thread would wait for itself: it completes the work after that.
    if (ends_on_ == std::this_thread::get_id()) {
      if (first_error_) std::rethrow_exception(first_error_);
      return true;
    }
    for (auto& member : members_) member->wait(timeout == kNoTimeout ? kNoTimeout : left());
    return c10d::Work::wait(timeout == kNoTimeout ? kNoTimeout : left());
  }

  // Whether it has ended because its time was over.
  bool has_timed_out() const { return status_ == NCCLX_TIMEOUT; }

  void abort() override { TORCH_CHECK(false, "ncclx_rs: a single operation cannot be aborted; abort its group"); }

  std::vector<at::Tensor> result() override { return results_; }

  // Made at the first call: most callers only wait for the work.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    {
      std::lock_guard<std::mutex> lock(outcome_);
      if (future_) return future_;
      future_ = made;
      if (!has_ended_) return made;
    }
    settle(*made);
    return made;
  }

  int sourceRank() const override { return handles_.empty() ? -1 : engine_->source(handles_.front()); }
  uint64_t getSequencenumber() const override { return handles_.empty() ? 0 : engine_->sequence(handles_.front()); }

#if NCCLX_TORCH_GE(2, 15)
  uint64_t getCompletionKey() const override { return key_; }
#endif

  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    auto self = c10::intrusive_ptr<NcclxWork>::unsafe_reclaim_from_nonowning(this);
    getFuture()->addCallback([result, self](c10::ivalue::Future& future) {
      const auto outcome = !future.hasError()      ? c10d::WorkResult::SUCCESS
                           : self->has_timed_out() ? c10d::WorkResult::TIMEOUT
                                                   : c10d::WorkResult::COMM_ERROR;
      result->markCompleted(c10::IValue(static_cast<int64_t>(outcome)));
    });
    return result;
  }

  float getDuration() const override {
    const bool has_ended = [this] {
      std::lock_guard<std::mutex> lock(mutex_);
      return completed_;
    }();
    TORCH_CHECK(has_ended, "ncclx_rs: getDuration: the operation is still in flight");
    return std::chrono::duration<float, std::milli>(finished_ - started_).count();
  }

 private:
  // Has the operations from the `first` on noticed in the background when they are done.
  void follow_from(size_t first) {
    pending_ += handles_.size() - first;
    for (size_t i = first; i < handles_.size(); ++i) {
      engine_->on_complete(handles_[i], &NcclxWork::completed, retained());
    }
  }

  void* retained() {
    c10::raw::intrusive_ptr::incref(this);
    return this;
  }

  static void completed(void* context, int32_t status, const char* text) {
    auto self = c10::intrusive_ptr<NcclxWork>::reclaim(static_cast<NcclxWork*>(context));
    auto call = status == NCCLX_OK ? nullptr : self->failed(status, text);
    self->one_done(nullptr);
    GroupState::call_failure_hooks(self->engine_, std::move(call));
  }

  std::unique_ptr<GroupState::FailureCall> failed(int32_t status, const char* text) {
    status_ = status;
    note(ncclx::exception(status, text));
    return group_->record_failure(generation_, status);
  }

  void note(std::exception_ptr error) {
    std::lock_guard<std::mutex> lock(outcome_);
    if (!first_error_) first_error_ = std::move(error);
  }

  // A member's status is this work's, if it is the first that there is.
  void one_done(std::exception_ptr error, int32_t status = NCCLX_OK) {
    int32_t none = NCCLX_OK;
    status_.compare_exchange_strong(none, status);
    if (error) note(error);
    if (--pending_ == 0) all_done();
  }

  void all_done() {
    const GroupState::OwnWork own(*group_);
    try {
      if (!first_error_) {
        for (Operands& operands : operands_) operands.finish();
      }
    } catch (...) {
      note(std::current_exception());
    }
    for (Operands& operands : operands_) operands.release();
    finished_ = std::chrono::steady_clock::now();
    ends_on_ = std::this_thread::get_id();
    // The future is completed first, so that a thread that waits for this work finds it completed.
    const auto future = [this] {
      std::lock_guard<std::mutex> lock(outcome_);
      has_ended_ = true;
      return future_;
    }();
    if (future) settle(*future);
    // The profiler's callback holds Python objects; `finish` would call and drop it under c10d's lock.
    if (const auto profiled = std::exchange(recordFunctionEndCallback_, nullptr)) profiled();
    finish(first_error_);
    ends_on_ = std::thread::id();
    if (batch_) batch_->remove(this, first_error_, status_);
#if NCCLX_TORCH_GE(2, 15)
    if (!first_error_) group_->call_success_hooks(key_, finished_ - started_);
#endif
    group_->work_ended([this] {
      return std::make_shared<c10d::WorkInfo>(opType_, getSequencenumber(), started_, finished_,
                                              finished_ - started_);
    });
  }

  void settle(c10::ivalue::Future& future) const {
    if (first_error_) {
      future.setError(first_error_);
    } else {
      future.markCompleted(c10::IValue(results_));
    }
  }

  const uint64_t key_ = next_completion_key();
  const NcclxEngine* engine_;
  std::shared_ptr<GroupState> group_;
  uint64_t generation_ = group_->generation();
  Written written_;
  std::list<Operands> operands_;
  std::vector<at::Tensor> results_;
  std::vector<NcclxHandle*> handles_;
  std::vector<c10::intrusive_ptr<c10d::Work>> members_;  // the works of a batch
  std::shared_ptr<Batch> batch_;
  std::atomic<size_t> pending_{0};
  // Guards the next three fields; the error is final once the work has ended. No tensor is copied or dropped under it:
  // the tensor's Python object would take Python's lock.
  std::mutex outcome_;
  std::exception_ptr first_error_;
  bool has_ended_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<int32_t> status_{NCCLX_OK};
  // The thread that ends the work, while it runs callbacks: for these the error is final.
  std::atomic<std::thread::id> ends_on_{};
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point finished_;
};

}  // namespace ncclx
