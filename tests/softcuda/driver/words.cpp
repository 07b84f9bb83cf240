// Stream memory operations: a stream writes words, and waits for words that others write.
#include <atomic>
#include <cstdio>
#include <vector>

#include "call.h"
#include "context.h"
#include "delay.h"
#include "host_memory.h"
#include "memory.h"
#include "stream.h"

namespace softcuda {

namespace {

template <class Word>
bool is_satisfied(Word found, Word wanted, unsigned flags) {
  using Signed = std::make_signed_t<Word>;
  switch (flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return static_cast<Signed>(found - wanted) >= 0;  // cyclic
    case CU_STREAM_WAIT_VALUE_EQ:
      return found == wanted;
    case CU_STREAM_WAIT_VALUE_AND:
      return (found & wanted) != 0;
    default:
      return static_cast<Word>(~(found | wanted)) != 0;
  }
}

template <class Word>
std::atomic<Word>* word_at(CUdeviceptr address) {
  char* bytes = reach_from_device(address, sizeof(Word), running().progress->device, "a word");
  return reinterpret_cast<std::atomic<Word>*>(bytes);
}

template <class Word>
void write_word(CUdeviceptr address, Word value, unsigned flags) {
  if (!(flags & CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER)) running().progress->stores.publish();
  std::atomic<Word>* word = word_at<Word>(address);
  if (!word) return;
  // Partner: the acquiring load of who waits for it, on the host or in another process.
  word->store(value, std::memory_order_release);
  notify_waiters();
}

template <class Word>
void wait_for_word(CUdeviceptr address, Word value, unsigned flags) {
  const std::atomic<Word>* word = word_at<Word>(address);
  if (!word) return;
  const auto now = [&] { return word->load(std::memory_order_acquire); };
  wait_until(
      running().progress->device, [&] { return is_satisfied(now(), value, flags); },
      [&] {
        char text[160];
        snprintf(text, sizeof text, "the word at %#llx: it is %llu, compared with %llu by flags %u", address,
                 static_cast<unsigned long long>(now()), static_cast<unsigned long long>(value), flags);
        return std::string(text);
      });
}

using Step = CUstreamBatchMemOpParams;

void run_step(const Step& step) {
  switch (step.operation) {
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      return write_word<uint32_t>(step.writeValue.address, step.writeValue.value, step.writeValue.flags);
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      return write_word<uint64_t>(step.writeValue.address, step.writeValue.value64, step.writeValue.flags);
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      return wait_for_word<uint32_t>(step.waitValue.address, step.waitValue.value, step.waitValue.flags);
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
      return wait_for_word<uint64_t>(step.waitValue.address, step.waitValue.value64, step.waitValue.flags);
    default:
      return running().progress->stores.publish();
  }
}

// What the documentation asks of an address: aligned, and of memory that the device can reach.
CUresult check_address(CUdeviceptr address, size_t bytes) {
  Lock lock(state());
  const bool known = is_device_address(address) ? allocation_at(address) != allocations().end()
                                                : host_behind(address) || is_pinned(address, bytes);
  if (address % bytes == 0 && known) return CUDA_SUCCESS;
  return breach(CUDA_ERROR_INVALID_VALUE, "%s: %#llx is not an aligned word of device or pinned memory", current_call(),
                address);
}

CUresult check(const Step& step) {
  switch (step.operation) {
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      return check_address(step.waitValue.address, sizeof(uint32_t));
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
      if (!attribute_of(current_device(), CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)) {
        return CUDA_ERROR_NOT_SUPPORTED;
      }
      return check_address(step.waitValue.address, sizeof(uint64_t));
    case CU_STREAM_MEM_OP_BARRIER:
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult submit_steps(CUstream stream, std::vector<Step> steps) {
  for (const Step& step : steps) {
    if (CUresult bad = check(step)) return bad;
  }
  amounts().words += steps.size();
  return submit(stream, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, [steps = std::move(steps)] {
    const Progress& progress = *running().progress;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (i) gap(progress.stream, progress.done + i);
      if (sticky_error(progress.device)) return;
      run_step(steps[i]);
    }
  });
}

Step step(CUstreamBatchMemOpType operation, CUdeviceptr address, uint64_t value, unsigned flags) {
  Step made{};
  // Waits and writes lie alike in the union.
  made.waitValue = {operation, address, {}, flags, 0};
  made.waitValue.value64 = value;
  return made;
}

}  // namespace
}  // namespace softcuda

using namespace softcuda;

API cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  ENTER(Plain);
  return submit_steps(stream, {step(CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value, flags)});
}

API cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
  ENTER(Plain);
  return submit_steps(stream, {step(CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value, flags)});
}

API cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  ENTER(Plain);
  return submit_steps(stream, {step(CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value, flags)});
}

API cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
  ENTER(Plain);
  return submit_steps(stream, {step(CU_STREAM_MEM_OP_WAIT_VALUE_64, address, value, flags)});
}

API cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams* steps, unsigned) {
  ENTER(Plain);
  constexpr unsigned LONGEST = 256;  // what the documentation allows
  if (!count || count > LONGEST) return CUDA_ERROR_INVALID_VALUE;
  return submit_steps(stream, {steps, steps + count});
}
