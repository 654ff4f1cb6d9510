#include "autellix/host_copy.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AUTELLIX_STREAMING 1
#else
#define AUTELLIX_STREAMING 0
#endif

namespace autellix {
namespace {

// Waking a thread costs some 10 µs, as much as copying about 100 KiB.
constexpr std::size_t kInlineBytes = 256 << 10;
constexpr std::size_t kTasksPerThread = 4;
// Above this the bytes leave the caches anyway: stores that go past them save reading the target.
// glibc's memcpy does the same, but looks at one piece, and ours are small parts of a whole.
constexpr std::size_t kStreamingBytes = 48 << 20;

using CopyPiece = void (*)(char* target, const char* source, std::size_t bytes);

void copy_cached(char* target, const char* source, std::size_t bytes) {
  std::memcpy(target, source, bytes);
}

#if AUTELLIX_STREAMING
constexpr std::size_t kVector = 32;
constexpr std::size_t kLines = 4 * kVector;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kPages = 4;  // read at once: more open memory pages, more bandwidth

__attribute__((target("avx2"))) inline void stream_lines(char* target, const char* source) {
  _mm_prefetch(source + 512, _MM_HINT_T0);
  _mm_prefetch(source + 576, _MM_HINT_T0);
  const auto* from = reinterpret_cast<const __m256i*>(source);
  auto* to = reinterpret_cast<__m256i*>(target);
  const __m256i a = _mm256_loadu_si256(from);
  const __m256i b = _mm256_loadu_si256(from + 1);
  const __m256i c = _mm256_loadu_si256(from + 2);
  const __m256i d = _mm256_loadu_si256(from + 3);
  _mm256_stream_si256(to, a);
  _mm256_stream_si256(to + 1, b);
  _mm256_stream_si256(to + 2, c);
  _mm256_stream_si256(to + 3, d);
}

__attribute__((target("avx2"))) void copy_streaming(char* target, const char* source,
                                                    std::size_t bytes) {
  const std::size_t head =
      std::min(bytes, (kVector - reinterpret_cast<std::uintptr_t>(target) % kVector) % kVector);
  std::memcpy(target, source, head);
  std::size_t at = head;
  for (; at + kPages * kPage <= bytes; at += kPages * kPage) {
    for (std::size_t line = 0; line < kPage; line += kLines) {
      for (std::size_t page = 0; page < kPages; ++page) {
        const std::size_t offset = at + page * kPage + line;
        stream_lines(target + offset, source + offset);
      }
    }
  }
  for (; at + kLines <= bytes; at += kLines) {
    stream_lines(target + at, source + at);
  }
  std::memcpy(target + at, source + at, bytes - at);
}
#endif

CopyPiece choose_copy(std::size_t total_bytes) {
#if AUTELLIX_STREAMING
  if (total_bytes >= kStreamingBytes && __builtin_cpu_supports("avx2")) {
    return copy_streaming;
  }
#else
  (void)total_bytes;
#endif
  return copy_cached;
}

void end_streaming() {
#if AUTELLIX_STREAMING
  _mm_sfence();  // streaming stores are weakly ordered: make them visible before the task ends
#endif
}

/// Split 0..total into equal spans and run them; small work stays on the caller's thread.
template <typename Span>
void for_spans(ThreadPool& pool, std::size_t total, const Span& span) {
  const auto threads = static_cast<std::size_t>(pool.thread_count());
  const std::size_t tasks = total <= kInlineBytes || threads == 1 ? 1 : threads * kTasksPerThread;
  pool.run(tasks, [&](std::size_t task) {
    const std::size_t step = (total + tasks - 1) / tasks;
    const std::size_t begin = std::min(total, task * step);
    const std::size_t end = std::min(total, begin + step);
    if (begin < end) {
      span(begin, end);
    }
  });
}

template <Direction direction>
std::size_t move(const Layout& layout, ThreadPool& pool, const std::vector<std::int64_t>& block_ids,
                 const HostRegion& host, const std::vector<std::int64_t>& slot_ids) {
  layout.check(block_ids, slot_ids, host, direction);
  const std::size_t slot_bytes = layout.slot_bytes();
  const std::size_t total = slot_bytes * block_ids.size();
  const CopyPiece copy = choose_copy(total);
  const auto& segments = layout.segments();
  const auto& offsets = layout.offsets();
  for_spans(pool, total, [&](std::size_t begin, std::size_t end) {
    std::size_t index = begin / slot_bytes;
    std::size_t in_slot = begin % slot_bytes;
    auto found = std::upper_bound(offsets.begin(), offsets.end(), in_slot);
    auto piece = static_cast<std::size_t>(found - offsets.begin()) - 1;
    for (std::size_t at = begin; at < end;) {
      const Segment& segment = segments[piece];
      const std::size_t in_piece = in_slot - offsets[piece];
      const std::size_t bytes = std::min(segment.bytes - in_piece, end - at);
      const auto block = static_cast<std::size_t>(block_ids[index]);
      const auto slot = static_cast<std::size_t>(slot_ids[index]);
      auto* cache = reinterpret_cast<char*>(segment.base + block * segment.stride + in_piece);
      auto* stored = reinterpret_cast<char*>(host.base + slot * slot_bytes + in_slot);
      if constexpr (direction == Direction::kGather) {
        copy(stored, cache, bytes);
      } else {
        copy(cache, stored, bytes);
      }
      at += bytes;
      in_slot += bytes;
      if (in_slot == offsets[piece + 1] && ++piece == segments.size()) {
        piece = 0;
        in_slot = 0;
        ++index;
      }
    }
    end_streaming();
  });
  return total;
}

}  // namespace

std::size_t gather(const Layout& layout, ThreadPool& pool,
                   const std::vector<std::int64_t>& block_ids, const HostRegion& host,
                   const std::vector<std::int64_t>& slot_ids) {
  return move<Direction::kGather>(layout, pool, block_ids, host, slot_ids);
}

std::size_t scatter(const Layout& layout, ThreadPool& pool,
                    const std::vector<std::int64_t>& block_ids, const HostRegion& host,
                    const std::vector<std::int64_t>& slot_ids) {
  return move<Direction::kScatter>(layout, pool, block_ids, host, slot_ids);
}

void copy_contiguous(ThreadPool& pool, void* target, const void* source, std::size_t bytes) {
  for_spans(pool, bytes, [&](std::size_t begin, std::size_t end) {
    std::memcpy(static_cast<char*>(target) + begin, static_cast<const char*>(source) + begin,
                end - begin);
  });
}

}  // namespace autellix
