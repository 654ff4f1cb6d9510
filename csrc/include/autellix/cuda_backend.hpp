// Loads the CUDA backend if it was built and a driver is there; else says why not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "autellix/cuda_abi.h"
#include "autellix/host_buffer.hpp"
#include "autellix/layout.hpp"

namespace autellix {

/// The shared object of the backend, loaded for the rest of the process.
class CudaLibrary {
 public:
  /// Throws std::runtime_error with the reason if it cannot be loaded or finds no device.
  explicit CudaLibrary(const std::string& path);
  const autellix_cuda_api& api() const { return *api_; }

 private:
  const autellix_cuda_api* api_;
};

/// Moves blocks of a cache in device memory to and from pinned slots, asynchronously.
///
/// Not for several threads at once. The buffer is pinned while the copier lives and must
/// outlive it.
class CudaCopier {
 public:
  /// `staging_bytes` of device memory are taken. Throws std::runtime_error if CUDA refuses.
  CudaCopier(const CudaLibrary& library, Layout layout, const HostBuffer& host, int device,
             std::size_t staging_bytes);
  ~CudaCopier();
  CudaCopier(const CudaCopier&) = delete;
  CudaCopier& operator=(const CudaCopier&) = delete;

  const Layout& layout() const { return layout_; }
  std::string method() const;
  /// Queue the copy on `stream`; returns its fence. Throws as Layout::check, or
  /// std::runtime_error if CUDA refuses.
  std::uint64_t gather(const std::vector<std::int64_t>& block_ids,
                       const std::vector<std::int64_t>& slot_ids, std::uint64_t stream);
  std::uint64_t scatter(const std::vector<std::int64_t>& block_ids,
                        const std::vector<std::int64_t>& slot_ids, std::uint64_t stream);
  void wait(std::uint64_t fence, std::uint64_t stream);
  bool done(std::uint64_t fence);

 private:
  const autellix_cuda_api& api_;
  const Layout layout_;
  const HostBuffer& host_;
  autellix_cuda_copier* copier_ = nullptr;
};

}  // namespace autellix
