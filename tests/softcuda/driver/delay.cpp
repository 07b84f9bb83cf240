#include "delay.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "call.h"
#include "settings.h"

namespace softcuda {

namespace {

std::atomic<unsigned>& longest() {
  static std::atomic<unsigned> microseconds{settings().delay_us};
  return microseconds;
}

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): neighbours give unrelated numbers.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

uint64_t rank() {
  static const uint64_t rank = [] {
    const char* text = getenv("RANK");
    return text ? strtoull(text, nullptr, 10) : 0;
  }();
  return rank;
}

uint64_t drawn(uint64_t stream, uint64_t number) {
  return mix(mix(mix(settings().seed ^ mix(rank())) ^ stream) ^ number);
}

void pause(uint64_t microseconds) {
  if (microseconds) usleep(static_cast<useconds_t>(microseconds));
}

}  // namespace

Delay::Delay(CUgraphNodeType type, uint64_t stream, uint64_t number) {
  const unsigned limit = longest();
  const bool moves = type == CU_GRAPH_NODE_TYPE_MEMCPY || type == CU_GRAPH_NODE_TYPE_MEMSET ||
                     type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
  if (!limit || !moves) return;
  const uint64_t random = drawn(stream, number);
  const uint64_t microseconds = (random >> 8) % (limit + 1);
  // One place at a time: a pause everywhere would keep the old order more often than not.
  switch (random % 4) {
    case 0:
      after_ = microseconds;
      break;
    case 1:
      between_ = microseconds;
      break;
    default:
      before_ = microseconds;
  }
}

void Delay::before() const { pause(before_); }
void Delay::between() const { pause(between_); }
void Delay::after() const { pause(after_); }

void gap(uint64_t stream, uint64_t number) {
  const unsigned limit = settings().gap_us;
  if (limit) pause(drawn(stream, ~number) % (limit + 1));
}

void set_delay(unsigned microseconds) { longest() = microseconds; }
bool delays() { return longest() != 0; }

}  // namespace softcuda

SOFTCUDA_EXPORT void softcuda_set_delay(unsigned microseconds) { softcuda::set_delay(microseconds); }
