// The boundary between the C++ shim and the Rust engine: plain data and a table of functions.
//
// No exception or panic crosses it. A panic ends the process where the engine may use memory of tensors. Any thread may
// call any function, without Python's lock.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

enum NcclxStatus : int32_t {
  NCCLX_OK = 0,
  NCCLX_USAGE = 1,    // the caller's mistake
  NCCLX_FAILURE = 2,  // the operation failed; the communicator stays usable
  NCCLX_NETWORK = 3,  // the communicator could not be made
  NCCLX_PENDING = 4,  // the wait timed out; the operation is still in flight
  NCCLX_TIMEOUT = 5,  // the operation timed out
  NCCLX_REMOTE = 6,   // another rank gave up the operation
  NCCLX_LOST = 7,     // a rank is lost, or this rank has left
};

struct NcclxError {
  char text[4096];  // UTF-8, ends with a zero
};

enum NcclxKind : uint32_t {
  NCCLX_ALL_REDUCE = 0,
  NCCLX_REDUCE = 1,
  NCCLX_BROADCAST = 2,
  NCCLX_ALL_GATHER = 3,
  NCCLX_REDUCE_SCATTER = 4,
  NCCLX_ALL_TO_ALL = 5,
  NCCLX_GATHER = 6,
  NCCLX_SCATTER = 7,
  NCCLX_BARRIER = 8,
  NCCLX_SEND = 9,
  NCCLX_RECV = 10,
  NCCLX_PUT = 11,
  NCCLX_GET = 12,
  NCCLX_SIGNAL = 13,
  NCCLX_WAIT_SIGNAL = 14,
  NCCLX_ACCUMULATE = 15,
  NCCLX_FLUSH = 16,
  NCCLX_ALL_GATHER_PERSISTENT = 17,
};

enum : int32_t { NCCLX_HOST = -1 };

struct NcclxBuffer {
  void* ptr;
  uint64_t numel;
  int32_t dtype;   // the position in the engine's list of element types
  int32_t device;  // the number of the CUDA device, or NCCLX_HOST
};

struct NcclxOp {
  uint32_t kind;
  uint32_t reduce;  // c10d's RedOpType
  double factor;    // for PREMUL_SUM
  int64_t timeout_ms;  // negative: the communicator's
  int32_t peer;     // root, destination or source; -1 for any source
  uint32_t tag;
  uint32_t blocking;  // the caller waits next
  int32_t device;     // the number of the CUDA device on whose `stream` the operation is put, or NCCLX_HOST
  const NcclxBuffer* in;
  uint64_t n_in;
  const NcclxBuffer* out;
  uint64_t n_out;
  const uint64_t* in_counts;  // for all_to_all: elements for each rank
  const uint64_t* out_counts;
  uint64_t n_counts;
  uint64_t window;  // for accesses to windows
  uint64_t offset;  // in bytes
  uint64_t stream;  // the driver's handle; zero is the default stream
  const NcclxBuffer* factor_at;  // for PREMUL_SUM on a stream: a factor on the device, in place of `factor`; or null
};

struct NcclxStore {
  void* context;
  int32_t (*set)(void* context, const char* key, const uint8_t* value, uint64_t len, NcclxError* error);
  // Calls `write(sink, value, len)` once on success.
  int32_t (*get)(void* context, const char* key, int64_t timeout_ms, void (*write)(void*, const uint8_t*, uint64_t),
                 void* sink, NcclxError* error);
  const char* host;  // the host of the rendezvous, or null
};

struct NcclxInit {
  const char* name;
  int32_t rank;
  int32_t size;
  int64_t timeout_ms;  // negative: the configuration's
  const char* const* hints;  // names and values alternate
  uint64_t n_hints;          // the number of pairs
  NcclxStore store;          // used only during `create`
};

struct NcclxComm;
struct NcclxHandle;
struct NcclxMemory;
struct NcclxMapping;
struct NcclxPart;

