// The monitored barrier, made of messages. Included by register.cpp.
#include "backend.h"

namespace ncclx {

// As gloo's, with the same error messages: every rank reports to rank 0, which releases them once all have reported, and
// names the missing ranks. The limit is rank 0's alone: a rank that waits for it hears from it how the barrier ends.
void NcclxBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  // Programs cannot use tags from 2^31 on. Each call has its own tags, so that a late report is not taken for one of the
  // next call.
  const uint32_t report = 0x8000'0000 | comm()->next_monitored_barrier() << 1;
  const uint32_t release = report | 1;
  // PyTorch passes its default if the program has given no timeout.
  const bool is_limited = opts.timeout != c10d::kUnsetTimeout && opts.timeout != kBackendDefaultTimeout;
  const Milliseconds own(engine_->timeout(comm()->get()));
  const Milliseconds timeout = is_limited ? opts.timeout : own;
  const Milliseconds patience = std::max(timeout, own);
  const std::string limit = std::to_string(timeout.count()) + " ms";
  const auto exchange = [&](NcclxKind kind, int peer, uint32_t tag, Milliseconds within, const at::Tensor& token) {
    return launch({.kind = kind, .operation = "monitored_barrier", .title = nullptr, .type = OpType::BARRIER,
                   .timeout = within, .async = true, .results = {}, .profiled = {}, .peer = peer, .tag = tag,
                   .fill = [&](Operands& o, size_t) {
                     kind == NCCLX_SEND ? o.input(token, "token") : o.output(token, "token");
                   }});
  };
  const auto token = [](bool passes) { return at::full({1}, passes, at::kByte); };
  if (getRank() != 0) {
    const std::string rank = "Rank " + std::to_string(getRank());
    const auto fail = [&](const char* cause) {
      raise(NCCLX_FAILURE, "[" + rank + "]: " + rank + " successfully reached monitoredBarrier, but received errors " +
                               "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank: " + cause);
    };
    const at::Tensor passes = token(false);
    try {
      exchange(NCCLX_SEND, 0, report, patience, token(true))->wait();
      exchange(NCCLX_RECV, 0, release, patience, passes)->wait();
    } catch (const c10::Error& error) {
      fail(error.what_without_backtrace());
    }
    if (!passes.item<bool>()) fail("rank 0 says that the barrier failed");
    return;
  }
  // The reports of all, or an error that names who is missing.
  const auto hear = [&] {
    if (timeout.count() <= 0) raise(NCCLX_FAILURE, "[Rank 0]: Rank 0 timed out in monitoredBarrier after " + limit);
    std::vector<int> missing;
    const auto late = [&] {
      const std::string who = wait_all_ranks ? "Ranks " : "Rank ";
      return who + c10::Join(", ", missing) + " failed to pass monitoredBarrier in " + limit;
    };
    try {
      std::vector<at::Tensor> tokens;
      std::vector<WorkPtr> reports;
      for (int peer = 1; peer < getSize(); ++peer) {
        reports.push_back(exchange(NCCLX_RECV, peer, report, timeout, tokens.emplace_back(token(false))));
      }
      for (int peer = 1; peer < getSize(); ++peer) {
        try {
          reports[peer - 1]->wait();
        } catch (const c10::Error&) {
          // A loss or an abort ends the reports of all ranks, also of those that may yet come.
          if (!static_cast<const NcclxWork&>(*reports[peer - 1]).has_timed_out()) throw;
          missing.push_back(peer);
          if (!wait_all_ranks) break;
        }
      }
    } catch (const c10::Error& error) {
      raise(NCCLX_FAILURE, std::string("[Rank 0]: monitoredBarrier failed: ") + text_of(error) +
                               (missing.empty() ? "" : "; " + late()));
    }
    if (!missing.empty()) raise(NCCLX_FAILURE, "[Rank 0]: " + late());
  };
  const auto tell = [&](bool passes) {
    std::vector<WorkPtr> sent;
    for (int peer = 1; peer < getSize(); ++peer) {
      sent.push_back(exchange(NCCLX_SEND, peer, release, patience, token(passes)));
    }
    return sent;
  };
  const auto began = comm();
  try {
    hear();
  } catch (...) {
    // Not to members that a signal's handler has made anew meanwhile.
    if (comm_or_none() == began) {
      try {
        tell(false);
      } catch (const c10::Error&) {
        // A rank is lost or this one has left, which the others hear anyway.
      }
    }
    throw;
  }
  for (auto& work : tell(true)) work->wait();
}

}  // namespace ncclx
