// Converts tensors to the engine's buffers: contiguous memory with an element type.
#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "errors.h"

namespace ncclx {

// The positions in the engine's list of element types (`DType::ALL`).
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
  // Types without arithmetic, which are only copied.
  switch (c10::elementSize(type)) {
    case 1: return 22;
    case 2: return 23;
    case 4: return 24;
    case 8: return 25;
    case 16: return 26;
    default: refuse(operation, "tensor", "elements of 1, 2, 4, 8 or 16 bytes", c10::toString(type));
  }
}

// The device's number in the engine.
inline int32_t number_of(at::Device device) {
  if (!device.is_cuda()) return NCCLX_HOST;
  return device.index();
}

// A contiguous tensor as the engine's buffer.
inline NcclxBuffer buffer_of(const at::Tensor& tensor, const char* operation) {
  return {tensor.numel() == 0 ? nullptr : tensor.data_ptr(), static_cast<uint64_t>(tensor.numel()),
          dtype_code(tensor.scalar_type(), operation), number_of(tensor.device())};
}

// Refuses a tensor that lies elsewhere than where the call runs.
[[noreturn]] inline void refuse_place(const char* operation, const char* argument, at::Device expected, at::Device got) {
  if (expected.is_cpu()) {
    refuse(operation, argument, "a tensor on the CPU, the one device that ncclx_rs serves here",
           "one on " + got.str() + " (move it to the CPU, or make the group with \"cpu:ncclx_rs,cuda:nccl\")");
  }
  refuse(operation, argument, "a tensor on " + expected.str() + ", where the group's others are", "one on " + got.str());
}

// Refuses a tensor whose storage does not have its elements.
[[noreturn]] inline void refuse_memory(const char* operation, const char* argument) {
  refuse(operation, argument, "a tensor with memory of its own (of a DTensor pass `to_local()`)", "one without");
}

// The memory from the first to the last element of a tensor, with any gaps.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;

  bool is_empty() const { return begin == end; }
  uint64_t length() const { return static_cast<uint64_t>(end - begin); }
  bool overlaps(const Extent& other) const { return begin < other.end && other.begin < end; }
  // The smallest extent that contains both.
  Extent with(const Extent& other) const {
    if (is_empty()) return other;
    if (other.is_empty()) return *this;
    return {std::min(begin, other.begin), std::max(end, other.end)};
  }
};

// How many elements there is room for from the first to the last element of a dense tensor.
inline int64_t span_of(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor.numel();
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return last + 1;
}

inline Extent extent_of(const at::Tensor& tensor) {
  // A device's addresses are never the host's, so that both may be compared.
  const bool is_served = tensor.defined() && (tensor.is_cpu() || tensor.is_cuda());
  const bool has_memory = is_served && tensor.layout() == at::kStrided;
  if (!has_memory || tensor.numel() == 0) return {};
  const auto* begin = static_cast<const char*>(tensor.data_ptr());
  return {begin, begin + span_of(tensor) * tensor.element_size()};
}

// Whether a dense tensor's storage has its elements. That of a wrapper subclass has no memory, and any may have been resized.
inline bool has_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const c10::Storage& storage = tensor.storage();
  if (storage.data() == nullptr) return false;
  return static_cast<size_t>((tensor.storage_offset() + span_of(tensor)) * tensor.element_size()) <= storage.nbytes();
}

// Whether a dense tensor's memory has its elements as they are, one after the other.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// The memory that the operations of one call write.
class Written {
 public:
  bool overlaps(const Extent& extent) const {
    // In the common case, parts of one tensor in their order, the first comparison decides.
    return !extent.is_empty() && all_.overlaps(extent) &&
           std::any_of(each_.begin(), each_.end(), [&](const Extent& other) { return other.overlaps(extent); });
  }

  void add(const Extent& extent) {
    if (extent.is_empty()) return;
    all_ = all_.with(extent);
    each_.push_back(extent);
  }

 private:
  Extent all_;
  std::vector<Extent> each_;
};

// The memory of one operation: the buffers that the engine reads and writes, the tensors to keep, and the copies to write
// back.
//
// To the caller, a call reads all inputs before it writes anything, and then writes its results one after the other, as
// gloo does. The engine reads and writes in any order, so operands that share memory are replaced by copies. `written` is
// the memory that the operations of the same call write; they are filled in their order.
//
// On a device, copies are put on the current stream, on which the operations follow.
class Operands {
 public:
  Operands(const char* operation, Written& written, at::Device device = at::kCPU)
      : operation_(operation), written_(written), device_(device) {}

