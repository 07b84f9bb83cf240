// One rank's end of a communicator.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
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
  // Of a message: its length goes before it, so that the other end finds when it has called another one.
  std::shared_ptr<uint64_t> head = nullptr;
  size_t done = 0;

  // How many bytes go or come in all, and where the next ones are, so many of them in one piece.
  size_t total() const { return length + (head ? sizeof *head : 0); }
  std::pair<char*, size_t> next() const;
  // Whether the length that has come is another one.
  bool differs() const { return head && !is_send && done >= sizeof *head && *head != length; }
};

class Communicator {
 public:
  Communicator(int rank, int size, CUdevice device, bool is_blocking, std::unique_ptr<Shared> shared);

  const int rank;
  const int size;
  const bool is_blocking;

  // Waits for the other ranks, and refuses what they cannot do together.
  Result join();

  // Says that this end of a message's channel is there, and whether the other one is, too, or nobody waits for it any more.
  void connect(int peer, bool is_send);
  bool is_connected(int peer, bool is_send) const;

  // Moves all of these at once, those of a peer and direction one after the other. False: it was aborted meanwhile.
  bool exchange(std::vector<Transfer>& transfers);

  // How far it is with what it was last told to do, or how that failed.
  std::atomic<int> state{Success};
  std::string failure;

  // What an operation is that was launched before it: the operations of a communicator come one after the other, whatever
  // their streams.
  Result follow(CUstream stream);
  Result followed_by_next(CUstream stream);

  // Between these a thread puts calls on streams, for which an abort waits.
  void begin_putting() { running_++; }
  void end_putting() { running_--; }
  bool is_aborted() const { return is_aborted_; }

  // Runs on a stream; counts launches, and has those that are to go wrong do so. False: nothing is to be done.
  bool begin_launch();
  void end_launch();

  // Fails for a reason, and waits until it is aborted.
  void fail(const std::string& why);

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
