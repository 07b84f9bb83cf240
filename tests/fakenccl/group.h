// Calls, which a group has go on together.
#pragma once
#include <functional>
#include <memory>

#include "communicator.h"

namespace fakenccl {

// A call on a communicator: what it moves, and what it computes then. Both run when its turn on the stream has come.
struct Call {
  std::shared_ptr<Communicator> comm;
  CUstream stream;
  std::function<void(std::vector<Transfer>&)> moves;
  std::function<void()> computes;
  // What of a program's memory it reads and writes.
  std::vector<std::pair<uintptr_t, size_t>> memory;
  // Of a message: the rank at the other end, and which end this one is.
  int peer = -1;
  bool is_send = false;
};

// Puts a call on its stream, or keeps it for the end of the thread's group.
int add(Call call);

}  // namespace fakenccl
