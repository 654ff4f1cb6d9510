// A bounded set of worker threads that lives as long as its owner and survives a fork.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>

namespace autellix {

/// Runs independent tasks on a fixed number of threads, the caller's among them.
///
/// One job runs at a time; a second caller waits. After a fork the child has none of the
/// parent's threads and perhaps its locks: the child abandons both and starts its own.
class ThreadPool {
 public:
  static constexpr int kThreadsMax = 64;

  /// Throws std::invalid_argument unless 1 <= thread_count <= kThreadsMax.
  explicit ThreadPool(int thread_count);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int thread_count() const { return thread_count_; }

  /// Call task(0) … task(task_count - 1), each once, and return when all have returned.
  /// Rethrows the first exception of a task after the others have ended.
  void run(std::size_t task_count, const std::function<void(std::size_t)>& task);

 private:
  struct Crew;
  Crew* crew_of_this_process();

  const int thread_count_;
  std::atomic<Crew*> crew_;
};

}  // namespace autellix
