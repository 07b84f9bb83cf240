// Memory and events of other processes of this host, through the files that they have open.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "call.h"
#include "context.h"
#include "event.h"
#include "leaks.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace softcuda {

namespace {

// What a handle's 64 bytes hold. The inode tells whether the number still means the same file.
struct Handle {
  int process;
  int file;
  uint64_t bytes;
  uint64_t inode;
  int device;  // its number on the machine
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle) && sizeof(Handle) <= sizeof(CUipcEventHandle));

struct Import {
  CUdeviceptr address;
  int references;
};

// By inode: opening a handle twice gives the same address.
std::map<uint64_t, Import>& imports() {
  static auto* const imports = new std::map<uint64_t, Import>;
  return *imports;
}

uint64_t inode_of(int file) {
  struct stat status {};
  return fstat(file, &status) ? 0 : status.st_ino;
}

template <class Public>
void write_handle(Public* out, const Handle& handle) {
  memset(out, 0, sizeof *out);
  memcpy(out, &handle, sizeof handle);
}

template <class Public>
Handle read_handle(const Public& from) {
  Handle handle;
  memcpy(&handle, &from, sizeof handle);
  return handle;
}

// A file of another process; -1 if it has closed it.
int open_file(const Handle& handle) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0 || inode_of(file) == handle.inode) return file;
  close(file);
  return -1;
}

CUresult import_memory(CUdeviceptr* address, const Handle& handle) {
  if (handle.process == getpid()) {
    return breach(CUDA_ERROR_INVALID_CONTEXT, "%s: the handle is of this process", current_call());
  }
  if (!settings().peers && handle.device != number_on_machine(current_device())) {
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  }
  Lock lock(state());
  const auto known = imports().find(handle.inode);
  if (known != imports().end()) {
    ++known->second.references;
    *address = known->second.address;
    return CUDA_SUCCESS;
  }
  const int file = open_file(handle);
  if (file < 0) {
    return breach(CUDA_ERROR_INVALID_VALUE, "%s: process %d has freed that memory, or ended", current_call(),
                  handle.process);
  }
  const size_t pages = round_up(handle.bytes, PAGE);
  const CUdeviceptr start = reserve_addresses(pages);
  if (!start || !map_pages(start, pages, file, 0)) {
    close(file);
    return CUDA_ERROR_MAP_FAILED;
  }
  const int seen = number_in_process(handle.device);
  const int device = seen < 0 ? current_device() : seen;
  allocations()[start] = {handle.bytes, device, Origin::Imported, file, handle.inode, true, maker_of_this()};
  imports()[handle.inode] = {start, 1};
  note_made(Kind::Handle, start, handle.bytes);
  *address = start;
  return CUDA_SUCCESS;
}

CUresult drop_import(CUdeviceptr address) {
  Lock lock(state());
  const auto found = allocations().find(address);
  if (found == allocations().end() || found->second.origin != Origin::Imported) {
    return breach(CUDA_ERROR_INVALID_VALUE, "%s: %#llx is no opened handle", current_call(), address);
  }
  const Allocation allocation = found->second;
  if (--imports()[allocation.id].references) return CUDA_SUCCESS;
  imports().erase(allocation.id);
  remember_freed(address, allocation);
  allocations().erase(found);
  const size_t pages = round_up(allocation.bytes, PAGE);
  unmap_pages(address, pages);
  close(allocation.file);
  return_addresses(address, pages);
  note_gone(Kind::Handle, address);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace softcuda

using namespace softcuda;

API cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  ENTER(Plain);
  Lock lock(state());
  const auto found = allocation_at(address);
  if (found == allocations().end() || found->second.origin != Origin::Allocated) {
    return breach(CUDA_ERROR_INVALID_VALUE, "%s: %#llx is not of cuMemAlloc", current_call(), address);
  }
  const Allocation& memory = found->second;
  write_handle(handle, {getpid(), memory.file, memory.bytes, inode_of(memory.file), number_on_machine(memory.device)});
  return CUDA_SUCCESS;
}

API cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned) {
  ENTER(NotInCapture);
  return import_memory(address, read_handle(handle));
}

API cuIpcCloseMemHandle(CUdeviceptr address) {
  ENTER(NotInCapture);
  if (CUresult failed = wait_for_device(current_device())) return failed;
  return drop_import(address);
}

API cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent event) {
  ENTER(Plain);
  if (!event || event->file < 0) return CUDA_ERROR_INVALID_HANDLE;
  write_handle(handle, {getpid(), event->file, 0, inode_of(event->file), number_on_machine(event->device)});
  return CUDA_SUCCESS;
}

API cuIpcOpenEventHandle(CUevent* opened, CUipcEventHandle handle) {
  ENTER(Plain);
  const int file = open_file(read_handle(handle));
  if (file < 0) return CUDA_ERROR_INVALID_HANDLE;
  auto* event = new CUevent_st;
  event->state = map_event(file);
  event->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
  event->device = current_device();
  event->file = file;
  note_made(Kind::Event, key_of(event));
  *opened = event;
  return event->state ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
}
