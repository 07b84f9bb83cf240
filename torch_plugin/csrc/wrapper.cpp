// A communicator of the object API as a c10d backend: it calls the communicator's hooks around each operation.
// Included by register.cpp.
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ncclx {

class BackendWrapper : public c10d::Backend {
 public:
  // `comm` is a TorchComm over `inner`. `owns` says whether it ends with the process group.
  BackendWrapper(py::object comm, c10::intrusive_ptr<Backend> inner, bool owns)
      : Backend(inner->getRank(), inner->getSize()), comm_(std::move(comm)), inner_(std::move(inner)), owns_(owns),
        may_change_(comm_.attr("_options").attr("enable_reconfigure").cast<bool>()) {}

  ~BackendWrapper() override {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire lock;
      comm_ = py::object();
    } else {
      comm_.release();
    }
  }

  py::object comm() const { return comm_; }

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return call("broadcast", [&] { return inner_->broadcast(tensors, opts); }, tensors, opts);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return call("allreduce", [&] { return inner_->allreduce(tensors, opts); }, tensors, opts);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return call("allreduce", [&] { return inner_->allreduce_sparse(tensors, opts); }, tensors, opts);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return call("allreduce", [&] { return inner_->allreduce_coalesced(tensors, opts); }, tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return call("reduce", [&] { return inner_->reduce(tensors, opts); }, tensors, opts);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return call("allgather", [&] { return inner_->allgather(outputs, inputs, opts); }, outputs, inputs, opts);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return call("all_gather_single", [&] { return inner_->_allgather_base(output, input, opts); }, Tensors{output},
                Tensors{input}, opts);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return call("allgather_coalesced", [&] { return inner_->allgather_coalesced(outputs, inputs, opts); }, outputs,
                inputs, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return call("all_gather_single", [&] { return inner_->allgather_into_tensor_coalesced(outputs, inputs, opts); },
                outputs, inputs, opts);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    // In its torchcomms mode, torch passes one empty list on ranks other than the root, which gloo refuses.
    std::vector<Tensors> none;
    auto& lists = getRank() == opts.rootRank ? outputs : none;
    return call("gather", [&] { return inner_->gather(lists, inputs, opts); }, lists, inputs, opts);
  }
#if NCCLX_TORCH_GE(2, 14)
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override {
    return call("gather_single", [&] { return inner_->gather_single(output, input, opts); }, output, input, opts);
  }
#endif
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    return call("scatter", [&] { return inner_->scatter(outputs, inputs, opts); }, outputs, inputs, opts);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return call("reduce_scatter", [&] { return inner_->reduce_scatter(outputs, inputs, opts); }, outputs, inputs, opts);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return call("reduce_scatter_single", [&] { return inner_->_reduce_scatter_base(output, input, opts); },
                Tensors{output}, Tensors{input}, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return call("reduce_scatter_single",
                [&] { return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, opts); }, outputs, inputs, opts);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return call("alltoall_base",
                [&] { return inner_->alltoall_base(output, input, output_splits, input_splits, opts); }, output, input,
                output_splits, input_splits, opts);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return call("alltoall", [&] { return inner_->alltoall(outputs, inputs, opts); }, outputs, inputs, opts);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return call("barrier", [&] { return inner_->barrier(opts); }, opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    call("barrier", [&] { return inner_->monitoredBarrier(opts, wait_all_ranks), WorkPtr(); }, opts);
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return call("send", [&] { return inner_->send(tensors, peer, tag); }, tensors, peer);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return call("recv", [&] { return inner_->recv(tensors, peer, tag); }, tensors, peer);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return call("recv", [&] { return inner_->recvAnysource(tensors, tag); }, tensors, -1);
  }

  void eagerConnectSingleDevice(at::Device device) override { inner_->eagerConnectSingleDevice(device); }
  void startCoalescing() override {
    {
      py::gil_scoped_acquire lock;
      check_members("start_coalescing");
    }
    inner_->startCoalescing();
  }
  WorkPtr endCoalescing() override { return inner_->endCoalescing(); }

  void setTimeout(Milliseconds timeout) override {
    py::gil_scoped_acquire lock;
    comm_.attr("set_timeout")(timeout);
  }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void enableCollectivesTiming() override { inner_->enableCollectivesTiming(); }
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    onCompletionHook_ = hook;  // c10d checks whether there is one
    inner_->registerOnCompletionHook(std::move(hook));
  }
  void waitForPendingWorks() override { inner_->waitForPendingWorks(); }
  c10d::ErrorType getError() override { return inner_->getError(); }
  void abort() override {
    py::gil_scoped_acquire lock;
    // What former members had in flight has ended, and the communicator is that of others.
    if (has_same_members()) comm_.attr("abort")();
  }
  void shutdown() override {
    if (owns_) inner_->shutdown();
  }
#if NCCLX_TORCH_GE(2, 15)
  bool supportsAbortHooks() const override { return inner_->supportsAbortHooks(); }
  bool supportsCompletionHooks() const override { return inner_->supportsCompletionHooks(); }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    inner_->registerCompletionHook(id, std::move(hook));
  }
  void unregisterCompletionHook(int64_t id) override { inner_->unregisterCompletionHook(id); }
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override { inner_->registerAbortHook(id, std::move(hook)); }
  void unregisterAbortHook(int64_t id) override { inner_->unregisterAbortHook(id); }
