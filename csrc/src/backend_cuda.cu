// The CUDA backend: gather or scatter in one kernel, and one copy per chunk of slots.
//
// Blocks move through a staging ring of two halves on the device. Order on one stream fences the
// kernel against the copy; events fence the halves' id tables against the host, and the whole
// transfer against other streams (wait) and the host (done). A missing fence here is corrupt text.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "autellix/cuda_abi.h"

namespace {

constexpr size_t kVectorBytes = 16;
constexpr int kThreadsPerGroup = 256;
constexpr size_t kGroupsMax = 65535;  // of a grid's second dimension
constexpr size_t kFencesMax = 4096;
constexpr int64_t kTrialBlocks = 32;

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    (void)cudaGetLastError();  // a failed call must not show up again in vLLM's next check
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

/// One group of threads moves one segment of one block, 16 bytes a thread.
template <bool kGather>
__global__ void move_blocks(const autellix_cuda_segment* segments, const uint64_t* offsets,
                            const int64_t* block_ids, char* staging, uint64_t slot_bytes) {
  const autellix_cuda_segment segment = segments[blockIdx.y];
  char* cache = reinterpret_cast<char*>(segment.base) +
                static_cast<uint64_t>(block_ids[blockIdx.x]) * segment.stride;
  char* slot = staging + blockIdx.x * slot_bytes + offsets[blockIdx.y];
  auto* target = reinterpret_cast<uint4*>(kGather ? slot : cache);
  const auto* source = reinterpret_cast<const uint4*>(kGather ? cache : slot);
  const uint64_t vectors = segment.bytes / kVectorBytes;
  for (uint64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
    target[i] = source[i];
  }
}

struct Event {
  Event() { check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "create a fence"); }
  ~Event() { (void)cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

/// Half of the staging ring: device bytes, the ids they are for, and when both are free again.
struct Half {
  char* staging = nullptr;
  int64_t* ids = nullptr;         // device
  int64_t* pinned_ids = nullptr;  // host
  std::unique_ptr<Event> free;
  bool used = false;
};

}  // namespace

struct autellix_cuda_copier {
  autellix_cuda_copier(int on_device, const autellix_cuda_segment* given, size_t count,
                       int64_t cache_blocks, size_t staging_bytes, void* to_host)
      : device(on_device), segments(given, given + count), blocks(cache_blocks),
        host(static_cast<char*>(to_host)) {
    std::vector<uint64_t> starts;
    for (const auto& segment : segments) {
      if (segment.base % kVectorBytes || segment.stride % kVectorBytes ||
          segment.bytes % kVectorBytes) {
        throw std::invalid_argument("the kernel needs segments aligned to 16 bytes");
      }
      starts.push_back(slot_bytes);
      slot_bytes += segment.bytes;
    }
    if (count > kGroupsMax) {
      throw std::invalid_argument("too many segments for one grid");
    }
    chunk = std::max<size_t>(1, staging_bytes / 2 / slot_bytes);
    check(cudaSetDevice(device), "choose the device");
    offsets = starts;
    check(cudaMalloc(&device_segments, count * sizeof(autellix_cuda_segment)), "allocate");
    check(cudaMalloc(&device_offsets, count * sizeof(uint64_t)), "allocate");
    check(cudaMemcpy(device_segments, given, count * sizeof(autellix_cuda_segment),
                     cudaMemcpyHostToDevice),
          "upload the segments");
    check(cudaMemcpy(device_offsets, starts.data(), count * sizeof(uint64_t),
                     cudaMemcpyHostToDevice),
          "upload the offsets");
    for (auto& half : halves) {
      check(cudaMalloc(&half.staging, chunk * slot_bytes), "allocate the staging ring");
      check(cudaMalloc(&half.ids, chunk * sizeof(int64_t)), "allocate");
      check(cudaMallocHost(&half.pinned_ids, chunk * sizeof(int64_t)), "allocate pinned ids");
      half.free = std::make_unique<Event>();
    }
  }

