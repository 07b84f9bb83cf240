// In-order queues with a thread each, and the count of what has run of each stream.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "delay.h"
#include "stores.h"

namespace softcuda {

// How far a stream has come. Outlives the stream while operations are under way.
struct Progress {
  Progress(uint64_t stream, int device) : stream(stream), device(device), stores(device) {}
  const uint64_t stream;
  const int device;
  std::atomic<uint64_t> done{0};
  Stores stores;
};

struct Operation {
  CUgraphNodeType type;
  const char* call;  // that asked for it
  std::function<void()> run;
  // A node of a graph for which each launch decides what it does: gives what to run in place of `run`.
  std::function<std::function<void()>()> at_launch = nullptr;
};

// What the thread of a queue runs right now.
struct Running {
  const Operation* operation;
  Progress* progress;
  const Delay* delay;
};
const Running& running();

// Device and stream of the thread's operation, for messages.
const char* describe_running();

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  static std::shared_ptr<Queue> create();
  void push(Operation operation, std::shared_ptr<Progress> progress);
  // Its thread ends after what is in it.
  void close();

 private:
  struct Entry {
    Operation operation;
    std::shared_ptr<Progress> progress;
  };
  static void serve(std::shared_ptr<Queue> queue);
  static void execute(Entry& entry);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  bool started_ = false;
  bool closed_ = false;
};

// The queue of a new stream: its own, or one of those that SOFTCUDA_QUEUES allows.
std::shared_ptr<Queue> queue_for(uint64_t stream);

// Tells waiters that something may have become true.
void notify_waiters();

// Blocks until `ready`, or until the device is broken: then false. What other processes write is looked at in naps. A wait
// that takes long says what for: `what` follows "has waited for".
bool wait_until(int device, const std::function<bool()>& ready, const std::function<std::string()>& what);

// How many waits have said so.
uint64_t long_waits();

}  // namespace softcuda
