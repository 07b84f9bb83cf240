#include "call.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "capture.h"
#include "context.h"
#include "faults.h"
#include "log.h"
#include "settings.h"
#include "trap.h"

namespace softcuda {

namespace {

std::atomic<Site*> sites{nullptr};
std::atomic<pid_t> owner{0};
std::atomic<uint64_t> breach_count{0};
thread_local const char* call = "no call";
thread_local const char* callback = nullptr;

bool is_forbidden(const std::string& thread) {
  for (const std::string& prefix : settings().forbidden_threads) {
    if (thread.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

}  // namespace

Site::Site(const char* name) : name(name), next(sites) {
  // Sites are static, so the list only grows.
  while (!sites.compare_exchange_weak(next, this)) {
  }
}

CUresult enter(Site& site, Rule rule) {
  const uint64_t use = ++site.uses;
  call = site.name;
  if (settings().log) say("%s by %s", site.name, thread_name().c_str());
  if (rule == Rule::Anywhere) return CUDA_SUCCESS;
  if (callback) return breach(CUDA_ERROR_NOT_PERMITTED, "%s called in %s", site.name, callback);
  if (!settings().forbidden_threads.empty() && is_forbidden(thread_name())) {
    return breach(CUDA_ERROR_NOT_PERMITTED, "%s called on thread %s", site.name, thread_name().c_str());
  }
  if (!initialised()) {
    if (owner) say("%s called in a child of the process that called cuInit: forked children have no CUDA", site.name);
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  if (CUresult planted = fault_of(site.name, use)) return planted;
  if (rule == Rule::AnyDevice) return CUDA_SUCCESS;
  if (CUresult sticky = sticky_error(current_device())) return sticky;
  return rule == Rule::NotInCapture ? refuse_in_capture(site.name) : CUDA_SUCCESS;
}

const char* current_call() { return call; }

uint64_t uses_of(const char* name) {
  for (const Site* site = sites; site; site = site->next) {
    if (!strcmp(site->name, name)) return site->uses;
  }
  return 0;
}

std::string all_uses() {
  std::string lines;
  for (const Site* site = sites; site; site = site->next) {
    lines += std::string(site->name) + " " + std::to_string(site->uses) + "\n";
  }
  return lines;
}

Amounts& amounts() {
  static Amounts amounts;
  return amounts;
}

Callback::Callback(const char* what) : outer_(callback) { callback = what; }
Callback::~Callback() { callback = outer_; }

CUresult breach(CUresult error, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  ++breach_count;
  say("against the rules: %s", text);
  return error;
}

uint64_t breaches() { return breach_count; }

std::recursive_mutex& state() {
  static std::recursive_mutex* const mutex = new std::recursive_mutex;
  return *mutex;
}

bool initialised() { return owner == getpid(); }

CUresult initialise() {
  pid_t nobody = 0;
  if (owner.compare_exchange_strong(nobody, getpid())) install_trap();
  if (!initialised()) {
    say("cuInit in a child of the process that called it: forked children have no CUDA");
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

}  // namespace softcuda
