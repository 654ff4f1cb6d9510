#include "autellix/layout.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace autellix {
namespace {

constexpr std::size_t kMax = std::numeric_limits<std::size_t>::max();

std::uintptr_t end_of(const Segment& segment, std::int64_t block_count) {
  return segment.base + segment.stride * static_cast<std::size_t>(block_count - 1) + segment.bytes;
}

void check_segment(const Segment& segment, std::size_t index, std::int64_t block_count) {
  const std::string name = "segment " + std::to_string(index);
  if (segment.base == 0 || segment.bytes == 0) {
    throw std::invalid_argument(name + " has no address or no bytes");
  }
  if (segment.bytes > segment.stride) {
    throw std::invalid_argument(name + " has pieces of " + std::to_string(segment.bytes) +
                                " bytes that are longer than its stride of " +
                                std::to_string(segment.stride));
  }
  const auto steps = static_cast<std::size_t>(block_count - 1);
  if ((steps != 0 && segment.stride > (kMax - segment.bytes) / steps) ||
      segment.base > kMax - (segment.stride * steps + segment.bytes)) {
    throw std::invalid_argument(name + " ends beyond the address space");
  }
}

/// Whether pieces of `a` and `b`, whose whole ranges overlap and a.base <= b.base, share bytes.
bool share_bytes(const Segment& a, const Segment& b) {
  if (a.stride != b.stride) {
    return true;  // no cache is laid out like this: refuse rather than solve it
  }
  const std::size_t shift = (b.base - a.base) % a.stride;
  return shift < a.bytes || shift + b.bytes > a.stride;
}

void check_ids(const char* what, const std::vector<std::int64_t>& ids, std::int64_t count) {
  for (const std::int64_t id : ids) {
    if (id < 0 || id >= count) {
      throw std::out_of_range(std::string(what) + " id " + std::to_string(id) + " is not in 0.." +
                              std::to_string(count - 1));
    }
  }
}

void check_distinct(const char* what, std::vector<std::int64_t> ids) {
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice != ids.end()) {
    throw std::invalid_argument(std::string(what) + " id " + std::to_string(*twice) +
                                " is written twice");
  }
}

}  // namespace

Layout::Layout(std::vector<Segment> segments, std::int64_t block_count)
    : segments_(std::move(segments)), block_count_(block_count) {
  if (block_count < 1) {
    throw std::invalid_argument("a cache has at least one block, not " +
                                std::to_string(block_count));
  }
  if (segments_.empty() || segments_.size() > kSegmentsMax) {
    throw std::invalid_argument("a block has 1.." + std::to_string(kSegmentsMax) +
                                " segments, not " + std::to_string(segments_.size()));
  }
  offsets_.reserve(segments_.size() + 1);
  offsets_.push_back(0);
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    check_segment(segments_[i], i, block_count);
    if (offsets_.back() > kMax - segments_[i].bytes) {
      throw std::invalid_argument("a block is larger than the address space");
    }
    offsets_.push_back(offsets_.back() + segments_[i].bytes);
  }
  std::vector<Segment> sorted = segments_;
  std::sort(sorted.begin(), sorted.end(),
            [](const Segment& a, const Segment& b) { return a.base < b.base; });
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const std::uintptr_t end = end_of(sorted[i], block_count);
    for (std::size_t j = i + 1; j < sorted.size() && sorted[j].base < end; ++j) {
      if (share_bytes(sorted[i], sorted[j])) {
        throw std::invalid_argument("two segments share bytes");
      }
    }
  }
}

void Layout::check(const std::vector<std::int64_t>& block_ids,
                   const std::vector<std::int64_t>& slot_ids, const HostRegion& host,
                   Direction direction) const {
  if (block_ids.size() != slot_ids.size()) {
    throw std::invalid_argument(std::to_string(block_ids.size()) + " blocks for " +
                                std::to_string(slot_ids.size()) + " slots");
  }
  if (host.base == 0 || host.base > kMax - host.bytes) {
    throw std::invalid_argument("the host region has no address or ends beyond memory");
  }
  const std::size_t slots = host.bytes / slot_bytes();
  check_ids("block", block_ids, block_count_);
  check_ids("slot", slot_ids, static_cast<std::int64_t>(slots));
  if (direction == Direction::kGather) {
    check_distinct("slot", slot_ids);
  } else {
    check_distinct("block", block_ids);
  }
  for (const Segment& segment : segments_) {
    if (segment.base < host.base + host.bytes && host.base < end_of(segment, block_count_)) {
      throw std::invalid_argument("the host region overlaps the cache");
    }
  }
}

}  // namespace autellix
