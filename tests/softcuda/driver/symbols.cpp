// Names: of errors, and of the interface's functions.
#include <dlfcn.h>

#include <string>
#include <unordered_map>

#include "call.h"
#include "log.h"
#include "settings.h"

using namespace softcuda;

namespace {

const char* error_name(CUresult error) {
  static const auto* const names = new std::unordered_map<int, const char*>{
#include "driver_errors.inc"
  };
  const auto found = names->find(error);
  return found == names->end() ? nullptr : found->second;
}

// Where the newest version of a function is not what a caller means who was built for an older CUDA.
struct Since {
  const char* name;
  int version;
};
constexpr Since NEWEST_SINCE[] = {{"cuStreamGetCaptureInfo_v3", 12030}};

bool is_too_new(const std::string& name, int version) {
  for (const Since& since : NEWEST_SINCE) {
    if (name == since.name) return version < since.version;
  }
  return false;
}

void* find(const std::string& name, int version) {
  // This library, also where another of its name is loaded.
  static void* const self = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&error_name), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  for (const char* suffix : {"_v4", "_v3", "_v2", ""}) {
    const std::string full = name + suffix;
    void* found = is_too_new(full, version) ? nullptr : dlsym(self, full.c_str());
    if (found) return found;
  }
  return nullptr;
}

}  // namespace

API cuGetErrorName(CUresult error, const char** name) {
  ENTER(Anywhere);
  *name = error_name(error);
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuGetErrorString(CUresult error, const char** text) {
  ENTER(Anywhere);
  *text = error_name(error);
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t,
                        CUdriverProcAddressQueryResult* result) {
  ENTER(Anywhere);
  *function = find(name, version);
  if (!*function && settings().log) say("there is no %s here", name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

// A table of private functions, which some libraries of the vendor ask for: they fail, rather than crash.
API cuGetExportTable(const void** table, const CUuuid*) {
  ENTER(Anywhere);
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}
