#include "autellix/copy_plan.hpp"

#include <stdexcept>
#include <string>

namespace autellix {

std::vector<CopyRun> plan_runs(const std::vector<std::int64_t>& block_ids,
                               std::int64_t block_count) {
  std::vector<CopyRun> runs;
  std::int64_t slot = 0;
  for (const std::int64_t block : block_ids) {
    if (block < 0 || block >= block_count) {
      throw std::out_of_range("block id " + std::to_string(block) + " is not in 0.." +
                              std::to_string(block_count - 1));
    }
    if (!runs.empty() && block == runs.back().first_block + runs.back().count) {
      ++runs.back().count;
    } else {
      runs.push_back({block, slot, 1});
    }
    ++slot;
  }
  return runs;
}

}  // namespace autellix
