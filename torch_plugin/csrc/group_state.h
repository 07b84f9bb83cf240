// The state that a backend shares with its works: works in flight, the group's error, and hooks.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pthread.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "errors.h"
#include "ncclx_abi.h"

#define NCCLX_TORCH_GE(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace ncclx {

class Communicator;

using Milliseconds = std::chrono::milliseconds;

// What tells works apart for completion hooks. Not the address, which a later work may have again.
inline uint64_t next_completion_key() {
  static std::atomic<uint64_t> keys{0};
  return ++keys;
}

// Under its lock, only pointers to functions are copied and dropped: to copy or drop a function from Python takes Python's
// lock, whose holder may be waiting for this one.
class GroupState : public std::enable_shared_from_this<GroupState> {
  // Hooks by their ids.
  template <typename F>
  using Hooks = std::map<int64_t, std::shared_ptr<const F>>;

 public:
  using FailureHook = std::function<void()>;
  using WorkInfoHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  using TimePoint = std::chrono::steady_clock::time_point;

  // A failure of the group, with the hooks to call.
  struct FailureCall {
    std::shared_ptr<GroupState> group;
    Hooks<FailureHook> hooks;
  };

  // While it exists, its thread has a work of the group in flight that no other thread can end.
  class OwnWork {
   public:
    explicit OwnWork(const GroupState& group) : group_(&group), before_(std::exchange(last_, this)) {}
    ~OwnWork() { last_ = before_; }
    OwnWork(const OwnWork&) = delete;
    OwnWork& operator=(const OwnWork&) = delete;

    // How many this thread has of a group.
    static size_t count(const GroupState& group) {
      size_t found = 0;
      for (const OwnWork* own = last_; own; own = own->before_) found += own->group_ == &group;
      return found;
    }

   private:
    static inline thread_local const OwnWork* last_ = nullptr;
    const GroupState* const group_;
    const OwnWork* const before_;
  };

  void on_completion(WorkInfoHook hook) {
    auto shared = std::make_shared<const WorkInfoHook>(std::move(hook));
    std::lock_guard<std::mutex> lock(mutex_);
    work_info_hook_.swap(shared);
  }

