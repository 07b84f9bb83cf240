// Runs PyTorch's operators on CUDA tensors by their CPU kernels, over the alias of device memory: so that tests can
// compute what they move. An operator waits for its stream first and is done when it returns, hence cannot be captured.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <set>

namespace {

using at::Tensor;
using c10::IValue;

void* (*alias)(uint64_t, size_t) = nullptr;

// What keeps PyTorch's own CUDA implementation: it allocates, looks or copies without a kernel.
const std::set<std::string> KEPT = {
    "aten::_empty_affine_quantized",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_reshape_alias",
    "aten::alias",
    "aten::as_strided",
    "aten::copy_",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::unfold",
    "aten::view",
    "aten::view_as_complex",
    "aten::view_as_real",
    "aten::zero_",
};

void wait_for_stream(at::Device device) {
  c10::impl::VirtualGuardImpl guard(at::kCUDA);
  guard.synchronizeStream(guard.getStream(device));
}

char* host_bytes(const Tensor& tensor, size_t bytes) {
  auto* found = static_cast<char*>(alias(reinterpret_cast<uint64_t>(tensor.storage().data()), bytes));
  TORCH_CHECK(found, "the tensor's memory is not of the software CUDA");
  return found;
}

// One call: its CUDA tensors and the CPU tensors over the same bytes.
class Call {
 public:
  explicit Call(std::optional<at::Device> device = std::nullopt) : device_(device) {}

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (const auto& [host, device] : pairs_) {
      if (device.is_same(tensor)) return host;
    }
    if (!device_) device_ = tensor.device();
    wait_for_stream(tensor.device());
    Tensor host = view(tensor);
    if (tensor.is_conj()) host._set_conj(true);
    if (tensor.is_neg()) host._set_neg(true);
    pairs_.emplace_back(host, tensor);
    return host;
  }

  // A result: an argument that was written to, or a new tensor.
  Tensor to_device(const Tensor& host) {
    if (!host.defined()) return host;
    for (const auto& [known, device] : pairs_) {
      if (known.is_same(host)) return device;
    }
    return host.is_cpu() ? upload(host) : host;
  }

  // Arguments that the operator gave another size have their bytes elsewhere now.
  void follow_resizes() {
    for (auto& [host, device] : pairs_) {
      if (host.sizes() == device.sizes()) continue;
      device.resize_(host.sizes());
      write(device, host);
    }
  }

  // That of its tensors, or the current one.
  at::Device device() const { return device_.value_or(at::Device(at::kCUDA, current_device())); }

  void note(at::Device device) {
    if (!device_) device_ = device;
  }

 private:
  static Tensor view(const Tensor& tensor) {
    const auto options = tensor.options().device(at::kCPU);
    const size_t bytes = tensor.storage().nbytes();
    if (!bytes || !tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    char* start = host_bytes(tensor, bytes) + tensor.storage_offset() * tensor.element_size();
    return at::from_blob(start, tensor.sizes(), tensor.strides(), options);
  }

  static void write(const Tensor& device, const Tensor& host) {
    if (!host.numel()) return;
    // Memory that was just freed on the stream may still be read by what went before.
    wait_for_stream(device.device());
    view(device).copy_(host);
  }

  Tensor upload(const Tensor& host) {
    const at::Device device = this->device();
    const c10::OptionalDeviceGuard guard(device);
    const Tensor dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
    Tensor made = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(device));
    write(made, dense);
    return made;
  }

  static c10::DeviceIndex current_device() { return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index(); }

  std::optional<at::Device> device_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
};

void argument_to_host(IValue& value, Call& call) {
  if (value.isTensor()) {
    value = call.to_host(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.to_host(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec()) {
      list.push_back(tensor ? std::optional<Tensor>(call.to_host(*tensor)) : std::nullopt);
    }
    value = list;
  } else if (value.isDevice() && value.toDevice().is_cuda()) {
    call.note(value.toDevice());
    value = at::Device(at::kCPU);
  }
}

// One of the host whose numbers follow from the state of the device's, which goes on as it would on the device: programs
// set and restore that state, and the host's own is none of theirs.
at::Generator generator_on_host(const IValue& given, at::Device device) {
  at::Generator generator = given.isNone() ? at::globalContext().defaultGenerator(device) : given.toGenerator();
  if (generator.device().is_cpu()) return generator;
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);
  // The host's has 32 bits of seed: all bits of both count (splitmix64).
  uint64_t seed = generator.current_seed() + (offset + 1) * 0x9e3779b97f4a7c15;
  seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
  seed = (seed ^ (seed >> 27)) * 0x94d049bb133111eb;
  return at::detail::createCPUGenerator((seed ^ (seed >> 31)) & 0xffffffff);
}

