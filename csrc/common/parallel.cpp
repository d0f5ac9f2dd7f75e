#include "common/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/parallel_beside.h"

namespace torchrec_hkv {
namespace {

// One call of parallel_for. A counter hands out ranges.
struct Job {
  const std::function<void(int64_t, int64_t)>* body;
  int64_t n;
  int64_t chunk;
  std::atomic<int64_t> next{0};
  int helpers_wanted = 0;   // guarded by the pool's mutex
  int helpers_running = 0;  // guarded by the pool's mutex
  std::mutex error_mutex;
  std::exception_ptr error;

  void run() {
    for (;;) {
      const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= n) return;
      try {
        (*body)(begin, std::min(n, begin + chunk));
      } catch (...) {  // carried to the caller, who throws it again
        std::lock_guard<std::mutex> guard(error_mutex);
        if (!error) error = std::current_exception();
        next.store(n, std::memory_order_relaxed);
      }
    }
  }
};

class ThreadPool {
 public:
  // One call at a time uses the helpers; other calls run alone.
  void run(Job& job, int threads) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (job_ == nullptr) {
      while (static_cast<int>(workers_.size()) < threads - 1) {
        workers_.emplace_back([this] { work(); });
      }
      job.helpers_wanted = threads - 1;
      job_ = &job;
      wake_.notify_all();
    }
    lock.unlock();
    job.run();
    lock.lock();
    if (job_ == &job) job_ = nullptr;
    done_.wait(lock, [&] { return job.helpers_running == 0; });
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return job_ != nullptr && job_->helpers_wanted > 0; });
      Job& job = *job_;
      --job.helpers_wanted;
      ++job.helpers_running;
      lock.unlock();
      job.run();
      lock.lock();
      if (--job.helpers_running == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  std::vector<std::thread> workers_;
};

ThreadPool& pool() {
  // Never destroyed: its threads wait forever. After a fork the parent's threads do not exist in
  // the child, so the child creates a new pool.
  static std::mutex mutex;
  static ThreadPool* current = nullptr;
  static pid_t owner = 0;
  std::lock_guard<std::mutex> guard(mutex);
  if (current == nullptr || owner != getpid()) {
    current = new ThreadPool;
    owner = getpid();
  }
  return *current;
}

struct RunnerOfProcess {
  std::atomic<Runner> run = nullptr;
  std::atomic<pid_t> process = 0;
};
RunnerOfProcess given;

}  // namespace

void run_on(Runner runner) {
  given.process.store(getpid());
  given.run.store(runner);
}

namespace {

void run_ranges(int64_t n, int64_t grain, int threads, bool concurrent,
                const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t ranges = (n + grain - 1) / grain;
  threads = static_cast<int>(std::min<int64_t>(threads, ranges));
  if (threads <= 1) {
    body(0, n);
    return;
  }
  Job job;
  job.body = &body;
  job.n = n;
  // A few ranges for each thread balance unequal work.
  job.chunk = std::max(grain, (n + threads * 4 - 1) / (threads * 4));
  const Runner run = concurrent ? nullptr : given.run.load();
  if (run != nullptr && given.process.load() == getpid()) {
    run(threads, [&job] { job.run(); });
  } else {
    pool().run(job, threads);
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace

void parallel_for(int64_t n, int64_t grain, int threads,
                  const std::function<void(int64_t, int64_t)>& body) {
  run_ranges(n, grain, threads, /*concurrent=*/false, body);
}

void parallel_for_beside(int64_t n, int64_t grain, int threads,
                         const std::function<void(int64_t, int64_t)>& body) {
  run_ranges(n, grain, threads, /*concurrent=*/true, body);
}

}  // namespace torchrec_hkv
