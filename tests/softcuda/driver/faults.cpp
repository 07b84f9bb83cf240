#include "faults.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"
#include "context.h"
#include "log.h"
#include "queue.h"
#include "settings.h"

namespace softcuda {

namespace {

// "call:use:error": the error may be left out.
struct Fault {
  std::string call;
  uint64_t use;
  CUresult error;
};

struct Faults {
  std::mutex mutex;
  std::vector<Fault> planted;
  // Spares calls the lock while there is nothing to look for.
  std::atomic<bool> any{false};
};

CUresult usual_error(const std::string& call) {
  const bool allocates = call.find("Alloc") != std::string::npos || call.find("Create") != std::string::npos;
  return allocates ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
}

std::vector<Fault> parse(const std::string& text) {
  std::vector<Fault> faults;
  for (const std::string& item : split(text, ',')) {
    const auto parts = split(item, ':');
    if (parts.size() < 2) {
      say("SOFTCUDA_FAULT: %s is not call:use", item.c_str());
      abort();
    }
    const auto error = parts.size() > 2 ? static_cast<CUresult>(atoi(parts[2].c_str())) : usual_error(parts[0]);
    faults.push_back({parts[0], strtoull(parts[1].c_str(), nullptr, 10), error});
  }
  return faults;
}

void plant(Faults& faults, const std::string& text) {
  std::lock_guard<std::mutex> lock(faults.mutex);
  faults.planted = parse(text);
  faults.any = !faults.planted.empty();
}

Faults& faults() {
  static Faults* const faults = [] {
    auto* made = new Faults;
    plant(*made, settings().fault);
    return made;
  }();
  return *faults;
}

// "device:operations:error": the device breaks when it has run so many.
struct FallOff {
  int device = -1;
  uint64_t operations = 0;
  CUresult error = CUDA_ERROR_UNKNOWN;
};

const FallOff& fall_off() {
  static const FallOff* const fall = [] {
    auto* made = new FallOff;
    const auto parts = split(settings().fall_off, ':');
    if (parts.size() > 1) {
      made->device = atoi(parts[0].c_str());
      made->operations = strtoull(parts[1].c_str(), nullptr, 10);
    }
    if (parts.size() > 2) made->error = static_cast<CUresult>(atoi(parts[2].c_str()));
    return made;
  }();
  return *fall;
}

}  // namespace

CUresult fault_of(const char* call, uint64_t use) {
  Faults& all = faults();
  if (!all.any) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> lock(all.mutex);
  for (const Fault& fault : all.planted) {
    if (fault.use == use && fault.call == call) {
      say("planted fault: use %lu of %s returns %d", use, call, fault.error);
      return fault.error;
    }
  }
  return CUDA_SUCCESS;
}

void count_operation(int device) {
  const FallOff& fall = fall_off();
  if (fall.device != device) return;
  static std::atomic<uint64_t> operations{0};
  if (++operations != fall.operations) return;
  say("device %d falls off after %lu operations", device, fall.operations);
  break_device(device, fall.error);
}

}  // namespace softcuda

SOFTCUDA_EXPORT uint64_t softcuda_uses(const char* call) { return softcuda::uses_of(call); }

// The calls that came, each with its uses, a line each; how long that is, of which `room` fits.
SOFTCUDA_EXPORT size_t softcuda_calls(char* text, size_t room) {
  const std::string lines = softcuda::all_uses();
  if (room) snprintf(text, room, "%s", lines.c_str());
  return lines.size();
}

SOFTCUDA_EXPORT uint64_t softcuda_copied_bytes() { return softcuda::amounts().copied_bytes; }

SOFTCUDA_EXPORT uint64_t softcuda_words() { return softcuda::amounts().words; }

// Uses count from the start of the process: a test adds what `softcuda_uses` says.
SOFTCUDA_EXPORT void softcuda_plant(const char* faults) { softcuda::plant(softcuda::faults(), faults); }

SOFTCUDA_EXPORT void softcuda_break_device(int device, int error) {
  softcuda::break_device(device, static_cast<CUresult>(error));
}

SOFTCUDA_EXPORT uint64_t softcuda_long_waits() { return softcuda::long_waits(); }

SOFTCUDA_EXPORT uint64_t softcuda_breaches() { return softcuda::breaches(); }