bool is_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  const auto type = optional ? optional->getElementType() : argument.type();
  return type->kind() == c10::TypeKind::GeneratorType;
}

void result_to_device(IValue& value, Call& call) {
  if (value.isTensor()) {
    value = call.to_device(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.to_device(tensor));
    value = list;
  }
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  for (size_t i = first; i < stack->size(); ++i) argument_to_host((*stack)[i], call);
  for (size_t i = first; i < stack->size(); ++i) {
    if (is_generator(schema.arguments()[i - first])) {
      (*stack)[i] = generator_on_host((*stack)[i], call.device());
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.follow_resizes();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    result_to_device((*stack)[i], call);
  }
}

// Whether a copy moves bytes as they are: then PyTorch's own way, by the driver, is taken.
bool is_plain(const Tensor& to, const Tensor& from) {
  const bool same_order = to.strides() == from.strides() || (to.is_contiguous() && from.is_contiguous());
  return to.scalar_type() == from.scalar_type() && to.is_non_overlapping_and_dense() && to.sizes() == from.sizes() &&
         same_order && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

Tensor& copy(c10::DispatchKeySet, Tensor& self, const Tensor& source, bool non_blocking) {
  if (is_plain(self, source)) {
    static auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "").typed<Tensor&(Tensor&, const Tensor&, bool)>();
    // No kernel is registered for this key, so that the one for all keys runs, which CUDA's is.
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3), self, source, non_blocking);
  }
  Call call;
  call.to_host(self).copy_(call.to_host(source));
  return self;
}

// Of the backward passes that have no kernel on the host, the one that language models need.
std::tuple<Tensor, Tensor> rms_norm_backward(c10::DispatchKeySet, const Tensor& gradient, const Tensor& input,
                                             c10::IntArrayRef shape, const Tensor& rstd,
                                             const std::optional<Tensor>& weight, std::array<bool, 2> wanted) {
  std::vector<int64_t> normalized, others;
  for (int64_t i = 0; i < input.dim(); ++i) {
    (i < input.dim() - static_cast<int64_t>(shape.size()) ? others : normalized).push_back(i);
  }
  const Tensor wide = gradient.to(rstd.scalar_type());
  const Tensor unit = input.to(rstd.scalar_type()) * rstd;
  const bool has_weight = weight && weight->defined();
  Tensor of_input, of_weight;
  if (wanted[0]) {
    const Tensor scaled = has_weight ? wide * *weight : wide;
    of_input = ((scaled - unit * (unit * scaled).mean(normalized, true)) * rstd).to(input.scalar_type());
  }
  if (wanted[1] && has_weight) {
    const Tensor whole = wide * unit;
    of_weight = (others.empty() ? whole : whole.sum(others)).to(weight->scalar_type());
  }
  return {of_input, of_weight};
}

}  // namespace

// How many operators run on the host from now on; -1 without a software CUDA.
extern "C" __attribute__((visibility("default"))) int softcuda_install_fallback() {
  alias = reinterpret_cast<decltype(alias)>(dlsym(RTLD_DEFAULT, "softcuda_alias"));
  if (!alias) return -1;
  static auto* const kept_alive = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto put = [&](const c10::OperatorName& name, c10::KernelFunction kernel) {
    kept_alive->push_back(
        dispatcher.registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "softcuda"));
  };
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    // FSDP's others are made of operators of PyTorch's own.
    const bool is_known = name.name.rfind("aten::", 0) == 0 || name.name == "fsdp::chunk_cat_mixed_dtype";
    if (!op || !op->hasSchema() || !is_known || KEPT.count(toString(name))) continue;
    const bool on_both = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
                         op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    if (on_both) put(name, c10::KernelFunction::makeFromBoxedFunction<&run>());
  }
  put({"aten::copy_", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy));
  put({"aten::_fused_rms_norm_backward", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&rms_norm_backward));
  return static_cast<int>(kept_alive->size());
}
