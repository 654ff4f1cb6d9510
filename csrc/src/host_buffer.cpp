#include "autellix/host_buffer.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <stdexcept>

namespace autellix {

HostBuffer::HostBuffer(std::size_t bytes, bool populate) : data_(nullptr), bytes_(bytes) {
  if (bytes == 0) {
    throw std::invalid_argument("a host buffer has at least one byte");
  }
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw std::bad_alloc();
  }
#ifdef MADV_HUGEPAGE
  (void)::madvise(data, bytes, MADV_HUGEPAGE);  // only advice: small pages work as well
#endif
#ifdef MADV_POPULATE_WRITE
  if (populate && ::madvise(data, bytes, MADV_POPULATE_WRITE) != 0) {
    ::munmap(data, bytes);
    throw std::bad_alloc();
  }
#else
  if (populate) {
    for (std::size_t at = 0; at < bytes; at += 4096) {
      static_cast<volatile char*>(data)[at] = 0;
    }
  }
#endif
  data_ = data;
}

HostBuffer::~HostBuffer() { ::munmap(data_, bytes_); }

HostRegion HostBuffer::region() const {
  return {reinterpret_cast<std::uintptr_t>(data_), bytes_};
}

}  // namespace autellix