  ~autellix_cuda_copier() {
    (void)cudaSetDevice(device);
    (void)cudaDeviceSynchronize();
    for (auto& half : halves) {
      (void)cudaFree(half.staging);
      (void)cudaFree(half.ids);
      (void)cudaFreeHost(half.pinned_ids);
    }
    (void)cudaFree(device_segments);
    (void)cudaFree(device_offsets);
  }

  uint64_t add_fence(cudaStream_t stream) {
    for (auto it = fences.begin(); it != fences.end() && fences.size() >= kFencesMax;) {
      it = cudaEventQuery(it->second->event) == cudaSuccess ? fences.erase(it) : std::next(it);
    }
    if (fences.size() >= kFencesMax) {
      check(cudaEventSynchronize(fences.begin()->second->event), "wait for the oldest fence");
      fences.erase(fences.begin());
    }
    auto fence = std::make_unique<Event>();
    check(cudaEventRecord(fence->event, stream), "record a fence");
    fences.emplace(++last_fence, std::move(fence));
    return last_fence;
  }

  Half& take_half(const int64_t* block_ids, size_t count, cudaStream_t stream) {
    Half& half = halves[turn];
    turn = 1 - turn;
    if (half.used) {
      check(cudaEventSynchronize(half.free->event), "wait for staging");
    }
    std::memcpy(half.pinned_ids, block_ids, count * sizeof(int64_t));
    check(cudaMemcpyAsync(half.ids, half.pinned_ids, count * sizeof(int64_t),
                          cudaMemcpyHostToDevice, stream),
          "upload block ids");
    half.used = true;
    return half;
  }

  /// Copy `count` staged slots to or from the host: one copy per run of neighbouring slots, so
  /// one copy in all when the pool gave out neighbours.
  void copy_staged(char* staging, const int64_t* slot_ids, size_t count, bool to_host,
                   cudaStream_t stream) {
    for (size_t first = 0; first < count;) {
      size_t last = first + 1;
      while (last < count && slot_ids[last] == slot_ids[last - 1] + 1) {
        ++last;
      }
      char* at_host = host + static_cast<size_t>(slot_ids[first]) * slot_bytes;
      char* at_device = staging + first * slot_bytes;
      check(cudaMemcpyAsync(to_host ? at_host : at_device, to_host ? at_device : at_host,
                            (last - first) * slot_bytes,
                            to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream),
            "copy staged slots");
      first = last;
    }
  }

  void move_by_kernel(const int64_t* block_ids, const int64_t* slot_ids, size_t count,
                      bool gathers, cudaStream_t stream) {
    for (size_t at = 0; at < count; at += chunk) {
      const size_t now = std::min(chunk, count - at);
      Half& half = take_half(block_ids + at, now, stream);
      const dim3 grid(static_cast<unsigned>(now), static_cast<unsigned>(segments.size()));
      if (gathers) {
        move_blocks<true><<<grid, kThreadsPerGroup, 0, stream>>>(
            device_segments, device_offsets, half.ids, half.staging, slot_bytes);
        check(cudaGetLastError(), "start the gather");
        copy_staged(half.staging, slot_ids + at, now, true, stream);
      } else {
        copy_staged(half.staging, slot_ids + at, now, false, stream);
        move_blocks<false><<<grid, kThreadsPerGroup, 0, stream>>>(
            device_segments, device_offsets, half.ids, half.staging, slot_bytes);
        check(cudaGetLastError(), "start the scatter");
      }
      check(cudaEventRecord(half.free->event, stream), "record a fence");
    }
  }

  template <typename Visit>
  void each_piece(const int64_t* block_ids, const int64_t* slot_ids, size_t count,
                  const Visit& visit) const {
    for (size_t i = 0; i < count; ++i) {
      for (size_t s = 0; s < segments.size(); ++s) {
        char* cache = reinterpret_cast<char*>(segments[s].base) +
                      static_cast<uint64_t>(block_ids[i]) * segments[s].stride;
        char* slot = host + static_cast<size_t>(slot_ids[i]) * slot_bytes + offsets[s];
        visit(cache, slot, static_cast<size_t>(segments[s].bytes));
      }
    }
  }

