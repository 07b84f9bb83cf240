// What a backend and its works share: who is still in flight, how the group fares, who wants to know of completions.
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

// Only what is behind pointers is copied and dropped under this lock: a function from Python takes Python's lock when it
// is copied or dropped, and who has that may be waiting for this one.
class Group : public std::enable_shared_from_this<Group> {
  // By their ids.
  template <typename F>
  using Hooks = std::map<int64_t, std::shared_ptr<const F>>;

 public:
  using FailureHook = std::function<void()>;
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  using TimePoint = std::chrono::steady_clock::time_point;

  // A failure of the group whose hooks are still to be called.
  struct News {
    std::shared_ptr<Group> group;
    Hooks<FailureHook> hooks;
  };

  void on_completion(Hook hook) {
    auto behind = std::make_shared<const Hook>(std::move(hook));
    std::lock_guard<std::mutex> lock(mutex_);
    hook_.swap(behind);
  }

  void began() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++in_flight_;
  }

  // Tells the hook, then those who wait for works. `info` is made only if there is a hook.
  template <typename Info>
  void ended(Info&& info) {
    const auto hook = [this] {
      std::lock_guard<std::mutex> lock(mutex_);
      return hook_;
    }();
    try {
      if (hook) (*hook)(info());
    } catch (const std::exception& error) {
      TORCH_WARN("ncclx_rs: the completion hook failed: ", text_of(error));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (--in_flight_ == 0) all_ended_.notify_all();
  }

  void wait_for_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_ended_.wait(lock, [this] { return in_flight_ == 0; });
  }

  // Remembers failures after which the group may not work any more; the first one stays. What comes back is to be given to
  // `tell` once the error stands where it is looked for: hooks may take their time.
  std::unique_ptr<News> note(int32_t status) {
    using c10d::ErrorType;
    const ErrorType error = status == NCCLX_TIMEOUT  ? ErrorType::TIMEOUT
                            : status == NCCLX_REMOTE ? ErrorType::REMOTE_ERROR
                            : status == NCCLX_LOST   ? ErrorType::COMM_ERROR
                                                     : ErrorType::SUCCESS;
    std::lock_guard<std::mutex> lock(mutex_);
    if (paused_ || error == ErrorType::SUCCESS || error_ != ErrorType::SUCCESS) return nullptr;
    error_ = error;
    if (failure_hooks_.empty()) return nullptr;
    ++telling_;
    return std::make_unique<News>(shared_from_this(), failure_hooks_);
  }

  // Has the hooks called, on the thread for callbacks.
  static void tell(const NcclxEngine* engine, std::unique_ptr<News> news) {
    const auto job = [](void* context) {
      const std::unique_ptr<News> news(static_cast<News*>(context));
      news->group->call(news->hooks);
    };
    if (news) engine->call_elsewhere(job, news.release());
  }

  // How long works and hooks, which cannot end when the interpreter has, are waited for from now on.
  static TimePoint patience() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

  // Waits a while for failure hooks to end. A hook waits for none.
  void wait_for_hooks(TimePoint until = patience()) {
    std::unique_lock<std::mutex> lock(mutex_);
    all_ended_.wait_until(lock, until, [this] { return is_told(); });
  }

  // The same for works.
  void wait_for_works(TimePoint until) {
    std::unique_lock<std::mutex> lock(mutex_);
    all_ended_.wait_until(lock, until, [this] { return in_flight_ == 0; });
  }

  // The same for both.
  void settle(TimePoint until = patience()) {
    wait_for_works(until);
    wait_for_hooks(until);
  }

  void on_failure(int64_t id, FailureHook hook) {
    auto behind = std::make_shared<const FailureHook>(std::move(hook));
    std::lock_guard<std::mutex> lock(mutex_);
    failure_hooks_[id].swap(behind);
  }

  void forget_failure_hook(int64_t id) {
    std::shared_ptr<const FailureHook> hook;
    std::lock_guard<std::mutex> lock(mutex_);
    hook.swap(failure_hooks_[id]);
    failure_hooks_.erase(id);
  }

