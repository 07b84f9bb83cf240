// One rank's end of a communicator.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "settings.h"
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

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Communicators that share resources are of one family: all end with the first one that is aborted.
  using Family = std::shared_ptr<std::atomic<bool>>;

  Communicator(int rank, int size, CUdevice device, bool is_blocking, std::unique_ptr<Shared> shared, Family family);

  const int rank;
  const int size;
  const bool is_blocking;

  // Waits for the other ranks, and refuses what they cannot do together.
  Result join();

  // The fault that is set for this rank and moment: it fails for this reason, or hangs until it is aborted. Success if none is.
  Result fault(Fault::When when, const char* why);

  // Whether nothing of it is on a stream.
  bool is_idle();

  // Finds with all other ranks which of them have the same color. None of a rank that has none: `made` stays null.
  struct Place {
    int color, key;
  };
  Result split(Place place, bool is_blocking, std::shared_ptr<Communicator>& made);

  // Registers memory, which is known by the number that is returned.
  void* enroll(uintptr_t begin, size_t bytes);
  // Whether there was such a registration, which ends.
  bool dismiss(void* handle);
  // Whether all these bytes are registered, or some byte is.
  bool is_enrolled(uintptr_t begin, size_t bytes);
  bool touches(uintptr_t begin, size_t bytes);
  // Ends what a program has left, and says how much that was.
  size_t dismiss_all();

  // What this rank passes to its launch of this number, and whether a peer that has passed something there goes with it.
  enum class Passed : uint64_t { Nothing, Plain, Registered };
  void tell(uint64_t launch, Passed passed);
  bool mixes(uint64_t launch, Passed passed, int peer) const;
  uint64_t launches() const { return launches_; }

  // Says that this end of a message's channel is there, and returns whether it is new; whether the other end is there, too, or
  // nobody waits for it any more.
  bool connect(int peer, bool is_send);
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

  // In graphs, too: a launch of a graph comes after what was launched before it, and what is launched next after the graph.
  Result follow_in(cuuint64_t capture, CUstream stream);
  Result followed_in(CUstream stream);

  // Between these a graph has calls of it, for which its end waits.
  void hold() { graphs_++; }
  void let_go() { graphs_--; }

  // Between these a thread puts calls on streams, for which an abort waits.
  void begin_putting() { running_++; }
  void end_putting() { running_--; }
  bool is_aborted() const { return is_aborted_ || (family_ && *family_); }

  // Runs on a stream; counts launches, and has those that are to go wrong do so. False: nothing is to be done.
  bool begin_launch();
  void end_launch();

  // Fails for a reason, and waits until it is aborted.
  void fail(const std::string& why);

  // Has everything end that is on streams, and waits for it. What others have not received is lost.
  void abort();
  // As the others' end, who go on: after they have received what they were sent.
  void destroy();
  // What others have not received is lost.
  void cut();

  // The operations that a program has made: their factors, or where those lie. None if it is gone.
  struct Factor {
    Type type;
    char value[8];
    const char* on_device;
  };
  std::vector<std::unique_ptr<Factor>> factors;

 private:
  bool is_received() const;
  bool all_leave() const;
  void end();

  const CUdevice device_;
  const std::unique_ptr<Shared> shared_;
  // None where it shares nothing.
  const Family family_;
  std::atomic<bool> is_aborted_{false};
  uint32_t splits_ = 0;
  // What a split is about to make, which ends with this one until then.
  std::mutex making_mutex_;
  std::shared_ptr<Communicator> making_;
  std::atomic<int> running_{0};
  std::atomic<int> graphs_{0};
  // Whose launch runs.
  std::mutex turn_;
  std::mutex enrolled_mutex_;
  // By handle: where they begin, and their bytes.
  std::map<uintptr_t, std::pair<uintptr_t, size_t>> enrolled_;
  std::atomic<unsigned long> launches_{0};
  std::mutex order_;
  // Of the last operation or graph.
  CUevent end_ = nullptr;
  CUstream last_ = nullptr;
  bool has_last_ = false;
  // Of the last operation of the last capture; 0 is none.
  CUevent captured_end_ = nullptr;
  cuuint64_t capture_ = 0;
};

// Has programs find one by its address, which is returned.
void* publish(std::shared_ptr<Communicator> made);

// What a version refuses in a configuration; null if nothing.
Result check(const Config& config);

// Bytes that no other id has.
Result draw(UniqueId& id);

// Whether a communicator has registered some of this memory.
bool is_enrolled_somewhere(uintptr_t begin, size_t bytes);

// Counts what NCCL leaves undefined, and refuses it.
Result breach(const std::string& why);

// Those that programs have, which know them by their addresses.
std::shared_ptr<Communicator> find(void* handle);

}  // namespace fakenccl
