// What programs know of NCCL's interface, as far as this library has it.
#pragma once
#include <cuda.h>

#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

enum Result {
  Success = 0,
  UnhandledCudaError = 1,
  SystemError = 2,
  InvalidArgument = 4,
  InvalidUsage = 5,
  InProgress = 7,
};

struct UniqueId {
  char bytes[128];
};

// The beginning of ncclConfig_t, whose length says its version.
struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cga_cluster_size;
  int min_ctas, max_ctas;
  const char* net_name;
  int split_share;
};

enum class Type { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, F8E4M3, F8E5M2 };
enum class Op { Sum, Product, Max, Min, Avg, First };  // From `First` on: those that a program has made.
