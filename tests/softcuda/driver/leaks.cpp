#include "leaks.h"

#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "call.h"
#include "log.h"
#include "memory.h"
#include "settings.h"

namespace softcuda {

namespace {

constexpr const char* NAMES[] = {"device memory", "host memory", "registration", "stream", "event",
                                 "graph",         "graph exec",  "handle",       "addresses", "module"};

struct Made {
  size_t bytes;
  std::string maker;
};

std::map<std::pair<Kind, uint64_t>, Made>& living() {
  static auto* const living = new std::map<std::pair<Kind, uint64_t>, Made>;
  return *living;
}

struct Report {
  ~Report() {
    if (!initialised() || !settings().leaks) return;
    Lock lock(state());
    for (const auto& [key, made] : living()) {
      const char* name = NAMES[static_cast<int>(key.first)];
      say("leak: %s %#lx, %zu bytes, made in %s", name, key.second, made.bytes, made.maker.c_str());
    }
    say("leaks: %zu", living().size());
  }
};
const Report report_at_exit;

}  // namespace

void note_made(Kind kind, uint64_t key, size_t bytes) {
  Lock lock(state());
  living()[{kind, key}] = {bytes, maker_of_this()};
}

void note_gone(Kind kind, uint64_t key) {
  Lock lock(state());
  living().erase({kind, key});
}

bool is_living(Kind kind, uint64_t key) {
  Lock lock(state());
  return living().count({kind, key});
}

bool check_handle(Kind kind, const void* handle) {
  if (is_living(kind, key_of(handle))) return true;
  breach(CUDA_ERROR_INVALID_HANDLE, "%s: %p is no %s, or one destroyed", current_call(), handle,
         NAMES[static_cast<int>(kind)]);
  return false;
}

}  // namespace softcuda

using namespace softcuda;

// How many there are of a kind ("stream", "device memory"), or of all (""); -1: there is no such kind.
SOFTCUDA_EXPORT long softcuda_living(const char* kind) {
  Lock lock(state());
  if (!*kind) return static_cast<long>(living().size());
  for (int i = 0; i < static_cast<int>(sizeof NAMES / sizeof *NAMES); ++i) {
    if (strcmp(kind, NAMES[i])) continue;
    long count = 0;
    for (const auto& [key, made] : living()) count += key.first == static_cast<Kind>(i);
    return count;
  }
  return -1;
}
