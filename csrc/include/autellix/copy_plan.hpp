// Turns a list of KV block ids into runs of neighbours, so that one copy moves each run.
#pragma once

#include <cstdint>
#include <vector>

namespace autellix {

/// `count` blocks that lie side by side from `first_block` on, bound for `first_slot` on.
struct CopyRun {
  std::int64_t first_block;
  std::int64_t first_slot;
  std::int64_t count;
};

/// Merge neighbouring block ids, in their given order, into runs.
///
/// Slots are numbered 0, 1, 2 … in the order of `block_ids`.
/// Throws std::out_of_range if an id is negative or not below `block_count`.
std::vector<CopyRun> plan_runs(const std::vector<std::int64_t>& block_ids,
                               std::int64_t block_count);

}  // namespace autellix
