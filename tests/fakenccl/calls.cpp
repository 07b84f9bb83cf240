// The calls: what they refuse, what they move and what they compute.
#include <cstring>

#include "group.h"
#include "reduce.h"
#include "settings.h"

extern "C" void* softcuda_alias(CUdeviceptr address, size_t bytes);

using namespace fakenccl;

namespace {

// Where the host finds what a program has on its device.
char* alias(const void* address, size_t bytes) {
  return bytes ? static_cast<char*>(softcuda_alias(reinterpret_cast<CUdeviceptr>(address), bytes)) : nullptr;
}

int refuse(int result, const char* why) {
  last_error() = why;
  return result;
}

// A call that a program makes, once it is checked.
struct Checked {
  std::shared_ptr<Communicator> comm;
  CUstream stream;
  size_t bytes;
};

int check(Checked& checked, void* handle, void* stream, size_t count, int type, int root) {
  checked.comm = find(handle);
  checked.stream = static_cast<CUstream>(stream);
  if (!checked.comm) return refuse(InvalidArgument, "no communicator");
  const int state = checked.comm->state;
  if (state == InProgress) return refuse(InvalidArgument, "the communicator is not ready");
  if (state != Success) return refuse(state, checked.comm->failure.c_str());
  if (checked.comm->is_aborted()) return refuse(InvalidUsage, "what it shares was aborted");
  if (root < 0 || root >= checked.comm->size) return refuse(InvalidArgument, "invalid root");
  if (!size_of(static_cast<Type>(type))) return refuse(InvalidArgument, "invalid type");
  checked.bytes = count * size_of(static_cast<Type>(type));
  return Success;
}

// Memory of a program, as a call notes it.
std::pair<uintptr_t, size_t> place(const void* address, size_t bytes) {
  return {reinterpret_cast<uintptr_t>(address), bytes};
}

// Adds what a rank gets and gives where each gets something of all others.
void swap(std::vector<Transfer>& transfers, const Communicator& comm, int peer, char* from, char* into, size_t bytes) {
  if (peer == comm.rank) {
    if (bytes && from != into) memmove(into, from, bytes);
    return;
  }
  if (from) transfers.push_back({true, peer, from, bytes});
  if (into) transfers.push_back({false, peer, into, bytes});
}

// Who gets the result.
enum class Goes { Everyone, Root, Blocks };

// A reduction of `count` elements, or of as many a rank where each gets its block.
int reduction(const void* from, void* into, size_t count, int type, int op, Goes goes, int root, void* handle,
              void* stream) {
  Checked checked;
  if (const int refused = check(checked, handle, stream, count, type, root)) return refused;
  const Type element = static_cast<Type>(type);
  if (element >= Type::F8E4M3) return refuse(InvalidArgument, "no reductions of float8 here");
  const auto& comm = checked.comm;
  const Communicator::Factor* factor = nullptr;
  const auto made = static_cast<size_t>(op) - static_cast<size_t>(Op::First);
  if (op >= static_cast<int>(Op::First)) {
    if (made >= comm->factors.size() || !comm->factors[made]) return refuse(InvalidArgument, "invalid operation");
    factor = comm->factors[made].get();
    if (factor->type != element) return refuse(InvalidArgument, "the factor has another type");
  }
  if (op < 0) return refuse(InvalidArgument, "invalid operation");
  const size_t bytes = checked.bytes;
  const size_t length = goes == Goes::Blocks ? bytes * comm->size : bytes;
  const bool is_mine = goes != Goes::Root || root == comm->rank;
  char* const source = alias(from, length);
  char* const target = is_mine ? alias(into, bytes) : nullptr;
  const bool has_factor = factor;
  const Communicator::Factor scaled = factor ? *factor : Communicator::Factor{};
  struct Data {
    std::string own;
    std::vector<std::string> ranks;
  };
  const auto data = std::make_shared<Data>();
  const auto moves = [=](std::vector<Transfer>& transfers) {
    data->own.assign(source ? source : "", length);
    if (has_factor) scale(data->own, scaled.on_device ? scaled.on_device : scaled.value, element);
    data->ranks.assign(comm->size, std::string(bytes, 0));
    for (int peer = 0; peer < comm->size; peer++) {
      char* const part = &data->own[goes == Goes::Blocks ? bytes * peer : 0];
      const bool is_theirs = goes != Goes::Root || root == peer;
      swap(transfers, *comm, peer, is_theirs ? part : nullptr, is_mine ? &data->ranks[peer][0] : nullptr, bytes);
    }
  };
  const auto computes = [=] {
    const Op folded = has_factor ? Op::Sum : static_cast<Op>(op);
    if (is_mine && bytes) fold(target, data->ranks, element, folded);
  };
  return add({comm, checked.stream, moves, computes, {place(from, length), place(into, is_mine ? bytes : 0)}});
}

}  // namespace

