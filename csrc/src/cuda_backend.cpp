#include "autellix/cuda_backend.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <utility>

namespace autellix {
namespace {

struct Message {
  char text[512] = {};
  void require(int status, const char* what) const {
    if (status != 0) {
      throw std::runtime_error(std::string(what) + ": " + text);
    }
  }
};

}  // namespace

CudaLibrary::CudaLibrary(const std::string& path) : api_(nullptr) {
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    throw std::runtime_error(std::string("the CUDA backend cannot be loaded: ") +
                             (why != nullptr ? why : "no reason given"));
  }
  using GetApi = const autellix_cuda_api* (*)();
  const auto get_api = reinterpret_cast<GetApi>(::dlsym(handle, "autellix_cuda_get_api"));
  if (get_api == nullptr || get_api()->abi != AUTELLIX_CUDA_ABI) {
    throw std::runtime_error("the CUDA backend at " + path + " is of another version");
  }
  Message message;
  message.require(get_api()->probe(message.text, sizeof message.text),
                  "CUDA is not usable");
  api_ = get_api();
}

CudaCopier::CudaCopier(const CudaLibrary& library, Layout layout, const HostBuffer& host,
                       int device, std::size_t staging_bytes)
    : api_(library.api()), layout_(std::move(layout)), host_(host) {
  Message message;
  message.require(api_.pin(host.data(), host.bytes(), message.text, sizeof message.text),
                  "the host pool cannot be pinned");
  std::vector<autellix_cuda_segment> segments;
  for (const Segment& segment : layout_.segments()) {
    segments.push_back({segment.base, segment.stride, segment.bytes});
  }
  const int status =
      api_.open(device, segments.data(), segments.size(), layout_.block_count(), staging_bytes,
                host.data(), host.bytes(), &copier_, message.text, sizeof message.text);
  if (status != 0) {
    Message ignored;
    (void)api_.unpin(host.data(), ignored.text, sizeof ignored.text);
    message.require(status, "the CUDA copier cannot start");
  }
}

CudaCopier::~CudaCopier() {
  api_.close(copier_);
  Message ignored;
  (void)api_.unpin(host_.data(), ignored.text, sizeof ignored.text);
}

std::string CudaCopier::method() const {
  switch (api_.method(copier_)) {
    case AUTELLIX_CUDA_KERNEL:
      return "kernel";
    case AUTELLIX_CUDA_BATCH:
      return "batch";
    default:
      return "per-block";
  }
}

std::uint64_t CudaCopier::gather(const std::vector<std::int64_t>& block_ids,
                                 const std::vector<std::int64_t>& slot_ids, std::uint64_t stream) {
  layout_.check(block_ids, slot_ids, host_.region(), Direction::kGather);
  Message message;
  std::uint64_t fence = 0;
  message.require(api_.gather(copier_, block_ids.data(), slot_ids.data(), block_ids.size(), stream,
                              &fence, message.text, sizeof message.text),
                  "swap-out failed");
  return fence;
}

std::uint64_t CudaCopier::scatter(const std::vector<std::int64_t>& block_ids,
                                  const std::vector<std::int64_t>& slot_ids,
                                  std::uint64_t stream) {
  layout_.check(block_ids, slot_ids, host_.region(), Direction::kScatter);
  Message message;
  std::uint64_t fence = 0;
  message.require(api_.scatter(copier_, block_ids.data(), slot_ids.data(), block_ids.size(),
                               stream, &fence, message.text, sizeof message.text),
                  "swap-in failed");
  return fence;
}

void CudaCopier::wait(std::uint64_t fence, std::uint64_t stream) {
  Message message;
  message.require(api_.wait(copier_, fence, stream, message.text, sizeof message.text),
                  "a fence cannot be waited for");
}

bool CudaCopier::done(std::uint64_t fence) {
  Message message;
  int is_done = 0;
  message.require(api_.done(copier_, fence, &is_done, message.text, sizeof message.text),
                  "a fence cannot be read");
  return is_done != 0;
}

}  // namespace autellix
