// The virtual functions of c10d::Backend as calls of the engine. Included by register.cpp: one translation unit, because
// torch's headers take longer to compile than all of this.
#include "backend.h"

#include <Python.h>
#include <c10/util/FunctionRef.h>

#include "sparse.h"
#include "store.h"

namespace ncclx {

using c10d::OpType;

namespace {

// Releases Python's lock, if this thread has it: the following calls may wait for callbacks that need it.
class WithoutGil {
 public:
  WithoutGil() : saved_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (saved_) PyEval_RestoreThread(saved_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* saved_;
};

}  // namespace

// How elements combine. The factor of PREMUL_SUM may be a tensor.
struct Reduction {
  uint32_t op = 0;
  double factor = 0;
  at::Tensor tensor{};

  // The factor as the host knows it; one in a device's memory is waited for.
  double factor_on_host() const { return tensor.defined() ? tensor.item<double>() : factor; }
};

struct NcclxBackend::Call {
  NcclxKind kind;
  const char* operation;  // in messages
  const char* title;      // in the profiler
  OpType type;
  Milliseconds timeout;
  bool async;
  Tensors results;
  Tensors profiled;
  int peer = 0;
  uint32_t tag = 0;
  Reduction reduction{};
  uint64_t window = 0;
  uint64_t offset = 0;
  std::vector<uint64_t> in_counts{};
  std::vector<uint64_t> out_counts{};
  std::optional<at::Device> device{};  // where it runs if there are no tensors
  StreamWork::Waits waits = StreamWork::Waits::Stream;
  // Fills the operands of the i-th of `count` operations, inputs first. Valid during `launch`.
  c10::function_ref<void(Operands&, size_t)> fill;
  size_t count = 1;
};

namespace {

// The single tensor of a list: c10d passes lists of one.
at::Tensor& single(Tensors& list, const char* operation, const char* argument) {
  if (list.size() != 1) refuse(operation, argument, "one tensor", std::to_string(list.size()));
  return list.front();
}

Tensors& single(std::vector<Tensors>& lists, const char* operation, const char* argument) {
  if (lists.size() != 1) refuse(operation, argument, "one list of tensors", std::to_string(lists.size()));
  return lists.front();
}

bool is_collective(NcclxKind kind) { return kind < NCCLX_SEND || kind == NCCLX_ALL_GATHER_PERSISTENT; }

[[noreturn]] void refuse_mixed(const char* operation) {
  refuse(operation, "tensor", "tensors on one device in a coalesced block", "some on the CPU and some on a CUDA device");
}

void check_some(const Tensors& tensors, const char* operation, const char* argument) {
  if (tensors.empty()) refuse(operation, argument, "at least one tensor", "an empty list");
}

Reduction reduction(const c10d::ReduceOp& op) {
  Reduction made{.op = static_cast<uint32_t>(op.op_)};
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    const auto* supplement = reinterpret_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    made.factor = supplement->double_factor;
    made.tensor = supplement->tensor_factor;
  }
  return made;
}

}  // namespace

Communicator::Communicator(const NcclxEngine* engine, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                           const std::string& name, Milliseconds timeout, const Hints& hints)
    : engine_(engine) {
  std::vector<const char*> pairs;
  for (const auto& [key, value] : hints) {
    pairs.push_back(key.c_str());
    pairs.push_back(value.c_str());
  }
  StoreAdapter adapter(store);
  const NcclxInit init{name.c_str(), rank, size, timeout.count(), pairs.data(), pairs.size() / 2, adapter.view()};
  NcclxError error;
  const int32_t status = engine_->create(&init, &comm_, &error);
  // After a failure, the key stays in the store for the ranks that have not read it yet.
  if (status != NCCLX_OK) raise(status, error.text);
  adapter.forget();
}

Communicator::~Communicator() {
  const WithoutGil released;
  engine_->destroy(comm_);
}

void Communicator::add_window(uint64_t id, Window window) {
  std::lock_guard<std::mutex> lock(windows_mutex_);
  windows_.emplace(id, std::move(window));
}

void Communicator::remove_window(uint64_t id) {
  decltype(windows_)::node_type removed;  // dropped after the lock: it holds a tensor
  std::lock_guard<std::mutex> lock(windows_mutex_);
  removed = windows_.extract(id);
}

std::optional<at::Device> Communicator::device_of_window(uint64_t id) {
  std::lock_guard<std::mutex> lock(windows_mutex_);
  const auto found = windows_.find(id);
  return found == windows_.end() ? std::nullopt : found->second.device;
}

void Communicator::watch(const std::shared_ptr<GroupState>& group) {
  struct LossCallback {
    std::weak_ptr<GroupState> group;
    uint64_t generation;
    const NcclxEngine* engine;
  };
  const auto done = [](void* context, int32_t status, const char*) {
    const std::unique_ptr<LossCallback> callback(static_cast<LossCallback*>(context));
    // Without a loss, this may run under the engine's lock, where the group with its hooks must not be dropped.
    if (status == NCCLX_OK) return;
    if (const auto group = callback->group.lock()) {
      GroupState::call_failure_hooks(callback->engine, group->record_failure(callback->generation, status));
    }
  };
  engine_->on_loss(comm_, done, new LossCallback{group, group->generation(), engine_});
}

NcclxBackend::NcclxBackend(const NcclxEngine* engine, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                           std::string name, c10::intrusive_ptr<NcclxOptions> options, bool joins)
    : Backend(rank, size), engine_(engine), name_(std::move(name)), options_(std::move(options)) {
  if (joins) {
    comm_ = std::make_shared<Communicator>(engine_, store, rank, size, name_, limit(), options_->hints);
    comm_->watch(group_);
    group_->set_comm(comm_);
    const auto& members = options_->global_ranks_in_group;
    name_ranks(std::vector<int64_t>(members.begin(), members.end()));
  }
  this->init();
}

Milliseconds NcclxBackend::limit() const { return options_->limit().value_or(Milliseconds(-1)); }

void NcclxBackend::name_ranks(const std::vector<int64_t>& members) const {
  if (const auto comm = comm_or_none()) engine_->set_members(comm->get(), members.data(), members.size());
}

std::shared_ptr<Communicator> NcclxBackend::comm_or_none() const {
  std::lock_guard<std::mutex> lock(comm_mutex_);
  return comm_;
}

std::shared_ptr<Communicator> NcclxBackend::comm() const {
  auto comm = comm_or_none();
  TORCH_CHECK(comm, "ncclx_rs: process group ", name_, " has no members: call reconfigure first");
  return comm;
}

std::shared_ptr<Communicator> NcclxBackend::exchange_comm(std::shared_ptr<Communicator> comm) {
  std::lock_guard<std::mutex> lock(comm_mutex_);
  comm_.swap(comm);
  return comm;
}

std::optional<at::Device> NcclxBackend::device_of(const Call& call) {
  for (const Tensors* tensors : {&call.profiled, &call.results}) {
    for (const at::Tensor& tensor : *tensors) {
      if (tensor.defined() && tensor.is_cuda()) return tensor.device();
    }
  }
  return call.device;
}

NcclxOp NcclxBackend::operation(const Call& call, const Operands& operands) const {
  NcclxOp op{};
  op.kind = call.kind;
  op.reduce = call.reduction.op;
  op.timeout_ms = call.timeout.count();
  op.peer = call.peer;
  op.tag = call.tag;
  op.device = NCCLX_HOST;
  op.in = operands.inputs().data();
  op.n_in = operands.inputs().size();
  op.out = operands.outputs().data();
  op.n_out = operands.outputs().size();
  op.in_counts = call.in_counts.data();
  op.out_counts = call.out_counts.data();
  op.n_counts = call.in_counts.size();
  op.window = call.window;
  op.offset = call.offset;
  return op;
}

WorkPtr NcclxBackend::launch(Call&& call) {
  const auto batch = [&] {
    std::lock_guard<std::mutex> lock(batch_mutex_);
    return batch_;
  }();
  try {
    const auto device = device_of(call);
    return device ? launch_on(*device, std::move(call), batch) : launch_on_host(std::move(call), batch);
  } catch (...) {
    // The program will not come to the end of the block, and what it calls later is not of it.
    std::lock_guard<std::mutex> lock(batch_mutex_);
    if (batch_ == batch) batch_.reset();
    throw;
  }
}

WorkPtr NcclxBackend::launch_on_host(Call&& call, const std::shared_ptr<Batch>& batch) {
  if (batch && batch->is_on_device()) refuse_mixed(call.operation);
  if (batch && (is_collective(call.kind) || !batch->has_only_messages())) wait_for_operands(*batch, call);
  const bool blocking = !call.async && !batch;
  const auto comm = this->comm();
  auto work = c10::make_intrusive<NcclxWork>(engine_, group_, getRank(), call.type, call.title,
                                             std::optional<Tensors>(std::move(call.profiled)), std::move(call.results));
  // All are filled before the first starts: none reads what another has written.
  std::vector<const Operands*> filled;
  for (size_t i = 0; i < call.count; ++i) {
    Operands& operands = work->operands(call.operation);
    if (call.fill) call.fill(operands, i);
    filled.push_back(&operands);
  }
  const double factor = call.reduction.factor_on_host();
  for (size_t i = 0; i < call.count; ++i) {
    NcclxOp op = operation(call, *filled[i]);
    op.factor = factor;
    op.blocking = blocking;
    NcclxError error;
    NcclxHandle* handle = nullptr;
    const int32_t status = engine_->submit(comm->get(), &op, &handle, &error);
    if (status != NCCLX_OK) {
      if (i == 0) raise(status, error.text);
      // Earlier operations of the call are in flight with this work's memory.
      work->fail(exception(status, error.text));
      break;
    }
    work->add(handle);
  }
  if (batch) work->join(batch);
  if (blocking) {
    work->drive();
  } else {
    work->follow();
  }
  return work;
}

void NcclxBackend::wait_for_operands(Batch& batch, const Call& call) {
  const Tensors &read = call.profiled, &written = call.results;
  for (const auto& work : batch.in_flight()) {
    // A message waits for no other: all ranks of a ring may receive first.
    if (!is_collective(call.kind) && c10d::isP2POp(work->retrieveOpType())) continue;
    const auto& writer = static_cast<const NcclxWork&>(*work);  // a batch has no other works
    const auto overlaps = [&](const at::Tensor& tensor) { return writer.writes(extent_of(tensor)); };
    if (std::any_of(read.begin(), read.end(), overlaps) || std::any_of(written.begin(), written.end(), overlaps)) {
      work->wait();
    }
  }
}

WorkPtr NcclxBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  at::Tensor tensor = single(tensors, "broadcast", "tensors");
  return launch({.kind = NCCLX_BROADCAST, .operation = "broadcast", .title = "ncclx_rs:broadcast",
                 .type = OpType::BROADCAST, .timeout = opts.timeout, .async = opts.asyncOp, .results = tensors,
                 .profiled = tensors, .peer = static_cast<int>(opts.rootRank),
                 .fill = [&](Operands& o, size_t) { o.in_place(tensor, "tensor"); }});
}

