// Every task runs once, whoever calls, whatever fails, and in the child of a fork too.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "autellix/host_copy.hpp"
#include "autellix/thread_pool.hpp"
#include "check.hpp"

namespace {

void each_task_runs_once() {
  autellix::ThreadPool pool(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<int> runs(static_cast<std::size_t>(round % 37 + 1), 0);
    pool.run(runs.size(), [&](std::size_t i) { ++runs[i]; });
    for (const int count : runs) {
      CHECK(count == 1);
    }
  }
  pool.run(0, [](std::size_t) { CHECK(false); });
}

void callers_share_one_pool() {
  autellix::ThreadPool pool(3);
  std::atomic<int> total{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        pool.run(8, [&](std::size_t) { total.fetch_add(1); });
      }
    });
  }
  for (auto& caller : callers) {
    caller.join();
  }
  CHECK(total == 4 * 50 * 8);
}

void a_failed_task_is_reported_and_the_pool_lives_on() {
  autellix::ThreadPool pool(2);
  CHECK_THROWS(std::runtime_error, pool.run(16, [](std::size_t i) {
    if (i == 9) {
      throw std::runtime_error("nine");
    }
  }));
  std::atomic<int> total{0};
  pool.run(16, [&](std::size_t) { total.fetch_add(1); });
  CHECK(total == 16);
  CHECK_THROWS(std::invalid_argument, autellix::ThreadPool(0));
  CHECK_THROWS(std::invalid_argument, autellix::ThreadPool(autellix::ThreadPool::kThreadsMax + 1));
}

void copies_are_ordered_before_the_return() {
  constexpr std::size_t kPiece = 64 << 10;
  constexpr std::int64_t kBlocks = 64;
  std::vector<char> cache(kPiece * kBlocks, 'c');
  std::vector<char> slots(kPiece * kBlocks, 's');
  const autellix::Layout layout({{reinterpret_cast<std::uintptr_t>(cache.data()), kPiece, kPiece}},
                                kBlocks);
  const autellix::HostRegion host{reinterpret_cast<std::uintptr_t>(slots.data()), slots.size()};
  autellix::ThreadPool pool(4);
  std::vector<std::int64_t> ids;
  for (std::int64_t id = 0; id < kBlocks; ++id) {
    ids.push_back(id);
  }
  for (int round = 0; round < 10; ++round) {
    autellix::gather(layout, pool, ids, host, ids);
    CHECK(slots == cache);
    slots.assign(slots.size(), static_cast<char>(round));
    autellix::scatter(layout, pool, ids, host, ids);
    CHECK(slots == cache);
  }
}

#ifndef AUTELLIX_TSAN  // the thread sanitizer forbids threads in the child of a fork
void a_forked_child_has_its_own_threads() {
  autellix::ThreadPool pool(3);
  std::atomic<int> total{0};
  pool.run(8, [&](std::size_t) { total.fetch_add(1); });
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    pool.run(8, [&](std::size_t) { total.fetch_add(1); });
    ::_exit(total == 16 ? 0 : 1);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  pool.run(8, [&](std::size_t) { total.fetch_add(1); });
  CHECK(total == 16);
}
#endif

}  // namespace

int main() {
  each_task_runs_once();
  callers_share_one_pool();
  a_failed_task_is_reported_and_the_pool_lives_on();
  copies_are_ordered_before_the_return();
#ifndef AUTELLIX_TSAN
  a_forked_child_has_its_own_threads();
#endif
  return 0;
}