API int ncclAllReduce(const void* from, void* into, size_t count, int type, int op, void* comm, void* stream) {
  return reduction(from, into, count, type, op, Goes::Everyone, 0, comm, stream);
}

API int ncclReduce(const void* from, void* into, size_t count, int type, int op, int root, void* comm, void* stream) {
  return reduction(from, into, count, type, op, Goes::Root, root, comm, stream);
}

API int ncclReduceScatter(const void* from, void* into, size_t count, int type, int op, void* comm, void* stream) {
  return reduction(from, into, count, type, op, Goes::Blocks, 0, comm, stream);
}

API int ncclBroadcast(const void* from, void* into, size_t count, int type, int root, void* handle, void* stream) {
  Checked checked;
  if (const int refused = check(checked, handle, stream, count, type, root)) return refused;
  const auto& comm = checked.comm;
  const size_t bytes = checked.bytes;
  const bool is_root = comm->rank == root;
  char* const source = is_root ? alias(from, bytes) : nullptr;
  char* const target = alias(into, bytes);
  const auto moves = [=](std::vector<Transfer>& transfers) {
    if (!is_root) {
      transfers.push_back({false, root, target, bytes});
      return;
    }
    for (int peer = 0; peer < comm->size; peer++) {
      swap(transfers, *comm, peer, source, peer == root ? target : nullptr, bytes);
    }
  };
  return add({comm, checked.stream, moves, nullptr, {place(from, is_root ? bytes : 0), place(into, bytes)}});
}

API int ncclAllGather(const void* from, void* into, size_t count, int type, void* handle, void* stream) {
  Checked checked;
  if (const int refused = check(checked, handle, stream, count, type, 0)) return refused;
  const auto& comm = checked.comm;
  const size_t bytes = checked.bytes;
  char* const source = alias(from, bytes);
  char* const target = alias(into, bytes * comm->size);
  const auto moves = [=](std::vector<Transfer>& transfers) {
    for (int peer = 0; peer < comm->size; peer++) {
      swap(transfers, *comm, peer, source, target + bytes * peer, bytes);
    }
  };
  return add({comm, checked.stream, moves, nullptr, {place(from, bytes), place(into, bytes * comm->size)}});
}

namespace {

int message(const void* memory, bool is_send, int peer, const Checked& checked) {
  const size_t length = checked.bytes;
  char* const bytes = alias(memory, length);
  const auto moves = [=](std::vector<Transfer>& transfers) {
    transfers.push_back({is_send, peer, bytes, length, std::make_shared<uint64_t>(is_send ? length : 0)});
  };
  count(is_send ? "sends" : "receives");
  return add({checked.comm, checked.stream, moves, nullptr, {place(memory, length)}, peer, is_send});
}

}  // namespace

API int ncclSend(const void* from, size_t count, int type, int peer, void* comm, void* stream) {
  Checked checked;
  if (const int refused = check(checked, comm, stream, count, type, peer)) return refused;
  return message(from, true, peer, checked);
}

API int ncclRecv(void* into, size_t count, int type, int peer, void* comm, void* stream) {
  Checked checked;
  if (const int refused = check(checked, comm, stream, count, type, peer)) return refused;
  return message(into, false, peer, checked);
}

API int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, void* handle) {
  const auto comm = find(handle);
  if (!comm) return refuse(InvalidArgument, "no communicator");
  const Type element = static_cast<Type>(type);
  const size_t bytes = size_of(element);
  if (!bytes || element >= Type::F8E4M3) return refuse(InvalidArgument, "invalid type");
  auto made = std::make_unique<Communicator::Factor>();
  made->type = element;
  // ncclScalarDevice is 0: it is read when its turn on the stream comes.
  made->on_device = residence ? nullptr : alias(scalar, bytes);
  if (residence) memcpy(made->value, scalar, bytes);
  *op = static_cast<int>(Op::First) + static_cast<int>(comm->factors.size());
  comm->factors.push_back(std::move(made));
  return Success;
}

API int ncclRedOpDestroy(int op, void* handle) {
  const auto comm = find(handle);
  if (!comm) return refuse(InvalidArgument, "no communicator");
  const auto made = static_cast<size_t>(op) - static_cast<size_t>(Op::First);
  if (made >= comm->factors.size() || !comm->factors[made]) return refuse(InvalidArgument, "invalid operation");
  comm->factors[made] = nullptr;
  return Success;
}