WorkPtr NcclxBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  at::Tensor tensor = single(tensors, "all_reduce", "tensors");
  if (tensor.is_sparse()) return allreduce_sparse(tensors, opts);
  const Reduction op = reduction(opts.reduceOp);
  return launch({.kind = NCCLX_ALL_REDUCE, .operation = "all_reduce", .title = "ncclx_rs:all_reduce",
                 .type = OpType::ALLREDUCE, .timeout = opts.timeout, .async = opts.asyncOp, .results = tensors,
                 .profiled = tensors, .reduction = op,
                 .fill = [&](Operands& o, size_t) { o.in_place(tensor, "tensor"); }});
}

WorkPtr NcclxBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  at::Tensor tensor = single(tensors, "all_reduce", "tensors");
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM) refuse("all_reduce", "op", "SUM for a sparse tensor", "another");
  sum_sparse(*this, tensor, opts.timeout);
  return ended(OpType::ALLREDUCE, tensors);
}

WorkPtr NcclxBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  check_some(tensors, "all_reduce_coalesced", "tensors");
  const Reduction op = reduction(opts.reduceOp);
  return launch({.kind = NCCLX_ALL_REDUCE, .operation = "all_reduce_coalesced", .title = "ncclx_rs:all_reduce",
                 .type = OpType::ALLREDUCE_COALESCED, .timeout = opts.timeout, .async = opts.asyncOp,
                 .results = tensors, .profiled = tensors, .reduction = op,
                 .fill = [&](Operands& o, size_t) {
                   for (const at::Tensor& tensor : tensors) o.in_place(tensor, "tensors");
                 }});
}

