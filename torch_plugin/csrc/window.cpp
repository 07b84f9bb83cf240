// One-sided windows: the backend's calls, and c10d::Window over them. Included by register.cpp.
#include <cstring>

#include "backend.h"

namespace ncclx {

void NcclxBackend::refuse_captures(const char* operation, std::optional<at::Device> device) {
  if (!device) return;
  const c10::Stream stream = streams_on(*device, operation)->current();
  NcclxError error;
  const int32_t is_captured =
      engine_->is_captured(number_of(*device), reinterpret_cast<uint64_t>(stream.native_handle()), &error);
  if (is_captured < 0) raise(NCCLX_FAILURE, error.text);
  if (is_captured == 0) return;
  raise(NCCLX_USAGE, std::string(operation) +
                         ": expected a call outside of CUDA graph captures, got one while the current stream is captured; a "
                         "graph takes accesses to windows that are registered before the capture and deregistered after it");
}

uint64_t NcclxBackend::register_window(const at::Tensor& tensor, bool owning) {
  Written written;
  const auto device = tensor.is_cuda() ? std::optional(tensor.device()) : std::nullopt;
  refuse_captures("window_register", device);
  Operands operands("window_register", written, device.value_or(at::kCPU));
  operands.lend(tensor, "tensor");
  const auto comm = this->comm();
  uint64_t window = 0;
  NcclxError error;
  const int32_t status = engine_->window_register(comm->get(), operands.outputs().data(), &window, &error);
  if (status != NCCLX_OK) raise(status, error.text);
  comm->add_window(window, {owning ? tensor : at::Tensor(), device});
  // What is on this stream before, such as what fills the tensor, comes before other ranks' accesses that follow on theirs.
  if (device) barrier_on(device, false, c10d::kUnsetTimeout, StreamWork::Waits::Stream);
  return window;
}

void NcclxBackend::deregister_window(uint64_t window) {
  const auto comm = this->comm();
  refuse_captures("window_deregister", comm->device_of_window(window));
  NcclxError error;
  const int32_t status = engine_->window_deregister(comm->get(), window, &error);
  // After an error, accesses may still be in flight on a device: its memory stays until the communicator ends.
  if (status == NCCLX_OK || !comm->device_of_window(window)) comm->remove_window(window);
  if (status != NCCLX_OK) raise(status, error.text);
}

void NcclxBackend::fence_window(uint64_t window) {
  NcclxError error;
  const int32_t status = engine_->window_fence(comm()->get(), window, &error);
  if (status != NCCLX_OK) raise(status, error.text);
}

at::Tensor NcclxBackend::map_window(uint64_t window, int64_t rank) {
  NcclxMapping* mapping = nullptr;
  void* ptr = nullptr;
  uint64_t bytes = 0;
  NcclxError error;
  const auto number = rank >= 0 && rank < getSize() ? static_cast<int32_t>(rank) : -1;
  const int32_t status = engine_->window_map(comm()->get(), window, number, &mapping, &ptr, &bytes, &error);
  if (status != NCCLX_OK) raise(status, error.text);
  const auto unmap = [engine = engine_, mapping](void*) { engine->unmap(mapping); };
  return at::from_blob(ptr, {static_cast<int64_t>(bytes)}, unmap, at::kByte);
}

std::string NcclxBackend::window_get_path(uint64_t window, int64_t rank) {
  const char* name = nullptr;
  uint64_t bytes = 0;
  NcclxError error;
  const auto number = rank >= 0 && rank < getSize() ? static_cast<int32_t>(rank) : -1;
  const int32_t status = engine_->window_get_path(comm()->get(), window, number, &name, &bytes, &error);
  if (status != NCCLX_OK) raise(status, error.text);
  return {name, bytes};
}

WorkPtr NcclxBackend::access_window(NcclxKind kind, uint64_t window, const std::optional<at::Tensor>& tensor, int peer,
                                    int64_t offset, bool async, Milliseconds timeout) {
  const char* title = kind == NCCLX_PUT          ? "ncclx_rs:put"
                      : kind == NCCLX_GET        ? "ncclx_rs:get"
                      : kind == NCCLX_ACCUMULATE ? "ncclx_rs:accumulate"
                      : kind == NCCLX_FLUSH      ? "ncclx_rs:flush"
                      : kind == NCCLX_SIGNAL     ? "ncclx_rs:signal"
                                                 : "ncclx_rs:wait_signal";
  const char* operation = title + std::strlen("ncclx_rs:");
  if (offset < 0) refuse(operation, "offset", "a number of at least 0", std::to_string(offset));
  const Tensors tensors = tensor ? Tensors{*tensor} : Tensors{};
  WorkPtr work = launch({.kind = kind, .operation = operation,
                         .title = title,
                         .type = OpType::UNKNOWN, .timeout = timeout, .async = async, .results = tensors,
                         .profiled = tensors, .peer = peer, .window = window, .offset = static_cast<uint64_t>(offset),
                         .device = comm()->device_of_window(window),
                         .fill = [&](Operands& o, size_t) {
                           if (tensor) kind == NCCLX_GET ? o.output(*tensor, "tensor") : o.input(*tensor, "tensor");
                         }});
  if (!async) work->wait();
  return work;
}

WorkPtr NcclxBackend::gather_into_window(uint64_t window, const at::Tensor& output, const at::Tensor& input, bool async,
                                         int64_t timeout_ms) {
  WorkPtr work = launch({.kind = NCCLX_ALL_GATHER_PERSISTENT, .operation = "all_gather_p", .title = "ncclx_rs:all_gather_p",
                         .type = OpType::_ALLGATHER_BASE, .timeout = Milliseconds(timeout_ms), .async = async,
                         .results = {output}, .profiled = {input}, .window = window,
                         .fill = [&](Operands& o, size_t) {
                           o.input(input, "input");
                           o.output(output, "output", own_part(output, input, getRank()));
                         }});
  if (!async) work->wait();
  return work;
}

#ifdef C10D_BACKEND_HAS_WINDOW

namespace {

class NcclxWindow : public c10d::Window {
 public:
  explicit NcclxWindow(c10::intrusive_ptr<NcclxBackend> backend) : backend_(std::move(backend)) {}

