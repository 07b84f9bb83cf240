// Modules, libraries and kernels of them. An image is only looked through for names: what runs is the kernel's twin.
#include <elf.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "call.h"
#include "context.h"
#include "leaks.h"
#include "stream.h"
#include "twins.h"

// A function of a module; kernels of libraries are the same thing under another name.
struct CUfunc_st {
  std::string name;
  const softcuda::Twin* twin;
  std::weak_ptr<const void> code;
};

struct CUmod_st {
  std::string image;
  std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
  std::shared_ptr<const void> code = std::make_shared<const char>();
};

using namespace softcuda;

namespace {

// The bytes of a cubin or of PTX; none of an image whose length is not known here.
std::string image_of(const void* image) {
  const char* bytes = static_cast<const char*>(image);
  if (!memcmp(bytes, ELFMAG, SELFMAG)) {
    Elf64_Ehdr header;
    memcpy(&header, bytes, sizeof header);
    return {bytes, header.e_shoff + size_t{header.e_shentsize} * header.e_shnum};
  }
  const bool is_text = strstr(bytes, ".version") != nullptr;
  return is_text ? std::string(bytes) : std::string();
}

CUresult load(CUmodule* module, const void* image) {
  if (!image) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult failed = wait_for_device(current_device())) return failed;
  *module = new CUmod_st{image_of(image), {}};
  note_made(Kind::Module, key_of(*module));
  return CUDA_SUCCESS;
}

CUresult unload(CUmodule module) {
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult failed = wait_for_device(current_device())) return failed;
  note_gone(Kind::Module, key_of(module));
  delete module;
  return CUDA_SUCCESS;
}

CUresult find(CUfunction* function, CUmodule module, const char* name) {
  Lock lock(state());
  const bool is_in_image = module->image.empty() || module->image.find(name) != std::string::npos;
  const Twin* twin = is_in_image ? find_twin(name) : nullptr;
  if (!twin) return CUDA_ERROR_NOT_FOUND;
  auto& known = module->functions[name];
  if (!known) known = std::make_unique<CUfunc_st>(CUfunc_st{name, twin, module->code});
  *function = known.get();
  return CUDA_SUCCESS;
}

CUmodule as_module(CUlibrary library) { return reinterpret_cast<CUmodule>(library); }

CUresult launch_function(CUfunction function, const unsigned* dims, CUstream stream, void** parameters, void** extra) {
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (extra) return CUDA_ERROR_NOT_SUPPORTED;  // parameters as one buffer
  return launch(stream, *function->twin, function->code, dims, parameters);
}

CUresult attribute_of_kernel(int* value, CUfunction_attribute attribute) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

}  // namespace

// For the runtime, which knows kernels by the names that a library registered.
SOFTCUDA_EXPORT CUresult softcuda_launch_named(const char* kernel, unsigned* dims, void** parameters, CUstream stream) {
  static Site site("cuLaunchKernel");
  if (CUresult refused = enter(site, Rule::Plain)) return refused;
  const Twin* twin = find_twin(kernel);
  return twin ? launch(stream, *twin, lasting_code(), dims, parameters) : CUDA_ERROR_NO_BINARY_FOR_GPU;
}

API cuModuleLoadData(CUmodule* module, const void* image) {
  ENTER(NotInCapture);
  return load(module, image);
}

API cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  ENTER(NotInCapture);
  return load(module, image);
}

API cuModuleUnload(CUmodule module) {
  ENTER(NotInCapture);
  return unload(module);
}

API cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  ENTER(Plain);
  return find(function, module, name);
}

API cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  ENTER(AnyDevice);
  *mode = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

API cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
                      unsigned) {
  ENTER(NotInCapture);
  return load(reinterpret_cast<CUmodule*>(library), image);
}

API cuLibraryUnload(CUlibrary library) {
  ENTER(NotInCapture);
  return unload(as_module(library));
}

API cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  ENTER(Plain);
  return find(reinterpret_cast<CUfunction*>(kernel), as_module(library), name);
}

API cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  ENTER(Plain);
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

API cuFuncLoad(CUfunction) {
  ENTER(Plain);
  return CUDA_SUCCESS;
}

API cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  ENTER(Plain);
  return attribute_of_kernel(value, attribute);
}

API cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  ENTER(Plain);
  return CUDA_SUCCESS;
}

API cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel, CUdevice) {
  ENTER(Plain);
  return attribute_of_kernel(value, attribute);
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  ENTER(Plain);
  *blocks = 2;
  return CUDA_SUCCESS;
}

API cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned, CUstream stream, void** parameters, void** extra) {
  ENTER(Plain);
  const unsigned dims[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
  return launch_function(function, dims, stream, parameters, extra);
}

API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  ENTER(Plain);
  const unsigned dims[] = {config->gridDimX,  config->gridDimY,  config->gridDimZ,
                           config->blockDimX, config->blockDimY, config->blockDimZ};
  return launch_function(function, dims, config->hStream, parameters, extra);
}