WorkPtr NcclxBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  at::Tensor tensor = single(tensors, "reduce", "tensors");
  const Reduction op = reduction(opts.reduceOp);
  return launch({.kind = NCCLX_REDUCE, .operation = "reduce", .title = "ncclx_rs:reduce", .type = OpType::REDUCE,
                 .timeout = opts.timeout, .async = opts.asyncOp, .results = tensors, .profiled = tensors,
                 .peer = static_cast<int>(opts.rootRank), .reduction = op,
                 .fill = [&](Operands& o, size_t) { o.in_place(tensor, "tensor"); }});
}

WorkPtr NcclxBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  at::Tensor input = single(inputs, "all_gather", "tensor");
  const Tensors& list = single(outputs, "all_gather", "tensor_list");
  if (list.size() != static_cast<size_t>(getSize())) {
    refuse("all_gather", "tensor_list", "a list of " + std::to_string(getSize()) + " tensors",
           std::to_string(list.size()));
  }
  return launch({.kind = NCCLX_ALL_GATHER, .operation = "all_gather", .title = "ncclx_rs:all_gather",
                 .type = OpType::ALLGATHER, .timeout = opts.timeout, .async = opts.asyncOp, .results = list,
                 .profiled = inputs, .fill = [&](Operands& o, size_t) {
                   o.input(input, "tensor");
                   for (const at::Tensor& tensor : list) {
                     const bool own = &tensor == &list[getRank()];
                     o.output(tensor, "tensor_list", own ? extent_of(tensor).begin : nullptr);
                   }
                 }});
}

