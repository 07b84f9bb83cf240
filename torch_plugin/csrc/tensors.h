// Tensors as the engine sees them: contiguous host memory with an element type.
#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "errors.h"

namespace ncclx {

// Positions in the engine's list of element types (`DType::ALL`); checked against it when the module is loaded.
inline int32_t dtype_code(at::ScalarType type, const char* operation) {
  switch (type) {
    case at::kBool: return 0;
    case at::kByte: return 1;
    case at::kChar: return 2;
    case at::kUInt16: return 3;
    case at::kShort: return 4;
    case at::kUInt32: return 5;
    case at::kInt: return 6;
    case at::kUInt64: return 7;
    case at::kLong: return 8;
    case at::kHalf: return 9;
    case at::kBFloat16: return 10;
    case at::kFloat: return 11;
    case at::kDouble: return 12;
    case at::kComplexHalf: return 13;
    case at::kComplexFloat: return 14;
    case at::kComplexDouble: return 15;
    case at::kFloat8_e4m3fn: return 16;
    case at::kFloat8_e4m3fnuz: return 17;
    case at::kFloat8_e5m2: return 18;
    case at::kFloat8_e5m2fnuz: return 19;
    case at::kFloat8_e8m0fnu: return 20;
    case at::kFloat4_e2m1fn_x2: return 21;
    default: break;
  }
  // Types that are only moved.
  switch (c10::elementSize(type)) {
    case 1: return 22;
    case 2: return 23;
    case 4: return 24;
    case 8: return 25;
    case 16: return 26;
    default: refuse(operation, "tensor", "elements of 1, 2, 4, 8 or 16 bytes", c10::toString(type));
  }
}

// The memory of one operation: what the engine reads and writes, and what must be kept and copied back.
class Operands {
 public:
  explicit Operands(const char* operation) : operation_(operation) {}

  void input(const at::Tensor& tensor, const char* argument) {
    check(tensor, argument);
    at::Tensor plain = is_plain(tensor) ? tensor : tensor.contiguous().resolve_conj().resolve_neg();
    push(inputs_, plain);
  }

  void output(const at::Tensor& tensor, const char* argument) {
    check(tensor, argument);
    check_writable(tensor, argument);
    // The engine may write outputs in any order; where they share memory, the last one has to win.
    const bool direct = is_plain(tensor) && !overlaps_outputs(tensor);
    push(outputs_, direct ? tensor : temporary(tensor, at::empty(tensor.sizes(), tensor.options())));
  }

  void in_place(const at::Tensor& tensor, const char* argument) {
    check(tensor, argument);
    check_writable(tensor, argument);
    at::Tensor plain = tensor;
    if (!is_plain(tensor)) {
      plain = temporary(tensor, tensor.clone(at::MemoryFormat::Contiguous).resolve_conj().resolve_neg());
    }
    push(inputs_, plain);
    push(outputs_, plain);
  }

  // Memory that others may access at any time, so that nothing can stand in for it.
  void lend(const at::Tensor& tensor, const char* argument) {
    check(tensor, argument);
    check_writable(tensor, argument);
    if (!is_plain(tensor)) refuse(operation_, argument, "a contiguous tensor", "one of other strides");
    push(outputs_, tensor);
  }

  const std::vector<NcclxBuffer>& inputs() const { return inputs_; }
  const std::vector<NcclxBuffer>& outputs() const { return outputs_; }

  // Copies temporaries to the tensors that they stand for.
  void finish() {
    // Values of the engine's making have no gradient, also where the target is a parameter.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (auto& [target, source] : copies_) target.copy_(source);
  }

  void release() {
    copies_.clear();
    kept_.clear();
  }

 private:
  struct Range {
    const char* begin;
    const char* end;
  };

  static bool is_plain(const at::Tensor& tensor) {
    return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  }

  void check(const at::Tensor& tensor, const char* argument) const {
    if (!tensor.defined()) refuse(operation_, argument, "a tensor", "None");
    if (tensor.layout() != at::kStrided) refuse(operation_, argument, "a dense tensor", c10::str(tensor.layout()));
    if (!tensor.device().is_cpu()) {
      refuse(operation_, argument, "a tensor on the CPU, since ncclx_rs has no GPU backend on this machine",
             "one on " + tensor.device().str() +
                 " (move it to the CPU, or give its device another backend, as in \"cpu:ncclx_rs,cuda:nccl\")");
    }
  }

  void check_writable(const at::Tensor& tensor, const char* argument) const {
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      refuse(operation_, argument, "a tensor whose elements each have memory of their own", "an expanded view");
    }
  }

  // Whether the tensor shares memory with an output that was added before.
  bool overlaps_outputs(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return false;
    const auto* begin = static_cast<const char*>(tensor.data_ptr());
    const Range range{begin, begin + tensor.nbytes()};
    // Parts of one tensor in their order, the common case, are told apart by the first comparison.
    const bool near = range.begin < all_outputs_.end && all_outputs_.begin < range.end;
    const bool overlaps = near && std::any_of(output_ranges_.begin(), output_ranges_.end(), [&](const Range& other) {
                            return range.begin < other.end && other.begin < range.end;
                          });
    output_ranges_.push_back(range);
    all_outputs_ = {std::min(all_outputs_.begin, range.begin), std::max(all_outputs_.end, range.end)};
    if (output_ranges_.size() == 1) all_outputs_ = range;
    return overlaps;
  }

  at::Tensor temporary(const at::Tensor& target, at::Tensor source) {
    copies_.emplace_back(target, source);
    return source;
  }

  void push(std::vector<NcclxBuffer>& list, const at::Tensor& tensor) {
    list.push_back({tensor.numel() == 0 ? nullptr : tensor.data_ptr(), static_cast<uint64_t>(tensor.numel()),
                    dtype_code(tensor.scalar_type(), operation_), 0});
    kept_.push_back(tensor);
  }

  const char* operation_;
  std::vector<NcclxBuffer> inputs_;
  std::vector<NcclxBuffer> outputs_;
  std::vector<at::Tensor> kept_;
  std::vector<Range> output_ranges_;
  Range all_outputs_{};
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace ncclx
