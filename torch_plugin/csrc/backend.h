// c10d::Backend over a communicator of the engine. It translates and forwards; the engine checks and decides.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ncclx_abi.h"
#include "python.h"
#include "stream_work.h"
#include "work.h"

namespace ncclx {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Hints = std::map<std::string, std::string>;

constexpr const char* kBackendName = "ncclx_rs";

struct NcclxOptions : c10d::Backend::Options {
  explicit NcclxOptions(std::optional<Milliseconds> timeout = std::nullopt, Hints hints = {})
      : Options(kBackendName, timeout.value_or(kBackendDefaultTimeout)),
        hints(std::move(hints)),
        own_limit_(timeout) {}

#if NCCLX_TORCH_GE(2, 14)
  c10::intrusive_ptr<Options> clone() const override { return c10::make_intrusive<NcclxOptions>(*this); }
#endif

  void limit(Milliseconds time) {
    timeout = time;
    own_limit_ = time;
  }

  // The timeout that the program has set, here or through torch's class. Torch's class has torch's default if the program
  // has set none, and then the configuration's timeout holds.
  std::optional<Milliseconds> limit() const {
    return timeout != kBackendDefaultTimeout ? std::optional(timeout) : own_limit_;
  }

  Hints hints;

 private:
  std::optional<Milliseconds> own_limit_;
};

// The engine's communicator. It lives as long as its backend, and as any call that uses it.
class Communicator {
 public:
  Communicator(const NcclxEngine* engine, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
               const std::string& name, Milliseconds timeout, const Hints& hints);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  NcclxComm* get() const { return comm_; }

  // The number of this rank's next monitored barrier, which all ranks count alike. It wraps around after more calls than
  // can be in flight.
  uint32_t next_monitored_barrier() { return monitored_barriers_++ & 0x3fff'ffff; }

  // Makes the group record a lost rank, also while no operation is in flight.
  void watch(const std::shared_ptr<GroupState>& group);

  // A registered window: the tensor, if it owns it, and its CUDA device, if it is on one.
  struct Window {
    at::Tensor tensor;
    std::optional<at::Device> device;
  };
  void add_window(uint64_t id, Window window);
  void remove_window(uint64_t id);
  // The CUDA device in whose memory it lies, if it is one.
  std::optional<at::Device> device_of_window(uint64_t id);

 private:
  const NcclxEngine* engine_;
  NcclxComm* comm_ = nullptr;
  std::atomic<uint32_t> monitored_barriers_{0};
  std::mutex windows_mutex_;
  // The open ones. They are dropped after the engine's communicator, until whose end other ranks may write their tensors.
  std::map<uint64_t, Window> windows_;
};

// What a group takes over of its parent's communicator of a vendor's library, until it does.
class Part {
 public:
  Part(const NcclxEngine* engine, NcclxPart* part) : engine_(engine), part_(part) {}
  ~Part() {
    if (part_) engine_->part_free(part_);
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  NcclxPart* release() { return std::exchange(part_, nullptr); }

 private:
  const NcclxEngine* engine_;
  NcclxPart* part_;
};

// Which calls of `split` are those of one `split_group`, and of `merge` those of one `merge_remote_group`. PyTorch makes
// one for each type of device that a group serves, on some ranks of some versions, and one on others; all with one store.
// PyTorch 2.11 and 2.13 want all backends that one group gets to be bound to the same device, and unbind the first; so
// later calls get what the first has made.
class SplitCalls {
 public:
  // Whether it is the first with this store.
  bool is_first(const c10::intrusive_ptr<c10d::Store>& store) {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool is_first = !last_ || last_->lock() != store;
    if (is_first) made_.reset();
    last_.emplace(store);
    return is_first;
  }

  // Keeps what the first call has made, for as long as others do.
  void keep(const c10::intrusive_ptr<c10d::Backend>& made) {
    std::lock_guard<std::mutex> lock(mutex_);
    made_.emplace(made);
  }

  // What it has made, if this is of so many ranks.
  c10::intrusive_ptr<c10d::Backend> made(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto made = made_ ? made_->lock() : nullptr;
    return made && static_cast<size_t>(made->getSize()) == size ? made : nullptr;
  }