namespace {

// The part of an all_gather's output that has this rank's own input.
const char* own_part(const at::Tensor& output, const at::Tensor& input, int rank) {
  const Extent whole = extent_of(output);
  return whole.is_empty() ? nullptr : whole.begin + rank * extent_of(input).length();
}

}  // namespace

WorkPtr NcclxBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return launch({.kind = NCCLX_ALL_GATHER, .operation = "all_gather_into_tensor", .title = "ncclx_rs:_all_gather_base",
                 .type = OpType::_ALLGATHER_BASE, .timeout = opts.timeout, .async = opts.asyncOp,
                 .results = {output}, .profiled = {input}, .fill = [&](Operands& o, size_t) {
                   o.input(input, "input_tensor");
                   o.output(output, "output_tensor", own_part(output, input, getRank()));
                 }});
}

// One operation for each tensor: outputs[rank][i] gets inputs[i] of `rank`.
WorkPtr NcclxBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  const char* operation = "all_gather_coalesced";
  check_some(inputs, operation, "input_list");
  if (outputs.size() != static_cast<size_t>(getSize())) {
    refuse(operation, "output_lists", "one list a rank, " + std::to_string(getSize()), std::to_string(outputs.size()));
  }
  Tensors results;
  for (const Tensors& list : outputs) {
    if (list.size() != inputs.size()) {
      refuse(operation, "output_lists", std::to_string(inputs.size()) + " tensors a rank", std::to_string(list.size()));
    }
    results.insert(results.end(), list.begin(), list.end());
  }
  return launch({.kind = NCCLX_ALL_GATHER, .operation = operation, .title = "ncclx_rs:all_gather",
                 .type = OpType::ALLGATHER_COALESCED, .timeout = opts.timeout, .async = opts.asyncOp,
                 .results = std::move(results), .profiled = inputs,
                 .fill = [&](Operands& o, size_t i) {
                   o.input(inputs[i], "input_list");
                   for (const Tensors& list : outputs) o.output(list[i], "output_lists");
                 },
                 .count = inputs.size()});
}

WorkPtr NcclxBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  const char* operation = "all_gather_into_tensor_coalesced";
  check_some(inputs, operation, "inputs");
  if (outputs.size() != inputs.size()) {
    refuse(operation, "outputs", std::to_string(inputs.size()) + " tensors", std::to_string(outputs.size()));
  }
  return launch({.kind = NCCLX_ALL_GATHER, .operation = operation, .title = "ncclx_rs:_all_gather_base",
                 .type = OpType::COALESCED, .timeout = opts.timeout, .async = opts.asyncOp, .results = outputs,
                 .profiled = inputs,
                 .fill = [&](Operands& o, size_t i) {
                   o.input(inputs[i], "inputs");
                   o.output(outputs[i], "outputs", own_part(outputs[i], inputs[i], getRank()));
                 },
                 .count = inputs.size()});
}