  void move_by_batch(const int64_t* block_ids, const int64_t* slot_ids, size_t count, bool gathers,
                     cudaStream_t stream) {
    std::vector<const void*> targets;
    std::vector<const void*> sources;
    std::vector<size_t> sizes;
    each_piece(block_ids, slot_ids, count, [&](char* cache, char* slot, size_t bytes) {
      targets.push_back(gathers ? slot : cache);
      sources.push_back(gathers ? cache : slot);
      sizes.push_back(bytes);
    });
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    check(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(),
                               &attributes, &first, 1, stream),
          "batched copy");
  }

  void move_per_block(const int64_t* block_ids, const int64_t* slot_ids, size_t count,
                      bool gathers, cudaStream_t stream) {
    each_piece(block_ids, slot_ids, count, [&](char* cache, char* slot, size_t bytes) {
      check(cudaMemcpyAsync(gathers ? slot : cache, gathers ? cache : slot, bytes,
                            gathers ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream),
            "copy a block");
    });
  }

  void move(int how, const int64_t* block_ids, const int64_t* slot_ids, size_t count, bool gathers,
            cudaStream_t stream) {
    check(cudaSetDevice(device), "choose the device");
    if (count == 0) {
      return;
    }
    if (how == AUTELLIX_CUDA_KERNEL) {
      move_by_kernel(block_ids, slot_ids, count, gathers, stream);
    } else if (how == AUTELLIX_CUDA_BATCH) {
      move_by_batch(block_ids, slot_ids, count, gathers, stream);
    } else {
      move_per_block(block_ids, slot_ids, count, gathers, stream);
    }
  }

  /// Time each way with gathers, which change no block, and keep the fastest that works.
  void choose_method(size_t host_bytes) {
    const auto count = static_cast<size_t>(
        std::min<int64_t>({kTrialBlocks, blocks, static_cast<int64_t>(host_bytes / slot_bytes)}));
    if (count == 0) {
      throw std::invalid_argument("the host buffer holds no slot");
    }
    std::vector<int64_t> block_ids(count);
    std::vector<int64_t> slot_ids(count);
    for (size_t i = 0; i < count; ++i) {
      block_ids[i] = static_cast<int64_t>(i) * (blocks / static_cast<int64_t>(count));
      slot_ids[i] = static_cast<int64_t>(i);
    }
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    check(cudaEventCreate(&begin), "create a timer");
    check(cudaEventCreate(&end), "create a timer");
    float best_ms = 0;
    std::string failures;
    bool works = false;
    for (const int how : {AUTELLIX_CUDA_PER_BLOCK, AUTELLIX_CUDA_BATCH, AUTELLIX_CUDA_KERNEL}) {
      try {
        float ms = 0;
        move(how, block_ids.data(), slot_ids.data(), count, true, nullptr);  // warm
        check(cudaEventRecord(begin, nullptr), "start a timer");
        move(how, block_ids.data(), slot_ids.data(), count, true, nullptr);
        check(cudaEventRecord(end, nullptr), "stop a timer");
        check(cudaEventSynchronize(end), "wait for a trial");
        check(cudaEventElapsedTime(&ms, begin, end), "read a timer");
        if (!works || ms < best_ms) {
          best_ms = ms;
          method = how;
        }
        works = true;
      } catch (const std::runtime_error& error) {
        failures += std::string("; ") + error.what();
      }
    }
    (void)cudaEventDestroy(begin);
    (void)cudaEventDestroy(end);
    if (!works) {
      throw std::runtime_error("no way to copy works" + failures);
    }
  }

  const int device;
  const std::vector<autellix_cuda_segment> segments;
  const int64_t blocks;
  char* const host;
  std::vector<uint64_t> offsets;
  uint64_t slot_bytes = 0;
  size_t chunk = 0;
  int method = AUTELLIX_CUDA_PER_BLOCK;
  autellix_cuda_segment* device_segments = nullptr;
  uint64_t* device_offsets = nullptr;
  Half halves[2];
  int turn = 0;
  uint64_t last_fence = 0;
  std::map<uint64_t, std::unique_ptr<Event>> fences;
};

