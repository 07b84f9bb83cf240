// What the environment says of this library.
#pragma once
#include <string>

namespace fakenccl {

// What goes wrong on one rank: "rank:when:what". `when` is the number of a launch, from 1 on, "init", "split" or
// "register"; `what` is "hang", "error", or "later": a while after the launch has ended well.
struct Fault {
  enum class When { Init, Split, Register, Launch };
  int rank = -1;
  When when = When::Init;
  unsigned long launch = 0;
  bool is_error = false;
  bool is_later = false;
};

struct Settings {
  // As NCCL_VERSION_CODE.
  int version;
  Fault fault;
  // How long a communicator that does not block takes to put its calls on a stream.
  unsigned long launch_us;
  // Whether ncclCommDestroy waits until all ranks leave.
  bool leaves_together;
};

const Settings& settings();

// The text that the last failure of this thread has left.
std::string& last_error();

// Counts something, for who asks `fakenccl_count` how often it was.
void count(const std::string& what);

}  // namespace fakenccl