  // Whether hooks are to be called at its end.
  bool work_started() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++in_flight_;
#if NCCLX_TORCH_GE(2, 15)
    if (!success_hooks_->empty()) return true;
#endif
    return work_info_hook_ != nullptr;
  }

  // Calls the hook, then wakes the threads that wait for works. `info` is only called if there is a hook.
  template <typename Info>
  void work_ended(Info&& info) {
    const auto hook = [this] {
      std::lock_guard<std::mutex> lock(mutex_);
      return work_info_hook_;
    }();
    try {
      if (hook) (*hook)(info());
    } catch (const std::exception& error) {
      TORCH_WARN("ncclx_rs: the completion hook failed: ", text_of(error));
    }
    work_ended();
  }

  // The same, of an operation that no hook is told of.
  void work_ended() {
    std::lock_guard<std::mutex> lock(mutex_);
    --in_flight_;
    all_ended_.notify_all();
  }

  // Waits for works to end, but not for those that this thread ends afterwards: it may be in a handler of a signal, which
  // interrupts a blocking call, or in a callback of a work.
  void wait_for_all() {
    const size_t own = OwnWork::count(*this);
    std::unique_lock<std::mutex> lock(mutex_);
    all_ended_.wait(lock, [&] { return in_flight_ <= own; });
  }

  // Records the first failure of a generation of members after which the group may be unusable, unless there is a newer
  // generation. The caller passes the result to `call_failure_hooks` once the work has its error: hooks may take long.
  std::unique_ptr<FailureCall> record_failure(uint64_t generation, int32_t status) {
    using c10d::ErrorType;
    const ErrorType error = status == NCCLX_TIMEOUT  ? ErrorType::TIMEOUT
                            : status == NCCLX_REMOTE ? ErrorType::REMOTE_ERROR
                            : status == NCCLX_LOST   ? ErrorType::COMM_ERROR
                                                     : ErrorType::SUCCESS;
    std::lock_guard<std::mutex> lock(mutex_);
    if (generation != generation_ || paused_) return nullptr;
    if (error == ErrorType::SUCCESS || error_ != ErrorType::SUCCESS) return nullptr;
    error_ = error;
    if (has_left_ || failure_hooks_.empty()) return nullptr;
    ++hook_calls_;
    return std::make_unique<FailureCall>(shared_from_this(), failure_hooks_);
  }

  // Calls the hooks on the thread for callbacks.
  static void call_failure_hooks(const NcclxEngine* engine, std::unique_ptr<FailureCall> failure_call) {
    const auto job = [](void* context) {
      const std::unique_ptr<FailureCall> failure_call(static_cast<FailureCall*>(context));
      failure_call->group->call(failure_call->hooks);
    };
    if (failure_call) engine->call_elsewhere(job, failure_call.release());
  }

  // The deadline of waits for works and hooks, which cannot end after the interpreter's end.
  static TimePoint default_deadline() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

  // Waits for failure hooks to end, but returns at once in a hook.
  void wait_for_hooks(TimePoint deadline = default_deadline()) {
    std::unique_lock<std::mutex> lock(mutex_);
    all_ended_.wait_until(lock, deadline, [this] { return hooks_have_ended(); });
  }

  // Waits for works to end.
  void wait_for_works(TimePoint deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    all_ended_.wait_until(lock, deadline, [this] { return in_flight_ == 0; });
  }

  // Waits for works and failure hooks to end.
  void settle(TimePoint deadline = default_deadline()) {
    wait_for_works(deadline);
    wait_for_hooks(deadline);
  }

  void on_failure(int64_t id, FailureHook hook) {
    auto shared = std::make_shared<const FailureHook>(std::move(hook));
    std::lock_guard<std::mutex> lock(mutex_);
    failure_hooks_[id].swap(shared);
  }

  void remove_failure_hook(int64_t id) {
    std::shared_ptr<const FailureHook> hook;
    std::lock_guard<std::mutex> lock(mutex_);
    hook.swap(failure_hooks_[id]);
    failure_hooks_.erase(id);
  }

#if NCCLX_TORCH_GE(2, 15)
  void on_success(int64_t id, c10d::CompletionHook hook) {
    auto shared = std::make_shared<const c10d::CompletionHook>(std::move(hook));
    change_success_hooks([&](SuccessHooks& hooks) { hooks[id] = std::move(shared); });
  }

  void remove_success_hook(int64_t id) {
    change_success_hooks([&](SuccessHooks& hooks) { hooks.erase(id); });
  }

  // Calls the hooks of an operation that has succeeded.
  void call_success_hooks(uint64_t key, std::chrono::steady_clock::duration duration) {
    std::shared_ptr<const SuccessHooks> hooks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      hooks = success_hooks_;
    }
    for (const auto& [id, hook] : *hooks) {
      try {
        (*hook)({key, std::chrono::duration<float, std::milli>(duration).count()});
      } catch (const std::exception& thrown) {
        TORCH_WARN("ncclx_rs: a completion hook failed: ", text_of(thrown));
      }
    }
  }