struct NcclxEngine {
  uint32_t size;  // of this struct
  int32_t (*create)(const NcclxInit* init, NcclxComm** comm, NcclxError* error);
  void (*destroy)(NcclxComm* comm);
  int32_t (*submit)(NcclxComm* comm, const NcclxOp* op, NcclxHandle** handle, NcclxError* error);
  int32_t (*wait)(NcclxHandle* handle, int64_t timeout_ms, NcclxError* error);
  // Has the end of an operation on a stream noticed within milliseconds, for `on_complete`.
  void (*watch_closely)(NcclxHandle* handle);
  int32_t (*poll)(NcclxHandle* handle);  // 1: the operation has ended, well or badly; does not wait
  // Calls `done(context, status, text)` exactly once, now or later, from any thread.
  void (*on_complete)(NcclxHandle* handle, void (*done)(void* context, int32_t status, const char* text), void* context);
  int32_t (*source)(NcclxHandle* handle);  // -1: none
  uint64_t (*sequence)(NcclxHandle* handle);
  void (*release)(NcclxHandle* handle);
  void (*abort)(NcclxComm* comm, const char* reason);
  void (*shutdown)(NcclxComm* comm);
  void (*set_timeout)(NcclxComm* comm, int64_t timeout_ms);  // negative: the configuration's
  int64_t (*timeout)(NcclxComm* comm);  // in milliseconds
  uint64_t (*collectives)(NcclxComm* comm);
  // Calls `done(context, status, text)` exactly once, from any thread: with NCCLX_LOST once a rank is lost, with NCCLX_OK
  // when the communicator ends before that.
  void (*on_loss)(NcclxComm* comm, void (*done)(void* context, int32_t status, const char* text), void* context);
  int32_t (*host)(NcclxComm* comm, int32_t rank);  // the number of the rank's host; -1: no such rank
  // Both are collective and block. The engine may use the memory until it is deregistered or the communicator ends.
  int32_t (*window_register)(NcclxComm* comm, const NcclxBuffer* memory, uint64_t* window, NcclxError* error);
  int32_t (*window_deregister)(NcclxComm* comm, uint64_t window, NcclxError* error);
  // Collective; blocks.
  int32_t (*window_fence)(NcclxComm* comm, uint64_t window, NcclxError* error);
  // The part of a rank on this host, in memory that stays valid until `unmap`.
  int32_t (*window_map)(NcclxComm* comm, uint64_t window, int32_t rank, NcclxMapping** mapping, void** ptr,
                        uint64_t* bytes, NcclxError* error);
  void (*unmap)(NcclxMapping* mapping);
  // How a get of a rank's part goes now: a name of so many bytes, which lives as long as the program.
  int32_t (*window_get_path)(NcclxComm* comm, uint64_t window, int32_t rank, const char** name, uint64_t* bytes,
                             NcclxError* error);
  // Zeroed shared memory, valid until `memory_free`.
  int32_t (*memory_new)(uint64_t bytes, NcclxMemory** memory, void** ptr, NcclxError* error);
  void (*memory_free)(NcclxMemory* memory);
  // Sets the job's numbers of the communicator's `n` ranks, for the flight recorder.
  void (*set_members)(NcclxComm* comm, const int64_t* ranks, uint64_t n);
  // Calls `job(context)` once, on a thread for callbacks.
  void (*call_elsewhere)(void (*job)(void* context), void* context);
  // How many CUDA devices the engine can use, at least one; -1 with an error that says what is lacking.
  int32_t (*cuda_devices)(NcclxError* error);
  // Sends and receives on tensors of one CUDA device that go on together, all on one of its streams. They have one handle.
  int32_t (*submit_batch)(NcclxComm* comm, const NcclxOp* ops, size_t count, NcclxHandle** handle, NcclxError* error);
  // Sets up what operations on a device need. Collective; blocks.
  int32_t (*prepare_device)(NcclxComm* comm, int32_t device, NcclxError* error);
  // Whether streams that the shim makes for operations are to have high priority: 1 or 0.
  int32_t (*is_high_priority_stream)(const NcclxComm* comm);
  // Whether a CUDA graph captures a stream of this device: 1 or 0; -1 with an error.
  int32_t (*is_captured)(int32_t device, uint64_t stream, NcclxError* error);
  // What a communicator of these `n` ranks, none on a rank that is in no part, takes over of a vendor's library; null if it begins
  // by itself. Collective; blocks.
  int32_t (*part)(NcclxComm* comm, const int32_t* ranks, uint64_t n, NcclxPart** part, NcclxError* error);
  void (*inherit)(NcclxComm* comm, NcclxPart* part);  // takes the part
  void (*part_free)(NcclxPart* part);
  // Whether a vendor's library allocates device memory for the communicator: `by_library` is 1, or 0. Without an error, its text
  // says why the engine does so in place of the library, or is empty.
  int32_t (*allocates)(NcclxComm* comm, uint32_t* by_library, NcclxError* error);
  // Has a vendor's library take memory of a device in place. Calls `let_go(kept)` exactly once, on any thread: when it is no longer
  // registered, also after an error.
  int32_t (*memory_register)(NcclxComm* comm, const NcclxBuffer* memory, void* kept, void (*let_go)(void* kept),
                             NcclxError* error);
  int32_t (*memory_deregister)(NcclxComm* comm, const NcclxBuffer* memory, NcclxError* error);
};

// What the shim's library exports.
#define NCCLX_EXPORT __attribute__((visibility("default")))

// The version of PyTorch that the shim was compiled for.
NCCLX_EXPORT const char* ncclx_shim_torch_version();

// Adds the backend's classes to the Python module. Returns 0, or -1 with a Python exception set.
NCCLX_EXPORT int32_t ncclx_shim_init(void* py_module, const NcclxEngine* engine);

// Calls a Python function, with Python's lock, on a thread of the engine. `sys.unraisablehook` gets its exceptions. Does
// not return if the interpreter ends during the call.
NCCLX_EXPORT void ncclx_shim_call(void* function, void* arguments);

}  // extern "C"

static_assert(sizeof(NcclxBuffer) == 24);
static_assert(sizeof(NcclxOp) == 128);
static_assert(sizeof(NcclxStore) == 32);
static_assert(sizeof(NcclxInit) == 72);
static_assert(sizeof(NcclxEngine) == 312);
