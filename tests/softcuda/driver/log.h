// What the software CUDA says on standard error, and the names of threads in it.
#pragma once

#include <string>

namespace softcuda {

// One line, with a prefix.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The calling thread, as the kernel knows it: what `pthread_setname_np` and Rust's thread builder set.
std::string thread_name();

}  // namespace softcuda
