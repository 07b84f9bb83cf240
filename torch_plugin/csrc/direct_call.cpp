// Blocking operations of the object API, and of operators, on plain tensors of the host: straight into the engine, without
// a work of c10d, and without pybind11, whose conversion of arguments takes longer than a short operation. What is not plain
// is declined before anything happens; the caller then takes the way of all other calls. Included by register.cpp.
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <memory>

namespace ncclx {

// An operation of a backend. Its tensors: one that is read and written, one that is read or written, two, or none.
struct DirectCall {
  enum class Tensors { InPlace, Read, Written, Both, None };

  NcclxKind kind;
  const char* name;  // the object API's
  c10d::OpType type;
  Tensors tensors;
};

namespace {

using Uses = DirectCall::Tensors;

constexpr std::array<DirectCall, 9> kDirectCalls{{
    {NCCLX_ALL_REDUCE, "all_reduce", OpType::ALLREDUCE, Uses::InPlace},
    {NCCLX_REDUCE, "reduce", OpType::REDUCE, Uses::InPlace},
    {NCCLX_BROADCAST, "broadcast", OpType::BROADCAST, Uses::InPlace},
    {NCCLX_ALL_GATHER, "all_gather_single", OpType::_ALLGATHER_BASE, Uses::Both},
    {NCCLX_REDUCE_SCATTER, "reduce_scatter_single", OpType::_REDUCE_SCATTER_BASE, Uses::Both},
    {NCCLX_ALL_TO_ALL, "all_to_all_single", OpType::ALLTOALL_BASE, Uses::Both},
    {NCCLX_BARRIER, "barrier", OpType::BARRIER, Uses::None},
    {NCCLX_SEND, "send", OpType::SEND, Uses::Read},
    {NCCLX_RECV, "recv", OpType::RECV, Uses::Written},
}};

const DirectCall& direct_call(NcclxKind kind) {
  return *std::find_if(kDirectCalls.begin(), kDirectCalls.end(), [&](const DirectCall& call) { return call.kind == kind; });
}

// Whether the engine can use a tensor's memory as it is.
bool is_plain_on_host(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && is_plain(tensor) && has_memory(tensor);
}

// Whether the ranks can share a tensor's rows equally.
bool is_shared_by(const at::Tensor& tensor, int size) { return tensor.dim() > 0 && tensor.size(0) % size == 0; }

}  // namespace

bool NcclxBackend::run(const DirectCall& call, const at::Tensor& target, const at::Tensor& source, uint32_t reduce,
                       int peer) {
  const bool is_coalescing = [&] {
    std::lock_guard<std::mutex> lock(batch_mutex_);
    return batch_ != nullptr;
  }();
  const auto comm = comm_or_none();
  // A profiler is told of works.
  if (is_coalescing || !comm || has_failed() || at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) return false;
  for (const at::Tensor* tensor : {&target, &source}) {
    if (tensor->defined() && !is_plain_on_host(*tensor)) return false;
  }
  NcclxOp op{};
  op.kind = call.kind;
  op.reduce = reduce;
  op.timeout_ms = -1;
  op.peer = peer;
  op.blocking = 1;
  op.device = NCCLX_HOST;
  NcclxBuffer read{}, written{};
  const at::Tensor& input = call.tensors == Uses::InPlace ? target : source;
  if (input.defined()) {
    read = buffer_of(input, call.name);
    op.in = &read;
    op.n_in = 1;
  }
  if (target.defined()) {
    written = buffer_of(target, call.name);
    op.out = &written;
    op.n_out = 1;
  }
  // Operands that share memory take copies.
  if (call.tensors == Uses::Both && extent_of(target).overlaps(extent_of(source))) return false;
  std::vector<uint64_t> in_counts, out_counts;
  if (call.kind == NCCLX_ALL_TO_ALL) {
    if (!is_shared_by(target, getSize()) || !is_shared_by(source, getSize())) return false;
    in_counts = element_counts(source, {}, getSize(), "input_split_sizes");
    out_counts = element_counts(target, {}, getSize(), "output_split_sizes");
    op.in_counts = in_counts.data();
    op.out_counts = out_counts.data();
    op.n_counts = in_counts.size();
  }
  const uint64_t generation = group_->generation();
  // Hooks are told of works, too.
  if (group_->work_started()) {
    group_->work_ended();
    return false;
  }
  const auto ended = c10::make_scope_exit([&] { group_->work_ended(); });
  NcclxError error;
  NcclxHandle* handle = nullptr;
  int32_t status = engine_->submit(comm->get(), &op, &handle, &error);
  if (status == NCCLX_USAGE) return false;  // the other way says so in the words of the caller
  if (status != NCCLX_OK) raise(status, error.text);
  try {
    const GroupState::OwnWork own(*group_);
    status = wait_for(engine_, handle, -1, &error);
  } catch (...) {
    // A signal's handler has raised: the operation goes on in the background, which keeps the tensors.
    auto rest = c10::make_intrusive<NcclxWork>(engine_, group_, getRank(), call.type, nullptr, std::nullopt,
                                               Tensors{target, source});
    rest->is_of(generation);
    rest->add(handle);
    rest->follow();
    throw;
  }
  engine_->release(handle);
  if (status == NCCLX_OK) return true;
  GroupState::call_failure_hooks(engine_, group_->record_failure(generation, status));
  raise(status, error.text);
}

namespace {

struct Bound {
  const DirectCall* call;
  c10::intrusive_ptr<NcclxBackend> backend;
};

constexpr const char* kBound = "ncclx_rs.direct_call";

// The tensor of an argument that is one or None. False: it is something else.
bool unpack(PyObject* argument, at::Tensor& tensor) {
  if (argument == Py_None) return true;
  if (!THPVariable_Check(argument)) return false;
  tensor = THPVariable_Unpack(argument);
  return true;
}

// (target, source, reduction, peer, async_op, hints, timeout, options) -> whether it was called.
PyObject* call_directly(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8, "ncclx_rs: a direct call takes 8 arguments, got ", count);
  const bool is_usual = arguments[4] == Py_False && arguments[5] == Py_None && arguments[6] == Py_None &&
                        arguments[7] == Py_None && PyLong_Check(arguments[2]) && PyLong_Check(arguments[3]);
  if (!is_usual) Py_RETURN_FALSE;
  at::Tensor target, source;
  if (!unpack(arguments[0], target) || !unpack(arguments[1], source)) Py_RETURN_FALSE;
  const auto* bound = static_cast<const Bound*>(PyCapsule_GetPointer(capsule, kBound));
  const auto uses = bound->call->tensors;
  const bool has_target = uses == Uses::InPlace || uses == Uses::Written || uses == Uses::Both;
  const bool has_source = uses == Uses::Read || uses == Uses::Both;
  if (target.defined() != has_target || source.defined() != has_source) Py_RETURN_FALSE;
  const long reduce = PyLong_AsLong(arguments[2]), peer = PyLong_AsLong(arguments[3]);
  // A reduction with a factor, or a number beyond those that there are.
  if (reduce < 0 || peer < 0 || peer >= bound->backend->getSize()) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  const bool is_done = [&] {
    const WithoutGil released;
    return bound->backend->run(*bound->call, target, source, static_cast<uint32_t>(reduce), static_cast<int>(peer));
  }();
  if (is_done) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef kCallDirectly{"direct_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_directly)),
                          METH_FASTCALL, "Runs an operation, if it is a blocking one on plain tensors; returns whether."};

// By the object API's names of the operations.
py::dict direct_calls(const c10::intrusive_ptr<NcclxBackend>& backend) {
  py::dict calls;
  for (const DirectCall& call : kDirectCalls) {
    auto bound = std::make_unique<Bound>(Bound{&call, backend});
    const py::capsule capsule(bound.release(), kBound, [](PyObject* dropped) {
      const std::unique_ptr<Bound> owned(static_cast<Bound*>(PyCapsule_GetPointer(dropped, kBound)));
      const WithoutGil released;
    });
    calls[call.name] = py::reinterpret_steal<py::object>(PyCFunction_New(&kCallDirectly, capsule.ptr()));
  }
  return calls;
}

}  // namespace
}  // namespace ncclx