#endif
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return inner_->supportsTensorAlloc(device); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return inner_->getMemAllocator(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inner_->allocateTensor(size, options);
  }
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return inner_->supportsWindow(); }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor = std::nullopt) override {
    c10::intrusive_ptr<c10d::Window> window;
    call("new_window", [&] { return window = inner_->new_window(tensor), WorkPtr(); });
    return window;
  }
#endif

  // Called on all ranks. A communicator split from `comm`, with a store of its own; none on ranks outside it.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override {
    py::gil_scoped_acquire lock;
    check_members("split");
    const auto timeout = (opts ? opts : inner_->getBackendOptions())->timeout;
    py::object child = comm_.attr("_split_for_c10d")(ranks, timeout);
    if (child.is_none()) return nullptr;
    auto inner = child.attr("_c10d_backend")().cast<c10::intrusive_ptr<Backend>>();
    return c10::make_intrusive<BackendWrapper>(std::move(child), std::move(inner), true);
  }

 private:
  // Whether the communicator has the members that it had when this was made: a process group's are always the same. Called
  // with Python's lock.
  bool has_same_members() const {
    return !may_change_ || comm_.attr("_c10d_backend")().cast<c10::intrusive_ptr<Backend>>() == inner_;
  }

  void check_members(const char* name) const {
    if (has_same_members()) return;
    const auto comm = comm_.attr("get_name")().cast<std::string>();
    raise(NCCLX_FAILURE, std::string(name) + ": communicator `" + comm +
                             "` was reconfigured, and this process group is that of its former members: make another one");
  }

  // Calls the pre-hooks, runs the operation, and calls the post-hooks with its work.
  template <typename Do, typename... Args>
  WorkPtr call(const char* name, Do&& work, const Args&... args) {
    std::vector<uint64_t> ids;
    {
      py::gil_scoped_acquire lock;
      check_members(name);
      if (comm_.attr("_has_hooks")().cast<bool>()) {
        ids = comm_.attr("_before_c10d")(name, args...).template cast<std::vector<uint64_t>>();
      }
    }
    WorkPtr made = work();
    if (!ids.empty()) {
      py::gil_scoped_acquire lock;
      comm_.attr("_after_c10d")(name, ids, made);
    }
    return made;
  }

  py::object comm_;
  c10::intrusive_ptr<Backend> inner_;
  const bool owns_;
  const bool may_change_;
};

}  // namespace ncclx