namespace {

template <typename Body>
int guarded(char* message, size_t message_bytes, const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    if (message_bytes > 0) {
      std::snprintf(message, message_bytes, "%s", error.what());
    }
    return 1;
  }
}

int probe(char* message, size_t message_bytes) {
  return guarded(message, message_bytes, [] {
    int devices = 0;
    check(cudaGetDeviceCount(&devices), "count devices");
    if (devices == 0) {
      throw std::runtime_error("no CUDA device");
    }
  });
}

int pin(void* host, size_t bytes, char* message, size_t message_bytes) {
  return guarded(message, message_bytes, [&] {
    check(cudaHostRegister(host, bytes, cudaHostRegisterPortable), "pin host memory");
  });
}

int unpin(void* host, char* message, size_t message_bytes) {
  return guarded(message, message_bytes,
                 [&] { check(cudaHostUnregister(host), "unpin host memory"); });
}

int open(int device, const autellix_cuda_segment* segments, size_t segment_count,
         int64_t block_count, size_t staging_bytes, void* host, size_t host_bytes,
         autellix_cuda_copier** copier, char* message, size_t message_bytes) {
  return guarded(message, message_bytes, [&] {
    auto opened = std::make_unique<autellix_cuda_copier>(device, segments, segment_count,
                                                         block_count, staging_bytes, host);
    opened->choose_method(host_bytes);
    *copier = opened.release();
  });
}

void close(autellix_cuda_copier* copier) { delete copier; }

int method(const autellix_cuda_copier* copier) { return copier->method; }

int transfer(autellix_cuda_copier* copier, const int64_t* block_ids, const int64_t* slot_ids,
             size_t count, bool gathers, uint64_t stream, uint64_t* fence, char* message,
             size_t message_bytes) {
  return guarded(message, message_bytes, [&] {
    auto* on = reinterpret_cast<cudaStream_t>(stream);
    copier->move(copier->method, block_ids, slot_ids, count, gathers, on);
    *fence = copier->add_fence(on);
  });
}

int gather(autellix_cuda_copier* copier, const int64_t* block_ids, const int64_t* slot_ids,
           size_t count, uint64_t stream, uint64_t* fence, char* message, size_t message_bytes) {
  return transfer(copier, block_ids, slot_ids, count, true, stream, fence, message, message_bytes);
}

int scatter(autellix_cuda_copier* copier, const int64_t* block_ids, const int64_t* slot_ids,
            size_t count, uint64_t stream, uint64_t* fence, char* message, size_t message_bytes) {
  return transfer(copier, block_ids, slot_ids, count, false, stream, fence, message,
                  message_bytes);
}

int wait(autellix_cuda_copier* copier, uint64_t fence, uint64_t stream, char* message,
         size_t message_bytes) {
  return guarded(message, message_bytes, [&] {
    const auto found = copier->fences.find(fence);
    if (found != copier->fences.end()) {  // a fence that is gone was passed
      check(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream), found->second->event, 0),
            "wait for a fence");
    }
  });
}

int done(autellix_cuda_copier* copier, uint64_t fence, int* is_done, char* message,
         size_t message_bytes) {
  return guarded(message, message_bytes, [&] {
    *is_done = 1;
    const auto found = copier->fences.find(fence);
    if (found == copier->fences.end()) {
      return;
    }
    const cudaError_t status = cudaEventQuery(found->second->event);
    if (status == cudaErrorNotReady) {
      *is_done = 0;
      return;
    }
    check(status, "query a fence");
    copier->fences.erase(found);
  });
}

constexpr autellix_cuda_api kApi = {AUTELLIX_CUDA_ABI, probe, pin,     unpin, open, close,
                                    method,            gather, scatter, wait,  done};

}  // namespace

extern "C" const autellix_cuda_api* autellix_cuda_get_api(void) { return &kApi; }