WorkPtr NcclxBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  at::Tensor input = single(inputs, "gather", "tensor");
  const bool root = opts.rootRank == getRank();
  if (!root && !outputs.empty() && !outputs.front().empty()) {
    refuse("gather", "gather_list", "none on a rank that is not the root", "a list");
  }
  const Tensors list = root ? single(outputs, "gather", "gather_list") : Tensors{};
  return launch({.kind = NCCLX_GATHER, .operation = "gather", .title = "ncclx_rs:gather", .type = OpType::GATHER,
                 .timeout = opts.timeout, .async = opts.asyncOp, .results = list, .profiled = inputs,
                 .peer = static_cast<int>(opts.rootRank), .fill = [&](Operands& o, size_t) {
                   o.input(input, "tensor");
                   for (const at::Tensor& tensor : list) o.output(tensor, "gather_list");
                 }});
}

#if NCCLX_TORCH_GE(2, 14)
WorkPtr NcclxBackend::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  const bool root = opts.rootRank == getRank();
  return launch({.kind = NCCLX_GATHER, .operation = "gather_single", .title = "ncclx_rs:gather",
                 .type = OpType::GATHER, .timeout = opts.timeout, .async = opts.asyncOp,
                 .results = root ? Tensors{output} : Tensors{}, .profiled = {input},
                 .peer = static_cast<int>(opts.rootRank), .fill = [&](Operands& o, size_t) {
                   o.input(input, "input");
                   if (root) o.output(output, "output");
                 }});
}
#endif

WorkPtr NcclxBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  at::Tensor output = single(outputs, "scatter", "tensor");
  const bool root = opts.rootRank == getRank();
  if (!root && !inputs.empty() && !inputs.front().empty()) {
    refuse("scatter", "scatter_list", "none on a rank that is not the root", "a list");
  }
  const Tensors list = root ? single(inputs, "scatter", "scatter_list") : Tensors{};
  return launch({.kind = NCCLX_SCATTER, .operation = "scatter", .title = "ncclx_rs:scatter", .type = OpType::SCATTER,
                 .timeout = opts.timeout, .async = opts.asyncOp, .results = outputs, .profiled = list,
                 .peer = static_cast<int>(opts.rootRank), .fill = [&](Operands& o, size_t) {
                   for (const at::Tensor& tensor : list) o.input(tensor, "scatter_list");
                   o.output(output, "tensor");
                 }});
}

WorkPtr NcclxBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
  at::Tensor output = single(outputs, "reduce_scatter", "output");
  const Tensors& list = single(inputs, "reduce_scatter", "input_list");
  if (list.size() != static_cast<size_t>(getSize())) {
    refuse("reduce_scatter", "input_list", "a list of " + std::to_string(getSize()) + " tensors",
           std::to_string(list.size()));
  }
  const Reduction op = reduction(opts.reduceOp);
  return launch({.kind = NCCLX_REDUCE_SCATTER, .operation = "reduce_scatter", .title = "ncclx_rs:reduce_scatter",
                 .type = OpType::REDUCE_SCATTER, .timeout = opts.timeout, .async = opts.asyncOp, .results = outputs,
                 .profiled = list, .reduction = op, .fill = [&](Operands& o, size_t) {
                   for (const at::Tensor& tensor : list) o.input(tensor, "input_list");
                   o.output(output, "output");
                 }});
}

WorkPtr NcclxBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  const Reduction op = reduction(opts.reduceOp);
  return launch({.kind = NCCLX_REDUCE_SCATTER, .operation = "reduce_scatter_tensor",
                 .title = "ncclx_rs:_reduce_scatter_base", .type = OpType::_REDUCE_SCATTER_BASE,
                 .timeout = opts.timeout, .async = opts.asyncOp, .results = {output}, .profiled = {input},
                 .reduction = op, .fill = [&](Operands& o, size_t) {
                   o.input(input, "input");
                   o.output(output, "output");
                 }});
}

