// Messages on CUDA tensors between startCoalescing and endCoalescing, which are put on a stream as a whole at the end.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <list>
#include <mutex>
#include <utility>
#include <vector>

#include "tensors.h"

namespace ncclx {

// The work of one message: from the end of the block on, that of the whole.
class MessageWork : public c10d::Work {
 public:
  MessageWork(int rank, c10d::OpType type, std::vector<at::Tensor> results)
      : c10d::Work(rank, type), results_(std::move(results)) {}

  void submitted(c10::intrusive_ptr<c10d::Work> whole) {
    std::lock_guard<std::mutex> lock(mutex_);
    whole_ = std::move(whole);
  }

  // Throws before the end of the block.
  c10::intrusive_ptr<c10d::Work> whole() const {
    const auto whole = whole_or_none();
    TORCH_CHECK(whole, "ncclx_rs: a message of a coalesced block is not on its way before the end of the block");
    return whole;
  }

  bool isCompleted() override {
    const auto whole = whole_or_none();
    return whole && whole->isCompleted();
  }
  bool isSuccess() const override {
    const auto whole = whole_or_none();
    return whole && whole->isSuccess();
  }
  std::exception_ptr exception() const override {
    const auto whole = whole_or_none();
    return whole ? whole->exception() : nullptr;
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override { return whole()->wait(timeout); }
  void synchronize() override { whole()->synchronize(); }
  void blockCurrentStream() override { whole()->blockCurrentStream(); }
  void abort() override { whole()->abort(); }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return whole()->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return whole()->getFutureResult(); }
  uint64_t getSequencenumber() const override { return whole()->getSequencenumber(); }
  float getDuration() const override { return whole()->getDuration(); }

 private:
  c10::intrusive_ptr<c10d::Work> whole_or_none() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return whole_;
  }

  const std::vector<at::Tensor> results_;
  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Work> whole_;
};

// The messages of a block, in the order of their calls. They are recorded and submitted by the thread that began the block.
struct Messages {
  Written written;
  std::list<Operands> operands;  // whose memory `ops` name
  std::vector<NcclxOp> ops;
  std::vector<c10::intrusive_ptr<MessageWork>> works;
};

}  // namespace ncclx
