// Converts the engine's status to C++ exceptions, which pybind11 converts to Python's.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

#include "ncclx_abi.h"

namespace ncclx {

[[noreturn]] inline void raise(int32_t status, const std::string& text) {
  const std::string message = "ncclx_rs: " + text;
  switch (status) {
    case NCCLX_USAGE:
      C10_THROW_ERROR(ValueError, message);
    case NCCLX_NETWORK:
      C10_THROW_ERROR(DistNetworkError, message);
    default:
      C10_THROW_ERROR(DistBackendError, message);
  }
}

inline std::exception_ptr exception(int32_t status, const std::string& text) {
  try {
    raise(status, text);
  } catch (...) {
    return std::current_exception();
  }
}

// The text of an exception, without the C++ frames that PyTorch adds: naming them takes seconds.
inline const char* text_of(const std::exception& exception) {
  const auto* error = dynamic_cast<const c10::Error*>(&exception);
  return error != nullptr ? error->what_without_backtrace() : exception.what();
}

// A caller's mistake that only the shim can see.
[[noreturn]] inline void refuse(const char* operation, const char* argument, const std::string& expected,
                                const std::string& got) {
  raise(NCCLX_USAGE, std::string(operation) + ": argument `" + argument + "`: expected " + expected + ", got " + got);
}

}  // namespace ncclx
