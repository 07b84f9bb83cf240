// What every call of the interface passes first: who may call, whether a fault was asked for, what went wrong before.
#pragma once

#include <cuda.h>
// Names without a version are defined beside those that the header gives them.
#undef cuGetProcAddress
#undef cuGraphInstantiate
#undef cuEventElapsedTime
#undef cuDeviceGetUuid

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#define SOFTCUDA_EXPORT extern "C" __attribute__((visibility("default")))
#define API SOFTCUDA_EXPORT CUresult CUDAAPI

namespace softcuda {

enum class Rule {
  Anywhere,      // needs no device: texts, versions; allowed in callbacks and before cuInit
  AnyDevice,     // about devices and contexts: works beside a broken one
  Plain,         // whatever a capture allows
  NotInCapture,  // may wait or act at once, so a capture that concerns the calling thread forbids it
};

// One call of the interface: its name and how often it came.
struct Site {
  explicit Site(const char* name);
  const char* const name;
  std::atomic<uint64_t> uses{0};
  Site* next;
};

// CUDA_SUCCESS, or why the call goes no further.
CUresult enter(Site& site, Rule rule);

// The call that this thread is in, or made last.
const char* current_call();

// How often a call came; 0 for one that never did.
uint64_t uses_of(const char* name);

// "call uses" in lines, of all calls that came.
std::string all_uses();

// What the calls on streams amounted to.
struct Amounts {
  std::atomic<uint64_t> copied_bytes{0};
  std::atomic<uint64_t> words{0};  // written, or waited for
};
Amounts& amounts();

// While it lives, this thread runs code of the caller that must not call CUDA.
class Callback {
 public:
  explicit Callback(const char* what);
  ~Callback();
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;

 private:
  const char* outer_;
};

// A breach of CUDA's rules that a real driver might let pass: says it, and counts it for tests.
CUresult breach(CUresult error, const char* format, ...) __attribute__((format(printf, 2, 3)));
uint64_t breaches();

// Guards all state but the queues' own; taken before a queue's lock, and never held while anything is waited for.
using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex& state();

// Whether this process called cuInit itself; a child of one that did has no CUDA.
bool initialised();
CUresult initialise();

}  // namespace softcuda

#define ENTER(rule)                                                               \
  static softcuda::Site site(__func__);                                           \
  if (CUresult refused = softcuda::enter(site, softcuda::Rule::rule)) return refused
