#include "settings.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "abi.h"

namespace fakenccl {

namespace {

int version() {
  const char* text = getenv("FAKENCCL_VERSION");
  return text && *text ? atoi(text) : FAKENCCL_DEFAULT_VERSION;
}

Fault fault() {
  const char* text = getenv("FAKENCCL_FAULT");
  Fault fault;
  if (!text || !*text) return fault;
  char when[32], what[32];
  if (sscanf(text, "%d:%31[^:]:%31s", &fault.rank, when, what) != 3) {
    fprintf(stderr, "fakenccl: FAKENCCL_FAULT=%s is not rank:when:what\n", text);
    abort();
  }
  fault.launch = strtoul(when, nullptr, 10);
  fault.when = !strcmp(when, "init")       ? Fault::When::Init
               : !strcmp(when, "split")    ? Fault::When::Split
               : !strcmp(when, "register") ? Fault::When::Register
                                           : Fault::When::Launch;
  fault.is_error = !strcmp(what, "error");
  fault.is_later = !strcmp(what, "later");
  return fault;
}

struct Counts {
  std::mutex mutex;
  std::map<std::string, unsigned long> all;
};

Counts& counts() {
  static auto* const counts = new Counts;
  return *counts;
}

unsigned long launch_us() {
  const char* text = getenv("FAKENCCL_LAUNCH_US");
  return text ? strtoul(text, nullptr, 10) : 0;
}

bool leaves_together() {
  const char* text = getenv("FAKENCCL_TOGETHER");
  return text && !strcmp(text, "1");
}

}  // namespace

const Settings& settings() {
  static const Settings settings{version(), fault(), launch_us(), leaves_together()};
  return settings;
}

std::string& last_error() {
  static thread_local std::string text;
  return text;
}

void count(const std::string& what) {
  std::lock_guard<std::mutex> lock(counts().mutex);
  counts().all[what]++;
}

}  // namespace fakenccl

API unsigned long fakenccl_count(const char* what) {
  using namespace fakenccl;
  std::lock_guard<std::mutex> lock(counts().mutex);
  return counts().all[what];
}
