// What the ranks of a communicator share: a mapped file with a channel for each ordered pair of them.
#pragma once
#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "abi.h"

namespace fakenccl {

// Bytes on their way from one rank to another. Both counts only grow.
struct Channel {
  static constexpr size_t ROOM = 1 << 16;
  // By whether it is the sender's: that an end has called a message for the first time.
  std::atomic<uint32_t> is_connected[2];
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> read;
  // The sender was aborted, or its process has ended, before all was read.
  std::atomic<uint32_t> is_cut;
  char bytes[ROOM];
};

// What a rank says of itself when it joins, and of its place when the communicator is split.
struct Card {
  std::atomic<uint32_t> is_there;
  std::atomic<uint32_t> is_leaving;
  int version;
  CUuuid device;
  // How many splits it has called, and of how many it has read what all ranks say.
  std::atomic<uint32_t> told, read;
  int color, key;
  // Of a communicator that has this rank first.
  UniqueId id;
  // What it has passed to its latest launches: four times the number of one, and of which kind the memory was.
  std::atomic<uint64_t> passed[64];
};

class Shared {
 public:
  // The file that ranks with this id have. Null if the system has none.
  static Shared* open(const UniqueId& id, int ranks);
  ~Shared();

  Card& card(int rank) const { return cards_[rank]; }
  Channel& channel(int from, int to) const { return channels_[from * ranks_ + to]; }
  // No other rank finds it any more.
  void hide() const;

 private:
  Shared() = default;
  std::string name_;
  void* base_ = nullptr;
  size_t bytes_ = 0;
  int ranks_ = 0;
  Card* cards_ = nullptr;
  Channel* channels_ = nullptr;
};

}  // namespace fakenccl
