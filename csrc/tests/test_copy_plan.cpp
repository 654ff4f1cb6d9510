// A plain executable: exits 0 when every check holds.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "autellix/copy_plan.hpp"

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                   \
    }                                                                 \
  } while (false)

int main() {
  CHECK(autellix::plan_runs({}, 8).empty());
  const auto runs = autellix::plan_runs({3, 4, 5, 1, 7}, 8);
  CHECK(runs.size() == 3);
  CHECK(runs[0].first_block == 3 && runs[0].first_slot == 0 && runs[0].count == 3);
  CHECK(runs[1].first_block == 1 && runs[1].first_slot == 3 && runs[1].count == 1);
  CHECK(runs[2].first_block == 7 && runs[2].first_slot == 4 && runs[2].count == 1);
  bool threw = false;
  try {
    (void)autellix::plan_runs({8}, 8);
  } catch (const std::out_of_range&) {
    threw = true;
  }
  CHECK(threw);
  return 0;
}
