#include "autellix/thread_pool.hpp"

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace autellix {

/// The threads and locks of one process. Never used, joined or freed in another.
struct ThreadPool::Crew {
  explicit Crew(int worker_count) : pid(::getpid()) {
    try {
      for (int i = 0; i < worker_count; ++i) {
        workers.emplace_back([this] { work(); });
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(state);
      stopping = true;
    }
    wake.notify_all();
    for (auto& worker : workers) {
      worker.join();
    }
  }

  void work() {
    std::uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(state);
        wake.wait(lock, [&] { return stopping || job != seen; });
        if (stopping) {
          return;
        }
        seen = job;
      }
      drain();
      {
        const std::lock_guard<std::mutex> lock(state);
        if (--busy == 0) {
          done.notify_one();
        }
      }
    }
  }

  void drain() {
    for (;;) {
      const std::size_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) {
        return;
      }
      try {
        (*task)(index);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(state);
        if (!error) {
          error = std::current_exception();
        }
      }
    }
  }

  void run(std::size_t task_count, const std::function<void(std::size_t)>& work_item) {
    const std::lock_guard<std::mutex> one_job(callers);
    {
      const std::lock_guard<std::mutex> lock(state);
      task = &work_item;
      count = task_count;
      next.store(0, std::memory_order_relaxed);
      busy = workers.size();
      error = nullptr;
      ++job;
    }
    wake.notify_all();
    drain();
    std::exception_ptr failed;
    {
      std::unique_lock<std::mutex> lock(state);
      done.wait(lock, [&] { return busy == 0; });
      failed = error;
    }
    if (failed) {
      std::rethrow_exception(failed);
    }
  }

  const pid_t pid;
  std::mutex callers;  // held for a whole job
  std::mutex state;    // guards all below but `next`
  std::condition_variable wake;
  std::condition_variable done;
  std::vector<std::thread> workers;
  const std::function<void(std::size_t)>* task = nullptr;
  std::size_t count = 0;
  std::size_t busy = 0;
  std::uint64_t job = 0;
  bool stopping = false;
  std::exception_ptr error;
  std::atomic<std::size_t> next{0};
};

ThreadPool::ThreadPool(int thread_count) : thread_count_(thread_count), crew_(nullptr) {
  if (thread_count < 1 || thread_count > kThreadsMax) {
    throw std::invalid_argument("thread count " + std::to_string(thread_count) + " is not in 1.." +
                                std::to_string(kThreadsMax));
  }
}

ThreadPool::~ThreadPool() {
  Crew* crew = crew_.load();
  if (crew != nullptr && crew->pid == ::getpid()) {
    crew->stop();
    delete crew;
  }
  // Another process's crew is abandoned on purpose: its threads are not here to be joined.
}

ThreadPool::Crew* ThreadPool::crew_of_this_process() {
  Crew* crew = crew_.load();
  if (crew != nullptr && crew->pid == ::getpid()) {
    return crew;
  }
  auto fresh = std::make_unique<Crew>(thread_count_ - 1);
  if (crew_.compare_exchange_strong(crew, fresh.get())) {
    return fresh.release();
  }
  fresh->stop();  // another caller was faster
  return crew;
}

void ThreadPool::run(std::size_t task_count, const std::function<void(std::size_t)>& task) {
  if (task_count == 0) {
    return;
  }
  if (thread_count_ == 1 || task_count == 1) {
    for (std::size_t i = 0; i < task_count; ++i) {
      task(i);
    }
    return;
  }
  crew_of_this_process()->run(task_count, task);
}

}  // namespace autellix
