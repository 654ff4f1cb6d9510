// Where the bytes of a KV block lie in a paged cache, and the checks before any byte moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace autellix {

/// One contiguous piece of every block: block b's piece is `bytes` long at base + b * stride.
///
/// A layer of most layouts is one segment; one whose keys and values lie apart is two.
struct Segment {
  std::uintptr_t base;
  std::size_t stride;
  std::size_t bytes;
};

/// Host memory that holds slots, each the size of one block of all layers.
struct HostRegion {
  std::uintptr_t base;
  std::size_t bytes;
};

enum class Direction { kGather, kScatter };

/// The segments of a cache of `block_count` blocks. In a slot they lie in the given order,
/// one after the other.
class Layout {
 public:
  static constexpr std::size_t kSegmentsMax = 4096;

  /// Throws std::invalid_argument if there is no segment or too many, a size is zero, a piece
  /// is longer than its stride, an address overflows, or two segments share bytes.
  Layout(std::vector<Segment> segments, std::int64_t block_count);

  const std::vector<Segment>& segments() const { return segments_; }
  /// Where segment i begins in a slot, in bytes; one entry more than segments, the slot's size.
  const std::vector<std::size_t>& offsets() const { return offsets_; }
  std::int64_t block_count() const { return block_count_; }
  std::size_t slot_bytes() const { return offsets_.back(); }

  /// Throws std::invalid_argument for unequal lengths, a target given twice, or host memory
  /// that overlaps the cache; std::out_of_range for an id outside the cache or the region.
  void check(const std::vector<std::int64_t>& block_ids, const std::vector<std::int64_t>& slot_ids,
             const HostRegion& host, Direction direction) const;

 private:
  std::vector<Segment> segments_;
  std::vector<std::size_t> offsets_;
  std::int64_t block_count_;
};

}  // namespace autellix
