// Gather then scatter is the identity, and nothing moves when an argument is wrong.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>

#include "autellix/host_buffer.hpp"
#include "autellix/host_copy.hpp"
#include "check.hpp"

namespace {

using autellix::Layout;
using autellix::Segment;
using Ids = std::vector<std::int64_t>;

std::uintptr_t at(std::vector<char>& bytes, std::size_t offset = 0) {
  return reinterpret_cast<std::uintptr_t>(bytes.data()) + offset;
}

void fill(std::vector<char>& bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min(sizeof word, bytes.size() - at));
  }
}

bool same(const std::vector<std::vector<char>>& a, const std::vector<std::vector<char>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size()) == 0;
  });
}

void round_trip(std::size_t piece, std::size_t stride, std::size_t layers, std::int64_t blocks,
                int threads) {
  std::vector<std::vector<char>> caches;
  std::vector<Segment> segments;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    caches.emplace_back(stride * static_cast<std::size_t>(blocks));
    fill(caches.back(), static_cast<unsigned>(layer));
    segments.push_back({at(caches.back()), stride, piece});
  }
  const Layout layout(segments, blocks);
  autellix::ThreadPool pool(threads);
  const auto before = caches;
  const std::int64_t count = blocks / 2;
  Ids ids(static_cast<std::size_t>(blocks));
  std::iota(ids.begin(), ids.end(), 0);
  std::mt19937 random(7);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(static_cast<std::size_t>(count));
  Ids slots(ids.size());
  std::iota(slots.rbegin(), slots.rend(), 1);
  const autellix::HostBuffer host(layout.slot_bytes() * static_cast<std::size_t>(count + 1), false);

  CHECK(autellix::gather(layout, pool, ids, host.region(), slots) ==
        layout.slot_bytes() * ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    for (std::size_t layer = 0; layer < layers; ++layer) {
      char* piece_at = caches[layer].data() + static_cast<std::size_t>(ids[i]) * stride;
      CHECK(std::memcmp(piece_at,
                        host.data() + static_cast<std::size_t>(slots[i]) * layout.slot_bytes() +
                            layer * piece,
                        piece) == 0);
      std::memset(piece_at, 0x5a, piece);
    }
  }
  autellix::scatter(layout, pool, ids, host.region(), slots);
  CHECK(same(caches, before));  // the moved blocks are back and no other byte changed
}

void wrong_arguments() {
  std::vector<char> cache(8 * 64);
  fill(cache, 1);
  const auto before = cache;
  const Layout layout({{at(cache), 64, 64}}, 8);
  autellix::ThreadPool pool(2);
  const autellix::HostBuffer host(4 * 64, true);
  const auto region = host.region();
  CHECK_THROWS(std::out_of_range, autellix::gather(layout, pool, {8}, region, {0}));
  CHECK_THROWS(std::out_of_range, autellix::gather(layout, pool, {-1}, region, {0}));
  CHECK_THROWS(std::out_of_range, autellix::scatter(layout, pool, {0}, region, {4}));
  CHECK_THROWS(std::out_of_range, autellix::gather(layout, pool, {0}, region, {-1}));
  CHECK_THROWS(std::invalid_argument, autellix::gather(layout, pool, {0, 1}, region, {0}));
  CHECK_THROWS(std::invalid_argument, autellix::gather(layout, pool, {0, 1}, region, {2, 2}));
  CHECK_THROWS(std::invalid_argument, autellix::scatter(layout, pool, {3, 3}, region, {0, 1}));
  CHECK_THROWS(std::invalid_argument,
               autellix::gather(layout, pool, {0}, {at(cache, 64), 64}, {0}));
  CHECK(autellix::gather(layout, pool, {}, region, {}) == 0);
  CHECK(cache == before);
  CHECK(std::all_of(host.data(), host.data() + host.bytes(), [](char c) { return c == 0; }));
}

void wrong_layouts() {
  std::vector<char> cache(1024);
  const auto base = at(cache);
  CHECK_THROWS(std::invalid_argument, Layout({}, 1));
  CHECK_THROWS(std::invalid_argument, Layout({{base, 64, 64}}, 0));
  CHECK_THROWS(std::invalid_argument, Layout({{0, 64, 64}}, 1));
  CHECK_THROWS(std::invalid_argument, Layout({{base, 64, 0}}, 1));
  CHECK_THROWS(std::invalid_argument, Layout({{base, 64, 65}}, 1));
  CHECK_THROWS(std::invalid_argument, Layout({{base, SIZE_MAX / 2, 64}}, 4));
  CHECK_THROWS(std::invalid_argument, Layout({{base, 64, 64}, {base + 32, 64, 64}}, 4));
  CHECK_THROWS(std::invalid_argument, Layout({{base, 64, 32}, {base + 32, 96, 32}}, 4));
  CHECK(Layout({{base, 64, 32}, {base + 32, 64, 32}}, 4).slot_bytes() == 64);  // interleaved
  CHECK_THROWS(std::invalid_argument, autellix::HostBuffer(0, false));
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 5}) {
    round_trip(1, 1, 1, 2, threads);
    round_trip(24, 40, 3, 9, threads);
    round_trip(4000, 4111, 30, 64, threads);
  }
  for (const int threads : {1, 2}) {  // large enough for streaming stores
    round_trip(1 << 20, 1 << 20, 4, 30, threads);
    round_trip((1 << 20) + 77, (1 << 20) + 777, 4, 30, threads);  // the same, nothing aligned
    round_trip(5000, 5001, 30, 700, threads);
  }
  wrong_arguments();
  wrong_layouts();
  return 0;
}
