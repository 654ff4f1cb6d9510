// A plain executable: exits 0 when every check holds.
#include <stdexcept>

#include "autellix/copy_plan.hpp"
#include "check.hpp"

int main() {
  CHECK(autellix::plan_runs({}, 8).empty());
  const auto runs = autellix::plan_runs({3, 4, 5, 1, 7}, 8);
  CHECK(runs.size() == 3);
  CHECK(runs[0].first_block == 3 && runs[0].first_slot == 0 && runs[0].count == 3);
  CHECK(runs[1].first_block == 1 && runs[1].first_slot == 3 && runs[1].count == 1);
  CHECK(runs[2].first_block == 7 && runs[2].first_slot == 4 && runs[2].count == 1);
  CHECK_THROWS(std::out_of_range, (void)autellix::plan_runs({8}, 8));
  return 0;
}