#if NCCLX_TORCH_GE(2, 15)
  void on_success(int64_t id, c10d::CompletionHook hook) {
    auto behind = std::make_shared<const c10d::CompletionHook>(std::move(hook));
    change_success_hooks([&](SuccessHooks& hooks) { hooks[id] = std::move(behind); });
  }

  void forget_success_hook(int64_t id) {
    change_success_hooks([&](SuccessHooks& hooks) { hooks.erase(id); });
  }

  // Tells of an operation that ended well.
  void succeeded(uint64_t key, std::chrono::steady_clock::duration duration) {
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

  // This rank leaves: what ends from now on is no failure of the group.
  void leave() {
    Hooks<FailureHook> hooks;
    std::lock_guard<std::mutex> lock(mutex_);
    hooks.swap(failure_hooks_);
  }

  // Between two generations of members nothing is a failure of the group.
  void pause() {
    std::lock_guard<std::mutex> lock(mutex_);
    paused_ = true;
    ++generation_;
  }

  uint64_t generation() {
    std::lock_guard<std::mutex> lock(mutex_);
    return generation_;
  }

  // Notes what befell the members of a generation, unless they are the members no more.
  std::unique_ptr<News> note_of(uint64_t generation, int32_t status) {
    return generation == this->generation() ? note(status) : nullptr;
  }

  void resume() {
    std::lock_guard<std::mutex> lock(mutex_);
    paused_ = false;
    error_ = c10d::ErrorType::SUCCESS;
  }

  c10d::ErrorType error() const { return error_; }

  // What the group runs on now.
  void runs_on(const std::shared_ptr<Communicator>& comm) {
    std::lock_guard<std::mutex> lock(mutex_);
    comm_ = comm;
  }

  std::shared_ptr<Communicator> comm() {
    std::lock_guard<std::mutex> lock(mutex_);
    return comm_.lock();
  }

 private:
  // This thread is calling the failure hooks of a group.
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
    --telling_;
    all_ended_.notify_all();
  }

  // Who waits for hooks in one may be what those wait for, also of another group.
  bool is_told() const { return in_hook_ || telling_ == 0; }

#if NCCLX_TORCH_GE(2, 15)
  using SuccessHooks = Hooks<c10d::CompletionHook>;

  template <typename Change>
  void change_success_hooks(Change&& change) {
    std::shared_ptr<const SuccessHooks> before;  // lives longer than the lock
    std::lock_guard<std::mutex> lock(mutex_);
    auto hooks = std::make_shared<SuccessHooks>(*success_hooks_);
    change(*hooks);
    before = std::exchange(success_hooks_, std::move(hooks));
  }
#endif

  std::mutex mutex_;
  std::condition_variable all_ended_;
  size_t in_flight_ = 0;
  size_t telling_ = 0;  // failures whose hooks have not ended
  bool paused_ = false;
  uint64_t generation_ = 0;
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::shared_ptr<const Hook> hook_;
  Hooks<FailureHook> failure_hooks_;
  std::weak_ptr<Communicator> comm_;
#if NCCLX_TORCH_GE(2, 15)
  // Never changed but replaced, so that each operation need not copy it.
  std::shared_ptr<const SuccessHooks> success_hooks_ = std::make_shared<SuccessHooks>();
#endif
};

// The groups of this process, for its end. They are not found by what Python has of them: PyTorch keeps their backends in
// C++, and what it splits off has never been in Python.
class Groups {
 public:
  static std::shared_ptr<Group> make() {
    auto group = std::make_shared<Group>();
    Groups& all = of_process();
    std::lock_guard<std::mutex> lock(all.mutex_);
    std::erase_if(all.groups_, [](const auto& known) { return known.expired(); });
    all.groups_.push_back(group);
    return group;
  }

  static std::vector<std::shared_ptr<Group>> alive() {
    std::vector<std::shared_ptr<Group>> found;
    Groups& all = of_process();
    std::lock_guard<std::mutex> lock(all.mutex_);
    for (const auto& known : all.groups_) {
      if (auto group = known.lock()) found.push_back(std::move(group));
    }
    return found;
  }

 private:
  static Groups& of_process() {
    static Groups* const all = [] {
      // A forked child leaves its parent's alone, and finds the lock free.
      pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                     [] {
                       of_process().groups_.clear();
                       of_process().mutex_.unlock();
                     });
      return new Groups;  // also for what ends after static objects
    }();
    return *all;
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<Group>> groups_;
};

}  // namespace ncclx