 private:
  std::mutex mutex_;
  std::optional<c10::weak_intrusive_ptr<c10d::Store>> last_;
  std::optional<c10::weak_intrusive_ptr<c10d::Backend>> made_;
};

struct DirectCall;

class NcclxBackend : public c10d::Backend {
 public:
  // Joins at once; with `joins` false, in `reconfigure`.
  NcclxBackend(const NcclxEngine* engine, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
               std::string name, c10::intrusive_ptr<NcclxOptions> options, bool joins = true);

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }

  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
#if NCCLX_TORCH_GE(2, 14)
  WorkPtr gather_single(at::Tensor&, at::Tensor&, const c10d::GatherOptions&) override;
#endif
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool wait_all_ranks) override;
  WorkPtr send(Tensors&, int peer, int tag) override;
  WorkPtr recv(Tensors&, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors&, int tag) override;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Makes a CUDA device the group's, and sets up there. All ranks call it, each with its own device.
  void eagerConnectSingleDevice(at::Device device) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  // Whether a vendor's library allocates for it, or else why not, if it should.
  std::pair<bool, std::string> allocates();
  // Has a vendor's library take a tensor in place, whose memory is kept as long.
  void register_memory(const at::Tensor& tensor);
  void deregister_memory(const at::Tensor& tensor);
  void setTimeout(Milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return engine_->collectives(comm()->get()); }
  void enableCollectivesTiming() override {}
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>&) override;
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>&, const c10::intrusive_ptr<Options>&,
                                    const int& rank, const int& size) override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { group_->wait_for_all(); }
  c10d::ErrorType getError() override { return group_->error(); }
  void abort() override;
  void shutdown() override;
#if NCCLX_TORCH_GE(2, 15)
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    group_->on_success(id, std::move(hook));
  }
  void unregisterCompletionHook(int64_t id) override { group_->remove_success_hook(id); }
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override { onFailure(std::move(hook), id); }
  void unregisterAbortHook(int64_t id) override { group_->remove_failure_hook(id); }