  void tensor_register(const at::Tensor& tensor, bool owning = true) override {
    TORCH_CHECK(!id_, "ncclx_rs: window_register: Double registration error: the window has a tensor already");
    comm_ = backend_->comm_or_none();
    id_ = backend_->register_window(tensor, owning);
    // Without ownership, the view does not keep the memory alive.
    tensor_ = owning ? tensor : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.options());
  }

  void tensor_deregister() override {
    TORCH_CHECK(id_, "ncclx_rs: window_deregister: Double deregistration error: the window has no tensor");
    const auto comm = comm_.lock();
    // First, as the window stays then.
    if (comm) backend_->refuse_captures("window_deregister", comm->device_of_window(*id_));
    const uint64_t id = *id_;
    id_.reset();
    tensor_.reset();
    // One of former members has ended with them.
    if (comm && comm == backend_->comm_or_none()) backend_->deregister_window(id);
  }

  WorkPtr put(const at::Tensor& tensor, int64_t dst, int64_t offset, bool async,
              const c10d::PutOptions& opts = {}) override {
    if (!tensor.is_contiguous()) refuse("put", "tensor", "a contiguous tensor", "one of other strides");
    int64_t bytes = 0;
    if (__builtin_mul_overflow(offset, tensor.element_size(), &bytes)) {
      refuse("put", "offset", "a number of bytes within 64 bits", std::to_string(offset) + " elements");
    }
    return backend_->access_window(NCCLX_PUT, id(), tensor, checked("put", "dst", dst), bytes, async, opts.timeout);
  }

  WorkPtr signal(int64_t peer, bool async, const c10d::SignalOptions& opts = {}) override {
    return backend_->access_window(NCCLX_SIGNAL, id(), std::nullopt, checked("signal", "dst", peer), 0, async, opts.timeout);
  }

  WorkPtr wait_signal(int64_t peer, bool async, const c10d::WaitSignalOptions& opts = {}) override {
    return backend_->access_window(NCCLX_WAIT_SIGNAL, id(), std::nullopt, checked("wait_signal", "src", peer), 0, async,
                                   opts.timeout);
  }

  at::Tensor map_remote_tensor(int64_t rank) override {
    if (rank == backend_->getRank()) return id(), tensor_;
    const auto mapped = backend_->map_window(id(), rank);
    if (mapped.numel() != static_cast<int64_t>(tensor_.nbytes())) {
      refuse("map_remote_tensor", "rank", "a rank with a part of " + std::to_string(tensor_.nbytes()) + " bytes",
             "one of " + std::to_string(mapped.numel()));
    }
    return mapped.view(tensor_.scalar_type()).view(tensor_.sizes());
  }

  c10d::WindowAttr get_attr(int64_t peer) override {
    bool unified = peer == backend_->getRank();
    try {
      if (!unified) unified = backend_->map_window(id(), peer).defined();
    } catch (const std::exception&) {
      // Only operations reach that rank's memory.
    }
    return {unified ? c10d::WindowAccessType::UNIFIED : c10d::WindowAccessType::SEPARATE};
  }

 private:
  uint64_t id() const {
    TORCH_CHECK(id_, "ncclx_rs: the window has no tensor: call tensor_register first");
    const auto comm = comm_.lock();
    TORCH_CHECK(comm && comm == backend_->comm_or_none(),
                "ncclx_rs: the window has ended, since the members of its process group have changed: call tensor_deregister, "
                "then tensor_register");
    return *id_;
  }

  // A rank as the engine's shorter number.
  int checked(const char* operation, const char* argument, int64_t rank) const {
    const int size = backend_->getSize();
    if (rank < 0 || rank >= size) {
      refuse(operation, argument, "a rank in [0, " + std::to_string(size) + ")", std::to_string(rank));
    }
    return static_cast<int>(rank);
  }

  c10::intrusive_ptr<NcclxBackend> backend_;
  std::weak_ptr<Communicator> comm_;  // whose window it is: others have windows of the same number
  std::optional<uint64_t> id_;
  at::Tensor tensor_;
};

}  // namespace

c10::intrusive_ptr<c10d::Window> NcclxBackend::new_window(const std::optional<at::Tensor>& tensor) {
  auto window =
      c10::make_intrusive<NcclxWindow>(c10::intrusive_ptr<NcclxBackend>::unsafe_reclaim_from_nonowning(this));
  if (tensor) window->tensor_register(*tensor);
  return window;
}

#endif

}  // namespace ncclx