  void input(const at::Tensor& tensor, const char* argument) {
    check(tensor, argument);
    const Extent extent = extent_of(tensor);
    if (!is_plain(tensor) || written_.overlaps(extent)) {
      push(inputs_, copy_of(tensor));
      input_extents_.emplace_back();
      return;
    }
    push(inputs_, tensor);
    input_extents_.push_back(extent);
    all_inputs_ = all_inputs_.with(extent);
  }

  // An input may lie at `own_part`, where the operation writes the same data.
  void output(const at::Tensor& tensor, const char* argument, const char* own_part = nullptr) {
    check(tensor, argument);
    check_writable(tensor, argument);
    const Extent extent = extent_of(tensor);
    // Of results that share memory, the last one must win.
    const bool direct = is_plain(tensor) && !written_.overlaps(extent) && free_of_inputs(extent, own_part);
    written_.add(extent);
    push(outputs_, direct ? tensor : temporary(tensor, at::empty(tensor.sizes(), tensor.options())));
  }

  void in_place(const at::Tensor& tensor, const char* argument) {
    check(tensor, argument);
    check_writable(tensor, argument);
    const Extent extent = extent_of(tensor);
    const bool direct = is_plain(tensor) && !written_.overlaps(extent);
    written_.add(extent);
    const at::Tensor plain = direct ? tensor : temporary(tensor, copy_of(tensor));
    push(inputs_, plain);
    push(outputs_, plain);
  }

  // Memory that other ranks may access at any time, so that no copy can replace it.
  void lend(const at::Tensor& tensor, const char* argument) {
    check(tensor, argument);
    check_writable(tensor, argument);
    if (!is_plain(tensor)) refuse(operation_, argument, "a contiguous tensor", "one of other strides");
    push(outputs_, tensor);
  }

  const std::vector<NcclxBuffer>& inputs() const { return inputs_; }
  const std::vector<NcclxBuffer>& outputs() const { return outputs_; }
  // The program's own tensors on a device.
  const std::vector<at::Tensor>& on_device() const { return on_device_; }

  // Copies temporaries to the tensors that they replace.
  void finish() {
    // The engine's results have no gradient, also if the target is a parameter.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (auto& [target, source] : copies_) target.copy_(source);
  }

  void release() {
    copies_.clear();
    kept_.clear();
  }

 private:
  void check(const at::Tensor& tensor, const char* argument) {
    if (!tensor.defined()) refuse(operation_, argument, "a tensor", "None");
    if (tensor.layout() != at::kStrided) refuse(operation_, argument, "a dense tensor", c10::str(tensor.layout()));
    if (tensor.device() != device_) refuse_place(operation_, argument, device_, tensor.device());
    if (!has_memory(tensor)) refuse_memory(operation_, argument);
    if (device_.is_cuda()) on_device_.push_back(tensor);
  }

  void check_writable(const at::Tensor& tensor, const char* argument) const {
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      refuse(operation_, argument, "a tensor whose elements each have memory of their own", "an expanded view");
    }
  }

  static at::Tensor copy_of(const at::Tensor& tensor) {
    return tensor.clone(at::MemoryFormat::Contiguous).resolve_conj().resolve_neg();
  }

  // Whether the output can be written there without harm to the inputs. Copies inputs that overlap it and are not longer.
  bool free_of_inputs(const Extent& output, const char* own_part) {
    if (!all_inputs_.overlaps(output)) return true;
    bool is_free = true;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Extent& input = input_extents_[i];
      if (!input.overlaps(output) || input.begin == own_part) continue;
      if (input.length() > output.length()) {
        is_free = false;
        continue;
      }
      kept_.push_back(copy_of(kept_[i]));  // the inputs come first in `kept_`
      inputs_[i].ptr = kept_.back().data_ptr();
      input_extents_[i] = {};
    }
    return is_free;
  }

  at::Tensor temporary(const at::Tensor& target, at::Tensor source) {
    copies_.emplace_back(target, source);
    return source;
  }

  void push(std::vector<NcclxBuffer>& list, const at::Tensor& tensor) {
    list.push_back(buffer_of(tensor, operation_));
    kept_.push_back(tensor);
  }

  const char* operation_;
  Written& written_;
  const at::Device device_;
  std::vector<at::Tensor> on_device_;
  std::vector<Extent> input_extents_;  // empty for inputs that were copied
  Extent all_inputs_;
  std::vector<NcclxBuffer> inputs_;
  std::vector<NcclxBuffer> outputs_;
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace ncclx