#endif

  // ---- for the object API, in every version of torch ----
  int host(int rank) { return engine_->host(comm()->get(), rank); }
  // Splits what the group has of a vendor's library, with all its ranks: for a group of these ranks, or for none if this rank is
  // not among them. Null: groups begin with it by themselves.
  std::shared_ptr<Part> part(const std::vector<int>& ranks);
  // Before the group's first operation on a device.
  void inherit(Part& part);
  // Waits for callbacks and hooks, up to a deadline.
  void settle() { group_->settle(); }
  // Ends operations in flight in all groups of the process; waits for callbacks and hooks, up to a deadline.
  static void end_all(const NcclxEngine* engine);
  void wait_for_hooks() { group_->wait_for_hooks(); }
  bool has_failed() const { return group_->error() != c10d::ErrorType::SUCCESS; }
  // Sets the job's numbers of this group's ranks.
  void name_ranks(const std::vector<int64_t>& members) const;
  void onFailure(GroupState::FailureHook hook, int64_t id) { group_->on_failure(id, stoppable(std::move(hook))); }
  // `async` says whether one on a device goes on a stream of its own instead of the current one.
  WorkPtr message(NcclxKind kind, Tensors& tensors, int peer, int tag, Milliseconds timeout, bool async = true);
  // Runs a blocking operation on tensors of the host, without Python's lock; one that it reads and writes is `target`. False:
  // it takes a work, and nothing has happened.
  bool run(const DirectCall& call, const at::Tensor& target, const at::Tensor& source, uint32_t reduce, int peer);
  // As c10d's, but to wait for one on a device does not block the thread.
  WorkPtr barrier_in_order(bool async, Milliseconds timeout);

  std::shared_ptr<Communicator> comm_or_none() const;
  // The communicator; throws if the group has no members yet.
  std::shared_ptr<Communicator> comm() const;

  // Windows by the engine's ids. Without `owning`, the caller keeps the tensor until the window is deregistered.
  uint64_t register_window(const at::Tensor& tensor, bool owning);
  void deregister_window(uint64_t window);
  // Windows of CUDA tensors come and go by calls of the host, which no graph repeats.
  void refuse_captures(const char* operation, std::optional<at::Device> device);
  void fence_window(uint64_t window);
  // The bytes of a rank's part; the tensor keeps the mapping.
  at::Tensor map_window(uint64_t window, int64_t rank);
  // How a get of a rank's part goes now.
  std::string window_get_path(uint64_t window, int64_t rank);
  // A put (reads the tensor), get (fills it), signal or wait_signal (without a tensor); the offset is in bytes.
  WorkPtr access_window(NcclxKind kind, uint64_t window, const std::optional<at::Tensor>& tensor, int peer,
                        int64_t offset, bool async, Milliseconds timeout);
  // An all_gather into this rank's part of a window, which `output` is.
  WorkPtr gather_into_window(uint64_t window, const at::Tensor& output, const at::Tensor& input, bool async,
                             int64_t timeout_ms);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;

  // From the members' handles to a store, this process's rank, the size, and the members' secret.
  using Handles = decltype(c10d::ReconfigureOptions::handles);
  using RendezvousResult = std::tuple<c10::intrusive_ptr<c10d::Store>, int, int, std::string>;
  using Rendezvous = std::function<RendezvousResult(int64_t uuid, const Handles& handles, Milliseconds timeout)>;
  void set_rendezvous(std::string handle, Rendezvous rendezvous);
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor = std::nullopt) override;
#endif

 private:
  // A barrier on the streams of a device, or of the host.
  WorkPtr barrier_on(std::optional<at::Device> device, bool async, Milliseconds timeout, StreamWork::Waits waits);
  // The arguments of an operation; `launch` submits `count` operations of them as one work.
  struct Call;
  WorkPtr launch(Call&& call);
  WorkPtr launch_on_host(Call&& call, const std::shared_ptr<Batch>& batch);
  WorkPtr launch_on(at::Device device, Call&& call, const std::shared_ptr<Batch>& batch);
  // Adds a message on a device to a batch, whose end submits it.
  WorkPtr record(at::Device device, Call&& call, Batch& batch);
  // The device whose streams order the call; none for one on host memory.
  static std::optional<at::Device> device_of(const Call& call);
  NcclxOp operation(const Call& call, const Operands& operands) const;
  // The work of a batch on streams.
  WorkPtr end_of(Batch& batch);
  // A work that has no operations of its own, after which `results` are there.
  WorkPtr ended(c10d::OpType type, Tensors results);
  // Sets up on the group's CUDA device, with all ranks, if the group is one that does so before its first operation there.
  void prepare_device();
  // The CUDA device on whose streams the group's barriers are; the same on all ranks, which have all used it or none.
  std::optional<at::Device> device_of_barriers();
  // The streams on this device, which is the group's from then on; refuses another one.
  std::shared_ptr<DeviceStreams> streams_on(at::Device device, const char* operation);
  // Waits for coalesced operations that write memory which the next one reads or writes: it may have to copy it.
  static void wait_for_operands(Batch& batch, const Call& call);
  // A group of some ranks of this one, with this store of their own.
  c10::intrusive_ptr<Backend> join(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& opts,
                                   int rank, int size, Part* part);
  // The timeout of operations, or -1 for the engine's configuration.
  Milliseconds limit() const;
  std::shared_ptr<Communicator> exchange_comm(std::shared_ptr<Communicator> comm);

  const NcclxEngine* engine_;
  const std::string name_;
  mutable std::mutex comm_mutex_;
  std::shared_ptr<Communicator> comm_;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  std::string handle_;
  Rendezvous rendezvous_;
#endif
  c10::intrusive_ptr<NcclxOptions> options_;
  std::shared_ptr<GroupState> group_ = GroupRegistry::make();
  // Null outside of startCoalescing and endCoalescing.
  std::shared_ptr<Batch> exchange_batch(std::shared_ptr<Batch> batch);
  std::mutex batch_mutex_;
  std::shared_ptr<Batch> batch_;
  SplitCalls split_calls_;
  std::atomic<bool> is_eager_{false};
  // The present members have used the CUDA device together. Messages are between some.
  std::atomic<bool> has_device_collectives_{false};
  std::mutex streams_mutex_;
  std::shared_ptr<DeviceStreams> streams_;
};

}  // namespace ncclx