WorkPtr NcclxBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  const char* operation = "reduce_scatter_tensor_coalesced";
  check_some(inputs, operation, "inputs");
  if (outputs.size() != inputs.size()) {
    refuse(operation, "outputs", std::to_string(inputs.size()) + " tensors", std::to_string(outputs.size()));
  }
  const Reduction op = reduction(opts.reduceOp);
  return launch({.kind = NCCLX_REDUCE_SCATTER, .operation = operation, .title = "ncclx_rs:_reduce_scatter_base",
                 .type = OpType::COALESCED, .timeout = opts.timeout, .async = opts.asyncOp, .results = outputs,
                 .profiled = inputs, .reduction = op,
                 .fill = [&](Operands& o, size_t i) {
                   o.input(inputs[i], "inputs");
                   o.output(outputs[i], "outputs");
                 },
                 .count = inputs.size()});
}

namespace {

// Split sizes are numbers of rows of the first dimension; no sizes mean equal shares.
std::vector<uint64_t> element_counts(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                     const char* argument) {
  const char* operation = "all_to_all_single";
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const uint64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) {
    if (rows % size != 0) {
      refuse(operation, argument, "a first dimension that " + std::to_string(size) + " ranks can share equally",
             std::to_string(rows));
    }
    return std::vector<uint64_t>(size, rows / size * row);
  }
  if (splits.size() != static_cast<size_t>(size)) {
    refuse(operation, argument, std::to_string(size) + " sizes, one a rank", std::to_string(splits.size()));
  }
  int64_t sum = 0;
  bool is_countable = true;
  std::vector<uint64_t> counts;
  for (int64_t split : splits) {
    if (split < 0) refuse(operation, argument, "sizes of at least 0", std::to_string(split));
    is_countable = is_countable && !__builtin_add_overflow(sum, split, &sum);
    // If the sum is right, no part is longer than the tensor, so that this does not overflow.
    counts.push_back(static_cast<uint64_t>(split) * row);
  }
  if (!is_countable || sum != rows) {
    refuse(operation, argument, "sizes that add up to the tensor's " + std::to_string(rows) + " rows",
           is_countable ? "a sum of " + std::to_string(sum) : "a sum beyond 64 bits");
  }
  return counts;
}

std::vector<uint64_t> element_counts(const Tensors& tensors) {
  std::vector<uint64_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

}  // namespace

WorkPtr NcclxBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  return launch({.kind = NCCLX_ALL_TO_ALL, .operation = "all_to_all_single", .title = "ncclx_rs:all_to_all",
                 .type = OpType::ALLTOALL_BASE, .timeout = opts.timeout, .async = opts.asyncOp, .results = {output},
                 .profiled = {input},
                 .in_counts = element_counts(input, input_splits, getSize(), "input_split_sizes"),
                 .out_counts = element_counts(output, output_splits, getSize(), "output_split_sizes"),
                 .fill = [&](Operands& o, size_t) {
                   o.input(input, "input");
                   o.output(output, "output");
                 }});
}

WorkPtr NcclxBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const auto size = static_cast<size_t>(getSize());
  for (const auto& [list, argument] : {std::pair{&inputs, "input_tensor_list"}, {&outputs, "output_tensor_list"}}) {
    if (list->size() == size) continue;
    refuse("all_to_all", argument, std::to_string(size) + " tensors, one a rank", std::to_string(list->size()));
  }
  return launch({.kind = NCCLX_ALL_TO_ALL, .operation = "all_to_all", .title = "ncclx_rs:all_to_all",
                 .type = OpType::ALLTOALL, .timeout = opts.timeout, .async = opts.asyncOp, .results = outputs,
                 .profiled = inputs, .in_counts = element_counts(inputs), .out_counts = element_counts(outputs),
                 .fill = [&](Operands& o, size_t) {
                   for (const at::Tensor& tensor : inputs) o.input(tensor, "input_tensor_list");
                   for (const at::Tensor& tensor : outputs) o.output(tensor, "output_tensor_list");
                 }});
}

WorkPtr NcclxBackend::barrier(const c10d::BarrierOptions& opts) {
  return barrier_on(device_of_barriers(), opts.asyncOp, opts.timeout, StreamWork::Waits::Host);
}

WorkPtr NcclxBackend::barrier_in_order(bool async, Milliseconds timeout) {
  return barrier_on(device_of_barriers(), async, timeout, StreamWork::Waits::Stream);
}

