#include "queue.h"

#include <pthread.h>

#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "call.h"
#include "context.h"
#include "faults.h"
#include "log.h"
#include "memory.h"
#include "settings.h"

namespace softcuda {

namespace {

thread_local Running now{nullptr, nullptr, nullptr};

std::mutex& waiting_mutex() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

std::condition_variable& something_done() {
  static std::condition_variable* const condition = new std::condition_variable;
  return *condition;
}

std::atomic<int> waiters{0};
std::atomic<uint64_t> long_wait_count{0};

// Says once that a wait has become a long one.
class LongWait {
 public:
  void check(const std::function<std::string()>& what) {
    const auto waited = std::chrono::steady_clock::now() - start_;
    if (told_ || waited < std::chrono::milliseconds(settings().warn_after_ms)) return;
    told_ = true;
    say("%s has waited for %s", maker_of_this().c_str(), what().c_str());
    ++long_wait_count;
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  bool told_ = false;
};

}  // namespace

const Running& running() { return now; }

const char* describe_running() {
  static thread_local char text[128];
  if (!now.operation) return "a call of the host";
  snprintf(text, sizeof text, "%s on stream %lu of device %d", now.operation->call, now.progress->stream,
           now.progress->device);
  return text;
}

std::shared_ptr<Queue> Queue::create() { return std::make_shared<Queue>(); }

void Queue::push(Operation operation, std::shared_ptr<Progress> progress) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_.push_back({std::move(operation), std::move(progress)});
  if (!started_) {
    started_ = true;
    // The thread holds its queue, so that it may outlive the stream.
    std::thread(serve, shared_from_this()).detach();
  }
  changed_.notify_one();
}

void Queue::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_one();
}

void Queue::serve(std::shared_ptr<Queue> queue) {
  pthread_setname_np(pthread_self(), "softcuda-queue");
  std::unique_lock<std::mutex> lock(queue->mutex_);
  for (;;) {
    queue->changed_.wait(lock, [&] { return !queue->entries_.empty() || queue->closed_; });
    if (queue->entries_.empty()) return;
    Entry entry = std::move(queue->entries_.front());
    queue->entries_.pop_front();
    lock.unlock();
    execute(entry);
    lock.lock();
  }
}

void Queue::execute(Entry& entry) {
  Progress& progress = *entry.progress;
  work_on(progress.device);
  count_operation(progress.device);
  if (!sticky_error(progress.device)) {
    const Delay delay(entry.operation.type, progress.stream, progress.done);
    now = {&entry.operation, &progress, &delay};
    delay.before();
    entry.operation.run();
    delay.after();
    now = {nullptr, nullptr, nullptr};
  }
  // What the operation holds goes first: whoever sees it done may look for that.
  entry.operation.run = nullptr;
  ++progress.done;
  notify_waiters();
}

std::shared_ptr<Queue> queue_for(uint64_t stream) {
  const unsigned shared = settings().queues;
  if (!shared) return Queue::create();
  static auto* const queues = new std::vector<std::shared_ptr<Queue>>;
  Lock lock(state());
  while (queues->size() < shared) queues->push_back(Queue::create());
  return (*queues)[stream % shared];
}

void notify_waiters() {
  if (!waiters) return;
  std::lock_guard<std::mutex> lock(waiting_mutex());
  something_done().notify_all();
}

uint64_t long_waits() { return long_wait_count; }

bool wait_until(int device, const std::function<bool()>& ready, const std::function<std::string()>& what) {
  for (int tries = 0; tries < 20; ++tries) {
    if (ready()) return true;
    std::this_thread::yield();
  }
  auto nap = std::chrono::microseconds(20);
  LongWait wait;
  ++waiters;
  std::unique_lock<std::mutex> lock(waiting_mutex());
  bool is_ready;
  while (!(is_ready = ready()) && !sticky_error(device)) {
    something_done().wait_for(lock, nap);
    wait.check(what);
    if (nap < std::chrono::microseconds(500)) nap += nap / 2;
  }
  --waiters;
  return is_ready;
}

}  // namespace softcuda
