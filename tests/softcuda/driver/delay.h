// Pauses around operations, so that a missing ordering shows as a wrong number. They follow from the seed, the rank, the
// stream and the operation's number, so that a seed repeats them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace softcuda {

class Delay {
 public:
  Delay(CUgraphNodeType type, uint64_t stream, uint64_t number);
  void before() const;
  // Between the halves of a copy: others see the first without the second.
  void between() const;
  // The operation has read and written, but does not count as done yet.
  void after() const;

 private:
  uint64_t before_ = 0;
  uint64_t between_ = 0;
  uint64_t after_ = 0;
};

// A pause between the operations of a batch.
void gap(uint64_t stream, uint64_t number);

// Changes the longest delay, for tests that want one only now and then.
void set_delay(unsigned microseconds);
bool delays();

}  // namespace softcuda