WorkPtr NcclxBackend::barrier_on(std::optional<at::Device> device, bool async, Milliseconds timeout,
                                 StreamWork::Waits waits) {
  return launch({.kind = NCCLX_BARRIER, .operation = "barrier", .title = "ncclx_rs:barrier", .type = OpType::BARRIER,
                 .timeout = timeout, .async = async, .results = {}, .profiled = {}, .device = device,
                 .waits = waits, .fill = nullptr});
}

WorkPtr NcclxBackend::message(NcclxKind kind, Tensors& tensors, int peer, int tag, Milliseconds timeout,
                              bool async) {
  const bool sends = kind == NCCLX_SEND;
  const char* operation = sends ? "send" : "recv";
  at::Tensor tensor = single(tensors, operation, "tensors");
  if (tag < 0) refuse(operation, "tag", "a number of at least 0", std::to_string(tag));
  const bool any = peer < 0;
  return launch({.kind = kind, .operation = operation,
                 .title = sends ? "ncclx_rs:send" : (any ? "ncclx_rs:recvAnySource" : "ncclx_rs:recv"),
                 .type = sends ? OpType::SEND : (any ? OpType::RECVANYSOURCE : OpType::RECV),
                 .timeout = timeout, .async = async || !tensor.is_cuda(), .results = tensors,
                 .profiled = tensors, .peer = peer, .tag = static_cast<uint32_t>(tag), .fill = [&](Operands& o, size_t) {
                   sends ? o.input(tensor, "tensor") : o.output(tensor, "tensor");
                 }});
}

WorkPtr NcclxBackend::send(Tensors& tensors, int peer, int tag) {
  if (peer < 0) refuse("send", "dst", "a rank of the group", std::to_string(peer));
  return message(NCCLX_SEND, tensors, peer, tag, c10d::kUnsetTimeout);
}

WorkPtr NcclxBackend::recv(Tensors& tensors, int peer, int tag) {
  if (peer < 0) refuse("recv", "src", "a rank of the group", std::to_string(peer));
  return message(NCCLX_RECV, tensors, peer, tag, c10d::kUnsetTimeout);
}

WorkPtr NcclxBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(NCCLX_RECV, tensors, -1, tag, c10d::kUnsetTimeout);
}

std::shared_ptr<Batch> NcclxBackend::exchange_batch(std::shared_ptr<Batch> batch) {
  std::lock_guard<std::mutex> lock(batch_mutex_);
  batch_.swap(batch);
  return batch;
}

void NcclxBackend::startCoalescing() { exchange_batch(std::make_shared<Batch>()); }

WorkPtr NcclxBackend::endCoalescing() {
  const auto batch = exchange_batch(nullptr);
  if (!batch) raise(NCCLX_USAGE, "end_coalescing: the block has ended already, by the error of one of its calls");
  if (batch->is_on_device()) return end_of(*batch);
  auto work =
      c10::make_intrusive<NcclxWork>(engine_, group_, getRank(), OpType::COALESCED, nullptr, std::nullopt, Tensors{});
  work->add(*batch);
  work->follow();
  return work;
}

void NcclxBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  onCompletionHook_ = hook;  // c10d checks whether there is one
  group_->on_completion(std::move(hook));
}

void NcclxBackend::abort() {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  group_->leave(rendezvous_ != nullptr);  // it may get members again
#else
  group_->leave();
#endif
  if (const auto comm = comm_or_none()) engine_->abort(comm->get(), "the process group was aborted");
}

void NcclxBackend::shutdown() {
  const WithoutGil released;
  // Hooks may look at the communicator's state, which ends with it.
  group_->wait_for_hooks();
  group_->leave();
  if (const auto comm = comm_or_none()) engine_->shutdown(comm->get());
}

void NcclxBackend::end_all(const NcclxEngine* engine) {
  const auto groups = GroupRegistry::alive();
  // Hooks may look at the communicators' state, which ends with the abort.
  auto deadline = GroupState::default_deadline();
  for (const auto& group : groups) group->wait_for_hooks(deadline);
  for (const auto& group : groups) {
    group->leave();
    if (const auto comm = group->comm()) engine->abort(comm->get(), "the process group was aborted");
  }
  // Hooks have had their time; only works are waited for.
  deadline = GroupState::default_deadline();
  for (const auto& group : groups) group->wait_for_works(deadline);
}

