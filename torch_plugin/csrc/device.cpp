// Operations on CUDA tensors. Included by register.cpp.
#include "backend.h"

namespace ncclx {

namespace {

// Of operations that have failed, though parts of them may be on this stream: their memory is not given out again before.
void keep(const DeviceStreams& streams, const c10::Stream& stream, const std::list<Operands>& all) {
  for (const Operands& operands : all) {
    for (const at::Tensor& tensor : operands.on_device()) streams.keep(tensor.storage().data_ptr(), stream);
  }
}

}  // namespace

std::optional<at::Device> NcclxBackend::device_of_barriers() {
  NcclxError error;
  const auto bound = getBoundDeviceId();
  if (bound && bound->is_cuda() && engine_->cuda_devices(&error) > 0) return bound;
  const auto streams = [&] {
    std::lock_guard<std::mutex> lock(streams_mutex_);
    return streams_;
  }();
  if (!streams) return std::nullopt;
  if (has_device_collectives_) return streams->device();
  // The barrier is one of the host then, which comes after what is on the stream all the same.
  streams->current().synchronize();
  return std::nullopt;
}

void NcclxBackend::eagerConnectSingleDevice(at::Device device) {
  if (!device.is_cuda()) return;
  setBoundDeviceId(device);
  is_eager_ = true;
  prepare_device();
}

std::shared_ptr<Part> NcclxBackend::part(const std::vector<int>& ranks) {
  const auto comm = comm_or_none();
  if (!comm) return nullptr;
  const bool is_member = std::find(ranks.begin(), ranks.end(), getRank()) != ranks.end();
  NcclxError error;
  NcclxPart* part = nullptr;
  const int32_t status = engine_->part(comm->get(), ranks.data(), is_member ? ranks.size() : 0, &part, &error);
  if (status != NCCLX_OK) raise(status, error.text);
  return part ? std::make_shared<Part>(engine_, part) : nullptr;
}

void NcclxBackend::inherit(Part& part) {
  const auto comm = comm_or_none();
  NcclxPart* const raw = comm ? part.release() : nullptr;
  if (raw) engine_->inherit(comm->get(), raw);
}

void NcclxBackend::prepare_device() {
  const auto device = getBoundDeviceId();
  const auto comm = comm_or_none();
  if (!is_eager_ || !device || !comm) return;
  // First with the other ranks: what this one lacks is an error on all.
  NcclxError error;
  const int32_t status = engine_->prepare_device(comm->get(), number_of(*device), &error);
  if (status != NCCLX_OK) raise(status, error.text);
  streams_on(*device, "prepare_device");
}

std::shared_ptr<DeviceStreams> NcclxBackend::streams_on(at::Device device, const char* operation) {
  const auto bound = getBoundDeviceId();
  std::lock_guard<std::mutex> lock(streams_mutex_);
  const auto expected = streams_ ? std::optional(streams_->device()) : bound;
  if (expected && expected->is_cuda() && *expected != device) refuse_place(operation, "tensor", *expected, device);
  if (!streams_) {
    NcclxError error;
    if (!c10::impl::hasDeviceGuardImpl(device.type()) || engine_->cuda_devices(&error) <= 0) {
      refuse_place(operation, "tensor", at::kCPU, device);
    }
    const bool is_high = engine_->is_high_priority_stream(comm()->get()) != 0;
    streams_ = std::make_shared<DeviceStreams>(device, is_high);
  }
  return streams_;
}

WorkPtr NcclxBackend::launch_on(at::Device device, Call&& call, const std::shared_ptr<Batch>& batch) {
  if (batch && batch->has_host_works()) refuse_mixed(call.operation);
  const bool is_message = !is_collective(call.kind);
  if (batch && is_message) return record(device, std::move(call), *batch);
  const auto comm = this->comm();
  const auto streams = streams_on(device, call.operation);
  if (!is_message) has_device_collectives_ = true;
  const bool aside = call.async || batch != nullptr;
  const c10::Stream current = streams->current();
  using Direction = DeviceStreams::Direction;
  const auto direction = call.kind == NCCLX_SEND          ? Direction::Send
                         : call.kind == NCCLX_RECV        ? Direction::Receive
                         : call.kind == NCCLX_WAIT_SIGNAL ? Direction::WaitForSignal
                                                          : Direction::Access;
  const c10::Stream stream = !aside       ? current
                             : is_message ? streams->of_messages(call.peer, direction)
                                          : streams->internal();
  DeviceStreams::order(current, stream);
  const c10::StreamGuard on_stream(stream);
  const at::Tensor factor = call.reduction.tensor.defined() && call.reduction.tensor.is_cuda()
                                ? call.reduction.tensor.resolve_neg()
                                : at::Tensor();
  if (factor.defined() && factor.device() != device) refuse_place(call.operation, "op", device, factor.device());
  if (factor.defined() && !has_memory(factor)) refuse_memory(call.operation, "op");
  const double number = factor.defined() ? 0 : call.reduction.factor_on_host();
  auto end = std::make_shared<StreamEnd>(engine_, group_, call.type);
  auto work = c10::make_intrusive<StreamWork>(end, streams, stream, call.waits, getRank(), call.type, call.title,
                                              std::optional<Tensors>(std::move(call.profiled)),
                                              std::move(call.results));
  // The engine refuses any source where there are several.
  if (call.kind == NCCLX_RECV) work->comes_from(call.peer < 0 ? getSize() - 1 - getRank() : call.peer);
  Written written;
  std::list<Operands> all;
  // All are filled before the first is put on the stream: none reads what another has written.
  for (size_t i = 0; i < call.count; ++i) {
    Operands& operands = all.emplace_back(call.operation, written, device);
    if (call.fill) call.fill(operands, i);
  }
  const NcclxBuffer factor_at = factor.defined() ? buffer_of(factor, call.operation) : NcclxBuffer{};
  bool has_failed = false;
  for (const Operands& operands : all) {
    NcclxOp op = operation(call, operands);
    op.factor = number;
    op.factor_at = factor.defined() ? &factor_at : nullptr;
    op.device = number_of(device);
    op.stream = reinterpret_cast<uint64_t>(stream.native_handle());
    NcclxError error;
    NcclxHandle* handle = nullptr;
    const int32_t status = engine_->submit(comm->get(), &op, &handle, &error);
    if (status == NCCLX_OK) {
      end->add(handle);
      continue;
    }
    if (&operands == &all.front()) {
      // A part of the operation may be on the stream.
      if (aside) keep(*streams, stream, all);
      raise(status, error.text);
    }
    // Earlier operations of the call are on the stream.
    end->fail(exception(status, error.text));
    has_failed = true;
    break;
  }
  end->follow();
  // On the stream too, after the operations: temporary tensors are this stream's, which may have their memory again.
  Tensors tensors;
  for (Operands& operands : all) {
    if (!has_failed) operands.finish();
    tensors.insert(tensors.end(), operands.on_device().begin(), operands.on_device().end());
  }
  if (factor.defined()) tensors.push_back(factor);
  if (aside) work->enqueued_aside(std::move(tensors));
  if (batch) batch->add(end, stream);
  work->end_profile();
  return work;
}

WorkPtr NcclxBackend::record(at::Device device, Call&& call, Batch& batch) {
  const auto streams = streams_on(device, call.operation);
  const c10::Stream stream = streams->joint();
  DeviceStreams::order(streams->current(), stream);
  // A message comes after the collectives of the block that were called before, which may write what it sends.
  for (const c10::Stream& earlier : batch.streams()) DeviceStreams::order(earlier, stream);
  const c10::StreamGuard on_stream(stream);
  Messages& messages = batch.messages();
  Operands& operands = messages.operands.emplace_back(call.operation, messages.written, device);
  call.fill(operands, 0);
  NcclxOp op = operation(call, operands);
  op.device = number_of(device);
  op.stream = reinterpret_cast<uint64_t>(stream.native_handle());
  auto work = c10::make_intrusive<MessageWork>(getRank(), call.type, std::move(call.results));
  messages.ops.push_back(op);
  messages.works.push_back(work);
  return work;
}

WorkPtr NcclxBackend::end_of(Batch& batch) {
  auto enqueued = batch.take_enqueued();
  const auto streams = [this] {
    std::lock_guard<std::mutex> lock(streams_mutex_);
    return streams_;
  }();
  auto end = std::make_shared<StreamEnd>(engine_, group_, OpType::COALESCED);
  Messages& messages = batch.messages();
  Tensors tensors;
  if (!messages.ops.empty()) {
    const c10::Stream of_messages = streams->joint();
    NcclxError error;
    NcclxHandle* handle = nullptr;
    const auto comm = this->comm();
    const auto& ops = messages.ops;
    const int32_t status = engine_->submit_batch(comm->get(), ops.data(), ops.size(), &handle, &error);
    if (status != NCCLX_OK) {
      keep(*streams, of_messages, messages.operands);
      raise(status, error.text);
    }
    end->add(handle);
    const c10::StreamGuard on_stream(of_messages);
    for (Operands& operands : messages.operands) {
      operands.finish();
      tensors.insert(tensors.end(), operands.on_device().begin(), operands.on_device().end());
    }
    if (std::find(enqueued.streams.begin(), enqueued.streams.end(), of_messages) == enqueued.streams.end()) {
      enqueued.streams.push_back(of_messages);
    }
  }
  const c10::Stream stream = streams->joint(enqueued.streams);
  for (auto& member : enqueued.ends) end->add(std::move(member));
  end->follow();
  auto work = c10::make_intrusive<StreamWork>(end, streams, stream, StreamWork::Waits::Stream, getRank(),
                                              OpType::COALESCED, nullptr, std::nullopt, Tensors{});
  const c10::StreamGuard on_stream(stream);
  work->enqueued_aside(std::move(tensors));
  for (const auto& message : messages.works) message->submitted(work);
  return work;
}

WorkPtr NcclxBackend::ended(OpType type, Tensors results) {
  const auto on_device = std::find_if(results.begin(), results.end(), [](const auto& tensor) { return tensor.is_cuda(); });
  if (on_device == results.end()) {
    auto work = c10::make_intrusive<NcclxWork>(engine_, group_, getRank(), type, nullptr, std::nullopt,
                                               std::move(results));
    work->follow();
    return work;
  }
  const auto streams = streams_on(on_device->device(), "all_reduce");
  auto end = std::make_shared<StreamEnd>(engine_, group_, type);
  end->follow();
  return c10::make_intrusive<StreamWork>(end, streams, streams->current(), StreamWork::Waits::Stream, getRank(), type,
                                         nullptr, std::nullopt, std::move(results));
}

}  // namespace ncclx
