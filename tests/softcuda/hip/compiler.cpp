// hipRTC for the software HIP: `libhiprtc.so`, which has NVRTC compile what it is given. So HIP's branches of the source are
// compiled, and the module's image has the kernels' names; no code for AMD's devices is made.
#include <nvrtc.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#define HIP extern "C" __attribute__((visibility("default")))

HIP const char* hiprtcGetErrorString(nvrtcResult result) { return nvrtcGetErrorString(result); }
HIP nvrtcResult hiprtcVersion(int* major, int* minor) {
  *major = 7;
  *minor = 1;
  return NVRTC_SUCCESS;
}
HIP nvrtcResult hiprtcCreateProgram(nvrtcProgram* program, const char* source, const char* name, int count,
                                    const char** headers, const char** names) {
  return nvrtcCreateProgram(program, source, name, count, headers, names);
}
HIP nvrtcResult hiprtcCompileProgram(nvrtcProgram program, int count, const char** options) {
  std::vector<std::string> taken = {"--gpu-architecture=sm_90", "--device-int128", "-D__HIPCC_RTC__"};
  for (int at = 0; at < count; ++at) {
    const std::string option = options[at];
    if (option == "-ffp-contract=off") {
      taken.push_back("--fmad=false");
    } else if (option == "--offload-arch=gfx942:sramecc+:xnack-") {
      continue;
    } else if (option.rfind("-std=", 0) == 0 || option.rfind("-D", 0) == 0) {
      taken.push_back(option);
    } else {
      fprintf(stderr, "softcuda: hipRTC has no option %s\n", option.c_str());
      return NVRTC_ERROR_INVALID_OPTION;
    }
  }
  std::vector<const char*> texts;
  for (const std::string& option : taken) texts.push_back(option.c_str());
  return nvrtcCompileProgram(program, int(texts.size()), texts.data());
}
HIP nvrtcResult hiprtcGetProgramLogSize(nvrtcProgram program, size_t* bytes) {
  return nvrtcGetProgramLogSize(program, bytes);
}
HIP nvrtcResult hiprtcGetProgramLog(nvrtcProgram program, char* log) { return nvrtcGetProgramLog(program, log); }
HIP nvrtcResult hiprtcGetCodeSize(nvrtcProgram program, size_t* bytes) { return nvrtcGetCUBINSize(program, bytes); }
HIP nvrtcResult hiprtcGetCode(nvrtcProgram program, char* code) { return nvrtcGetCUBIN(program, code); }
HIP nvrtcResult hiprtcDestroyProgram(nvrtcProgram* program) { return nvrtcDestroyProgram(program); }
