// The only file that knows Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "autellix/copy_plan.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_swap, module, py::mod_gil_not_used()) {
  module.doc() = "Bulk copies of KV blocks between a paged cache and host memory.";
  module.def(
      "plan_runs",
      [](const std::vector<std::int64_t>& block_ids, std::int64_t block_count) {
        std::vector<py::tuple> runs;
        for (const auto& run : autellix::plan_runs(block_ids, block_count)) {
          runs.push_back(py::make_tuple(run.first_block, run.first_slot, run.count));
        }
        return runs;
      },
      py::arg("block_ids"), py::arg("block_count"),
      "Merge neighbouring block ids into (first_block, first_slot, count) runs.");
}
