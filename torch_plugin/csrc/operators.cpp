// The operators torch.ops.ncclx_rs.all_reduce_ and its sisters: collectives of a process group, by the group's name, that
// end before they return. They call the group's backend with no dispatch of c10d and no work for Python in between, and
// torch.compile takes them as they are. Each changes its first argument and returns nothing, so compilers neither drop
// nor repeat it. Included by register.cpp.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"

namespace ncclx {
namespace {

c10d::ReduceOp reduce_op(const char* operation, std::string_view name) {
  using Kind = c10d::ReduceOp::RedOpType;
  static constexpr std::array<std::pair<std::string_view, Kind>, 8> kinds{{{"sum", Kind::SUM},
                                                                           {"avg", Kind::AVG},
                                                                           {"product", Kind::PRODUCT},
                                                                           {"min", Kind::MIN},
                                                                           {"max", Kind::MAX},
                                                                           {"band", Kind::BAND},
                                                                           {"bor", Kind::BOR},
                                                                           {"bxor", Kind::BXOR}}};
  for (const auto& [known, kind] : kinds) {
    if (known == name) return kind;
  }
  refuse(operation, "op", "sum, avg, product, min, max, band, bor or bxor", "`" + std::string(name) + "`");
}

c10::intrusive_ptr<c10d::ProcessGroup> group_named(const char* operation, const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    refuse(operation, "group_name", "the name of a process group of this process", "`" + name + "`");
  }
}

// What serves tensors like this one in the group.
c10::intrusive_ptr<c10d::Backend> backend_of(const char* operation, const std::string& group, const at::Tensor& tensor) {
  return group_named(operation, group)->getBackend(tensor.device().type());
}

// Runs it without a work of c10d, if it is one on plain tensors of the host and the backend is the engine's.
bool ran(const c10::intrusive_ptr<c10d::Backend>& backend, NcclxKind kind, const at::Tensor& target,
         const at::Tensor& source, const c10d::ReduceOp& op = {}) {
  auto* ours = dynamic_cast<NcclxBackend*>(backend.get());
  return ours != nullptr && ours->run(direct_call(kind), target, source, static_cast<uint32_t>(op.op_), 0);
}

void finish(const c10::intrusive_ptr<c10d::Work>& work) {
  // None if the backend had nothing to do.
  if (work) work->wait();
}

void all_reduce(const at::Tensor& tensor, const std::string& group, std::string_view op) {
  const WithoutGil released;
  const auto backend = backend_of("all_reduce_", group, tensor);
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op("all_reduce_", op);
  if (ran(backend, NCCLX_ALL_REDUCE, tensor, {}, options.reduceOp)) return;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{tensor};
  finish(backend->allreduce(tensors, options));
}

void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input, const std::string& group) {
  const WithoutGil released;
  const auto backend = backend_of("all_gather_into_tensor_", group, input);
  if (ran(backend, NCCLX_ALL_GATHER, output, input)) return;
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  at::Tensor to = output, from = input;
  finish(backend->_allgather_base(to, from, options));
}

void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const std::string& group,
                           std::string_view op) {
  const WithoutGil released;
  const auto backend = backend_of("reduce_scatter_tensor_", group, input);
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op("reduce_scatter_tensor_", op);
  if (ran(backend, NCCLX_REDUCE_SCATTER, output, input, options.reduceOp)) return;
  options.asyncOp = false;
  at::Tensor to = output, from = input;
  finish(backend->_reduce_scatter_base(to, from, options));
}

// Without sizes, the ranks' parts are equal.
void all_to_all_single(const at::Tensor& output, const at::Tensor& input, const std::string& group,
                       at::IntArrayRef output_split_sizes, at::IntArrayRef input_split_sizes) {
  const WithoutGil released;
  const auto backend = backend_of("all_to_all_single_", group, input);
  const bool are_equal = output_split_sizes.empty() && input_split_sizes.empty();
  if (are_equal && ran(backend, NCCLX_ALL_TO_ALL, output, input)) return;
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  at::Tensor to = output, from = input;
  auto to_sizes = output_split_sizes.vec(), from_sizes = input_split_sizes.vec();
  finish(backend->alltoall_base(to, from, to_sizes, from_sizes, options));
}

// On tensors without data there is nothing to do: outputs have their shapes.
void all_reduce_meta(const at::Tensor&, const std::string&, std::string_view op) { reduce_op("all_reduce_", op); }
void all_gather_into_tensor_meta(const at::Tensor&, const at::Tensor&, const std::string&) {}
void reduce_scatter_tensor_meta(const at::Tensor&, const at::Tensor&, const std::string&, std::string_view op) {
  reduce_op("reduce_scatter_tensor_", op);
}
void all_to_all_single_meta(const at::Tensor&, const at::Tensor&, const std::string&, c10::SymIntArrayRef,
                            c10::SymIntArrayRef) {}

}  // namespace
}  // namespace ncclx

TORCH_LIBRARY_FRAGMENT(ncclx_rs, library) {
  library.def("all_reduce_(Tensor(a!) tensor, str group_name, str op='sum') -> ()");
  library.def("all_gather_into_tensor_(Tensor(a!) output, Tensor input, str group_name) -> ()");
  library.def("reduce_scatter_tensor_(Tensor(a!) output, Tensor input, str group_name, str op='sum') -> ()");
  library.def(
      "all_to_all_single_(Tensor(a!) output, Tensor input, str group_name, SymInt[] output_split_sizes=[], "
      "SymInt[] input_split_sizes=[]) -> ()");
}

namespace {

void implement(torch::Library& library) {
  library.impl("all_reduce_", TORCH_FN(ncclx::all_reduce));
  library.impl("all_gather_into_tensor_", TORCH_FN(ncclx::all_gather_into_tensor));
  library.impl("reduce_scatter_tensor_", TORCH_FN(ncclx::reduce_scatter_tensor));
  library.impl("all_to_all_single_", TORCH_FN(ncclx::all_to_all_single));
}

}  // namespace

TORCH_LIBRARY_IMPL(ncclx_rs, CPU, library) { implement(library); }
TORCH_LIBRARY_IMPL(ncclx_rs, CUDA, library) { implement(library); }
TORCH_LIBRARY_IMPL(ncclx_rs, Meta, library) {
  library.impl("all_reduce_", TORCH_FN(ncclx::all_reduce_meta));
  library.impl("all_gather_into_tensor_", TORCH_FN(ncclx::all_gather_into_tensor_meta));
  library.impl("reduce_scatter_tensor_", TORCH_FN(ncclx::reduce_scatter_tensor_meta));
  library.impl("all_to_all_single_", TORCH_FN(ncclx::all_to_all_single_meta));
}