void NcclxBackend::setTimeout(Milliseconds timeout) {
  options_->limit(timeout);
  if (const auto comm = comm_or_none()) engine_->set_timeout(comm->get(), timeout.count());
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE

void NcclxBackend::set_rendezvous(std::string handle, Rendezvous rendezvous) {
  handle_ = std::move(handle);
  rendezvous_ = std::move(rendezvous);
}

c10d::ReconfigureHandle NcclxBackend::get_reconfigure_handle() const {
  TORCH_CHECK(rendezvous_, "ncclx_rs: get_reconfigure_handle: the process group was made without enable_reconfigure=True");
  return handle_;
}

WorkPtr NcclxBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  TORCH_CHECK(rendezvous_, "ncclx_rs: reconfigure: the process group was made without enable_reconfigure=True");
  const Milliseconds timeout = opts.timeout.value_or(options_->timeout);
  const auto [store, rank, size, secret] = rendezvous_(opts.uuid, opts.handles, timeout);
  Hints hints = options_->hints;
  for (const auto& [name, value] : opts.hints) hints[name] = value;
  hints["group_secret"] = secret;
  const WithoutGil released;
  // The old generation ends before the new one begins. The errors of its operations are no failure of the group.
  group_->pause();
  {
    const auto old = exchange_comm(nullptr);  // with the tensors of its windows
    if (old) engine_->abort(old->get(), "the process group was reconfigured");
    group_->wait_for_all();
  }
  auto comm = std::make_shared<Communicator>(engine_, store, rank, size, name_, timeout, hints);
  engine_->set_timeout(comm->get(), limit().count());  // `timeout` was that of joining
  rank_ = rank;
  size_ = size;
  has_device_collectives_ = false;  // these members have used no device together yet
  group_->resume();
  comm->watch(group_);
  group_->set_comm(comm);
  exchange_comm(std::move(comm));
  prepare_device();
  return ended(OpType::UNKNOWN, {});
}

#endif

c10::intrusive_ptr<c10d::Backend> NcclxBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& opts) {
  // Called on all ranks, also on those that are in no group or are given another one's ranks.
  const bool is_first = split_calls_.is_first(store);
  const auto part = is_first ? this->part(ranks) : nullptr;
  const auto position = std::find(ranks.begin(), ranks.end(), getRank());
  if (position == ranks.end()) return nullptr;
  if (const auto made = is_first ? nullptr : split_calls_.made(ranks.size())) return made;
  // Groups of one split may have the same name, and so the same store; their first ranks differ.
  const auto own = c10::make_intrusive<c10d::PrefixStore>(std::to_string(ranks.front()), store);
  auto made = join(own, opts, static_cast<int>(position - ranks.begin()), static_cast<int>(ranks.size()), part.get());
  split_calls_.keep(made);
  return made;
}

c10::intrusive_ptr<c10d::Backend> NcclxBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const c10::intrusive_ptr<Options>& opts, const int& rank,
                                                      const int& size) {
  // Who merges again with the same store has another rank.
  const auto known = split_calls_.is_first(store) ? nullptr : split_calls_.made(static_cast<size_t>(size));
  if (known && known->getRank() == rank) return known;
  auto made = join(store, opts, rank, size, nullptr);
  split_calls_.keep(made);
  return made;
}

c10::intrusive_ptr<c10d::Backend> NcclxBackend::join(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const c10::intrusive_ptr<Options>& opts, int rank, int size,
                                                     Part* part) {
  const auto* given = dynamic_cast<NcclxOptions*>(opts.get());
  // Always a copy: the caller may use its options for other groups.
  auto options = c10::make_intrusive<NcclxOptions>(given ? *given : *options_);
  if (given) {
    if (const auto limit = given->limit()) options->limit(*limit);
  } else {
    if (opts && opts->timeout != kBackendDefaultTimeout) options->limit(opts->timeout);
    options->group_name = opts ? opts->group_name : "";
    options->global_ranks_in_group = opts ? opts->global_ranks_in_group : std::vector<uint64_t>{};
  }
  auto made = c10::make_intrusive<NcclxBackend>(engine_, store, rank, size, options->group_name, options);
  made->setBoundDeviceId(getBoundDeviceId());
  made->is_eager_ = is_eager_.load();
  if (part) made->inherit(*part);
  made->prepare_device();
  return made;
}

}  // namespace ncclx
