// What was made and is not gone yet, with the call and the thread that made it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace softcuda {

enum class Kind { DeviceMemory, HostMemory, Registration, Stream, Event, Graph, GraphExec, Handle, Addresses, Module };

void note_made(Kind kind, uint64_t key, size_t bytes = 0);
void note_gone(Kind kind, uint64_t key);

bool is_living(Kind kind, uint64_t key);

template <class T>
uint64_t key_of(const T* object) {
  return reinterpret_cast<uint64_t>(object);
}

// Whether a handle is one; else says so, with the kind's name.
bool check_handle(Kind kind, const void* handle);

}  // namespace softcuda
