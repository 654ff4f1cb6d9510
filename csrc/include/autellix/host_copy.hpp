// Moves blocks between a paged cache in host memory and host slots, on several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "autellix/layout.hpp"
#include "autellix/thread_pool.hpp"

namespace autellix {

/// Copy block_ids[i] of all layers to slot slot_ids[i]. Returns the bytes moved.
/// Checks everything first (Layout::check); then nothing can fail.
std::size_t gather(const Layout& layout, ThreadPool& pool,
                   const std::vector<std::int64_t>& block_ids, const HostRegion& host,
                   const std::vector<std::int64_t>& slot_ids);

/// Copy slot slot_ids[i] back to block block_ids[i] of all layers. Returns the bytes moved.
std::size_t scatter(const Layout& layout, ThreadPool& pool,
                    const std::vector<std::int64_t>& block_ids, const HostRegion& host,
                    const std::vector<std::int64_t>& slot_ids);

/// One plain memcpy of contiguous bytes, shared among the threads: what a copy costs at best.
void copy_contiguous(ThreadPool& pool, void* target, const void* source, std::size_t bytes);

}  // namespace autellix