#endif

  // This rank leaves: errors of works from now on are no failure of the group. Its hooks stay where it returns. Elsewhere they
  // go, since they may hold what holds the group.
  void leave(bool returns = false) {
    Hooks<FailureHook> hooks;  // dropped after the lock
    std::lock_guard<std::mutex> lock(mutex_);
    has_left_ = true;
    if (!returns) hooks.swap(failure_hooks_);
  }

  // Errors between two generations of members are no failure of the group.
  void pause() {
    std::lock_guard<std::mutex> lock(mutex_);
    paused_ = true;
    ++generation_;
  }

  uint64_t generation() const { return generation_; }

  void resume() {
    std::lock_guard<std::mutex> lock(mutex_);
    paused_ = false;
    has_left_ = false;
    error_ = c10d::ErrorType::SUCCESS;
  }

  c10d::ErrorType error() const { return error_; }

  // Sets the current communicator.
  void set_comm(const std::shared_ptr<Communicator>& comm) {
    std::lock_guard<std::mutex> lock(mutex_);
    comm_ = comm;
  }

  std::shared_ptr<Communicator> comm() {
    std::lock_guard<std::mutex> lock(mutex_);
    return comm_.lock();
  }

 private:
  // Whether this thread is calling failure hooks of a group.
  static inline thread_local bool in_hook_ = false;

  void call(const Hooks<FailureHook>& hooks) {
    const bool before = std::exchange(in_hook_, true);
    for (const auto& [id, hook] : hooks) {
      try {
        (*hook)();
      } catch (const std::exception& thrown) {
        TORCH_WARN("ncclx_rs: an abort hook failed: ", text_of(thrown));
      }
    }
    in_hook_ = before;
    std::lock_guard<std::mutex> lock(mutex_);
    --hook_calls_;
    all_ended_.notify_all();
  }

  // A hook never waits for hooks, also of another group: those may wait for it.
  bool hooks_have_ended() const { return in_hook_ || hook_calls_ == 0; }

#if NCCLX_TORCH_GE(2, 15)
  using SuccessHooks = Hooks<c10d::CompletionHook>;

  template <typename Change>
  void change_success_hooks(Change&& change) {
    std::shared_ptr<const SuccessHooks> before;  // dropped after the lock
    std::lock_guard<std::mutex> lock(mutex_);
    auto hooks = std::make_shared<SuccessHooks>(*success_hooks_);
    change(*hooks);
    before = std::exchange(success_hooks_, std::move(hooks));
  }
#endif

  std::mutex mutex_;
  std::condition_variable all_ended_;
  size_t in_flight_ = 0;
  size_t hook_calls_ = 0;  // failures whose hooks have not ended
  bool paused_ = false;
  bool has_left_ = false;
  std::atomic<uint64_t> generation_{0};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::shared_ptr<const WorkInfoHook> work_info_hook_;
  Hooks<FailureHook> failure_hooks_;
  std::weak_ptr<Communicator> comm_;
#if NCCLX_TORCH_GE(2, 15)
  // Immutable and replaced at a change, so that operations need not copy it.
  std::shared_ptr<const SuccessHooks> success_hooks_ = std::make_shared<SuccessHooks>();
#endif
};

// The groups of this process, for its end. Python does not know all of them: PyTorch keeps backends in C++, and those of
// split groups may never have been in Python.
class GroupRegistry {
 public:
  static std::shared_ptr<GroupState> make() {
    auto group = std::make_shared<GroupState>();
    GroupRegistry& all = of_process();
    std::lock_guard<std::mutex> lock(all.mutex_);
    std::erase_if(all.groups_, [](const auto& known) { return known.expired(); });
    all.groups_.push_back(group);
    return group;
  }

  static std::vector<std::shared_ptr<GroupState>> alive() {
    std::vector<std::shared_ptr<GroupState>> found;
    GroupRegistry& all = of_process();
    std::lock_guard<std::mutex> lock(all.mutex_);
    for (const auto& known : all.groups_) {
      if (auto group = known.lock()) found.push_back(std::move(group));
    }
    return found;
  }

 private:
  static GroupRegistry& of_process() {
    static GroupRegistry* const all = [] {
      // A forked child forgets its parent's groups, and finds the lock free.
      pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                     [] {
                       of_process().groups_.clear();
                       of_process().mutex_.unlock();
                     });
      return new GroupRegistry;  // never destroyed: groups may outlive static objects
    }();
    return *all;
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<GroupState>> groups_;
};

}  // namespace ncclx
