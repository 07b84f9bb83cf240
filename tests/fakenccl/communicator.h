// One rank's end of a communicator.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "shared.h"

namespace fakenccl {

// Bytes that go to a rank or come from one.
struct Transfer {
  bool is_send;
  int peer;
  char* bytes;
  size_t length;
  size_t done = 0;
};

class Communicator {
 public:
  Communicator(int rank, int size, CUdevice device, bool is_blocking, std::unique_ptr<Shared> shared);

  const int rank;
  const int size;
  const bool is_blocking;

  // Waits for the other ranks, and refuses what they cannot do together.
  Result join();

  // Moves all of these at once, those of a peer and direction one after the other. False: it was aborted meanwhile.
  bool exchange(std::vector<Transfer>& transfers) const;

  // How far it is with what it was last told to do, or how that failed.
  std::atomic<int> state{Success};
  std::string failure;

  // What an operation is that was launched before it: the operations of a communicator come one after the other, whatever
  // their streams.
  Result follow(CUstream stream);
  Result followed_by_next(CUstream stream);

  // Runs on a stream; counts launches, and has those that are to go wrong do so. False: nothing is to be done.
  bool begin_launch();
  void end_launch();

  // Has everything end that is on streams, and waits for it.
  void abort();

  // The operations that a program has made: their factors, or where those lie. None if it is gone.
  struct Factor {
    Type type;
    char value[8];
    const char* on_device;
  };
  std::vector<std::unique_ptr<Factor>> factors;

 private:
  const CUdevice device_;
  const std::unique_ptr<Shared> shared_;
  std::atomic<bool> is_aborted_{false};
  std::atomic<int> running_{0};
  std::atomic<unsigned long> launches_{0};
  std::mutex order_;
  CUevent end_ = nullptr;
  CUstream last_ = nullptr;
  bool has_last_ = false;
};

// Those that programs have, which know them by their addresses.
std::shared_ptr<Communicator> find(void* handle);

}  // namespace fakenccl
