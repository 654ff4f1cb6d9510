// The only file that knows Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "autellix/copy_plan.hpp"
#include "autellix/cuda_backend.hpp"
#include "autellix/host_buffer.hpp"
#include "autellix/host_copy.hpp"

namespace py = pybind11;

namespace {

using Ids = std::vector<std::int64_t>;
using SegmentTuples = std::vector<std::tuple<std::uintptr_t, std::size_t, std::size_t>>;

autellix::Layout make_layout(const SegmentTuples& tuples, std::int64_t block_count) {
  std::vector<autellix::Segment> segments;
  segments.reserve(tuples.size());
  for (const auto& [base, stride, bytes] : tuples) {
    segments.push_back({base, stride, bytes});
  }
  return autellix::Layout(std::move(segments), block_count);
}

/// A cache in host memory and the threads that move its blocks.
struct BlockCopier {
  autellix::Layout layout;
  std::shared_ptr<autellix::ThreadPool> pool;
};

struct CudaBlockCopier {
  std::shared_ptr<autellix::HostBuffer> host;  // pinned while the copier lives
  std::unique_ptr<autellix::CudaCopier> copier;
};

void copy_buffer(autellix::ThreadPool& pool, const py::buffer& target, const py::buffer& source) {
  const py::buffer_info to = target.request(true);
  const py::buffer_info from = source.request();
  const auto bytes = static_cast<std::size_t>(from.size * from.itemsize);
  if (static_cast<std::size_t>(to.size * to.itemsize) != bytes) {
    throw std::invalid_argument("source and target differ in size");
  }
  if (PyBuffer_IsContiguous(to.view(), 'C') == 0 || PyBuffer_IsContiguous(from.view(), 'C') == 0) {
    throw std::invalid_argument("source and target must be contiguous");
  }
  const auto* begin = static_cast<const char*>(from.ptr);
  const auto* written = static_cast<const char*>(to.ptr);
  if (begin < written + bytes && written < begin + bytes) {
    throw std::invalid_argument("source and target overlap");
  }
  const py::gil_scoped_release released;  // the buffers are held by the views above
  autellix::copy_contiguous(pool, to.ptr, from.ptr, bytes);
}

void bind_host(py::module_& module) {
  module.def(
      "plan_runs",
      [](const Ids& block_ids, std::int64_t block_count) {
        std::vector<py::tuple> runs;
        for (const auto& run : autellix::plan_runs(block_ids, block_count)) {
          runs.push_back(py::make_tuple(run.first_block, run.first_slot, run.count));
        }
        return runs;
      },
      py::arg("block_ids"), py::arg("block_count"),
      "Merge neighbouring block ids into (first_block, first_slot, count) runs.");

  py::class_<autellix::ThreadPool, std::shared_ptr<autellix::ThreadPool>>(module, "Workers")
      .def(py::init<int>(), py::arg("thread_count"))
      .def_property_readonly("thread_count", &autellix::ThreadPool::thread_count)
      .def("copy", &copy_buffer, py::arg("target"), py::arg("source"),
           "Copy one contiguous buffer to another of the same size.");

  py::class_<autellix::HostBuffer, std::shared_ptr<autellix::HostBuffer>>(module, "HostBuffer",
                                                                         py::buffer_protocol())
      .def(py::init<std::size_t, bool>(), py::arg("size_bytes"), py::arg("populate") = false)
      .def_property_readonly("size_bytes", &autellix::HostBuffer::bytes)
      .def_buffer([](autellix::HostBuffer& buffer) {
        return py::buffer_info(buffer.data(), 1, "B", static_cast<py::ssize_t>(buffer.bytes()));
      });

  py::class_<BlockCopier>(module, "BlockCopier")
      .def(py::init([](const SegmentTuples& segments, std::int64_t block_count,
                       std::shared_ptr<autellix::ThreadPool> workers) {
             return BlockCopier{make_layout(segments, block_count), std::move(workers)};
           }),
           py::arg("segments"), py::arg("block_count"), py::arg("workers").none(false))
      .def_property_readonly("slot_bytes",
                             [](const BlockCopier& self) { return self.layout.slot_bytes(); })
      // No Python object is touched while the bytes move: the GIL is free for the engine.
      .def(
          "gather",
          [](const BlockCopier& self, const Ids& block_ids, const autellix::HostBuffer& host,
             const Ids& slot_ids) {
            return autellix::gather(self.layout, *self.pool, block_ids, host.region(), slot_ids);
          },
          py::arg("block_ids"), py::arg("host").none(false), py::arg("slot_ids"),
          py::call_guard<py::gil_scoped_release>(), "Copy blocks to slots; returns bytes.")
      .def(
          "scatter",
          [](const BlockCopier& self, const Ids& block_ids, const autellix::HostBuffer& host,
             const Ids& slot_ids) {
            return autellix::scatter(self.layout, *self.pool, block_ids, host.region(), slot_ids);
          },
          py::arg("block_ids"), py::arg("host").none(false), py::arg("slot_ids"),
          py::call_guard<py::gil_scoped_release>(), "Copy slots to blocks; returns bytes.");
}

void bind_cuda(py::module_& module) {
  module.attr("CUDA_BUILT") =
#ifdef AUTELLIX_CUDA
      true;
#else
      false;
#endif
  py::class_<autellix::CudaLibrary>(module, "CudaLibrary")
      .def(py::init<const std::string&>(), py::arg("path"));

  py::class_<CudaBlockCopier>(module, "CudaBlockCopier")
      .def(py::init([](const autellix::CudaLibrary& library, const SegmentTuples& segments,
                       std::int64_t block_count, std::shared_ptr<autellix::HostBuffer> host,
                       int device, std::size_t staging_bytes) {
             auto copier = std::make_unique<autellix::CudaCopier>(
                 library, make_layout(segments, block_count), *host, device, staging_bytes);
             return std::make_unique<CudaBlockCopier>(
                 CudaBlockCopier{std::move(host), std::move(copier)});
           }),
           py::arg("library"), py::arg("segments"), py::arg("block_count"),
           py::arg("host").none(false), py::arg("device"), py::arg("staging_bytes"))
      .def_property_readonly(
          "slot_bytes",
          [](const CudaBlockCopier& self) { return self.copier->layout().slot_bytes(); })
      .def_property_readonly("method",
                             [](const CudaBlockCopier& self) { return self.copier->method(); })
      .def(
          "gather",
          [](CudaBlockCopier& self, const Ids& block_ids, const Ids& slot_ids,
             std::uint64_t stream) { return self.copier->gather(block_ids, slot_ids, stream); },
          py::arg("block_ids"), py::arg("slot_ids"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>(), "Queue a swap-out; returns its fence.")
      .def(
          "scatter",
          [](CudaBlockCopier& self, const Ids& block_ids, const Ids& slot_ids,
             std::uint64_t stream) { return self.copier->scatter(block_ids, slot_ids, stream); },
          py::arg("block_ids"), py::arg("slot_ids"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>(), "Queue a swap-in; returns its fence.")
      .def(
          "wait",
          [](CudaBlockCopier& self, std::uint64_t fence, std::uint64_t stream) {
            self.copier->wait(fence, stream);
          },
          py::arg("fence"), py::arg("stream"), "Let a stream wait for a fence.")
      .def(
          "done",
          [](CudaBlockCopier& self, std::uint64_t fence) { return self.copier->done(fence); },
          py::arg("fence"), "Whether the copy before a fence has ended.");
}

}  // namespace

PYBIND11_MODULE(_swap, module, py::mod_gil_not_used()) {
  module.doc() = "Bulk copies of KV blocks between a paged cache and host memory.";
  bind_host(module);
  bind_cuda(module);
}
