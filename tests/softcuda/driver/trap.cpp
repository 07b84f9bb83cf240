#include "trap.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>

#include "call.h"
#include "memory.h"
#include "queue.h"

namespace softcuda {

namespace {

struct sigaction before;

void write_line(const char* text, int length) {
  // Nothing is left to do if that fails.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, static_cast<size_t>(length));
}

void explain(const siginfo_t* info) {
  const auto address = reinterpret_cast<uint64_t>(info->si_addr);
  const Suspect found = suspect(address);
  if (!found.is_device && !found.is_alias) return;
  char owner[160] = "";
  // Where the lock is taken, perhaps by this thread, the message does without.
  if (state().try_lock()) {
    const auto inside = allocation_at(found.address);
    if (inside != allocations().end()) {
      snprintf(owner, sizeof owner, ", offset %llu in %zu bytes of %s", found.address - inside->first,
               inside->second.bytes, inside->second.maker.c_str());
    }
    state().unlock();
  }
  char thread[16] = "";
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  char line[512];
  const int length =
      snprintf(line, sizeof line, "softcuda[%d]: %s device memory at %#llx%s, by thread %s in %s\n", getpid(),
               found.is_alias ? "access outside of" : "the host touched", found.address, owner, thread,
               describe_running());
  write_line(line, length);
}

void handle(int signal, siginfo_t* info, void* context) {
  explain(info);
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  } else {
    // The instruction faults again, and then ends the process.
    sigaction(SIGSEGV, &before, nullptr);
  }
}

}  // namespace

void install_trap() {
  // The handler must not be the first to reserve addresses.
  suspect(0);
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &before);
}

}  // namespace softcuda
