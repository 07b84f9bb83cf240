// Waits that a signal's handler in Python can end, as that of Ctrl-C does.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "ncclx_abi.h"

namespace ncclx {

// How long handlers wait at most for a thread that is blocked.
constexpr std::chrono::milliseconds kSignalInterval{200};

// Whether Python runs the handlers of signals on this thread. It does so on the main thread alone.
inline bool runs_signal_handlers() {
  static thread_local const bool is_main = syscall(SYS_gettid) == getpid();
  return is_main;
}

// Runs the handlers of signals that have come, and throws what they raise.
inline void run_signal_handlers() {
  if (!Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// The engine's `wait`, during which handlers of signals run. If one raises, that is thrown, and the operation is in flight
// as before.
inline int32_t wait_for(const NcclxEngine* engine, NcclxHandle* handle, int64_t timeout_ms, NcclxError* error) {
  if (!runs_signal_handlers()) return engine->wait(handle, timeout_ms, error);
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    const auto passed = std::chrono::steady_clock::now() - start;
    const int64_t left = timeout_ms - std::chrono::duration_cast<std::chrono::milliseconds>(passed).count();
    const bool is_last = timeout_ms >= 0 && left <= kSignalInterval.count();
    const int64_t turn = is_last ? std::max<int64_t>(left, 0) : kSignalInterval.count();
    const int32_t status = engine->wait(handle, turn, error);
    if (status != NCCLX_PENDING || is_last) return status;
    run_signal_handlers();
  }
}

}  // namespace ncclx
