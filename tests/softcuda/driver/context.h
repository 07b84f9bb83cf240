// Devices, their primary contexts, and which of them a thread works on.
#pragma once

#include <cuda.h>

#include <atomic>

struct CUctx_st {
  int device;
  unsigned flags;
  int references;
  // An error that stays, as of a kernel that reads what is not there: every later call returns it.
  std::atomic<int> sticky;
};

namespace softcuda {

// How many devices the process sees, and whether a number is of one.
int device_count();
bool is_device(int device);

// A device's number on the machine, and the process's number of such a one; -1 if it does not see it.
int number_on_machine(int device);
int number_in_process(int device);

// What a device says of one of its capabilities.
int attribute_of(int device, CUdevice_attribute attribute);

// The device of the thread's current context; 0 for a thread without one.
int current_device();

CUcontext primary_context(int device);

CUresult sticky_error(int device);

// Breaks a device for good; the first error stays.
void break_device(int device, CUresult error);

// Makes a device's context the thread's current one, for threads of our own.
void work_on(int device);

}  // namespace softcuda
