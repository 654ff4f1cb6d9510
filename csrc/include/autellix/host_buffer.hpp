// Host memory for slots: page-aligned, owned by one object, untouched until it is written.
#pragma once

#include <cstddef>

#include "autellix/layout.hpp"

namespace autellix {

class HostBuffer {
 public:
  /// Reserve `bytes` of address space; `populate` takes the memory at once, else page by page
  /// as it is first written. Throws std::invalid_argument for zero bytes, std::bad_alloc if
  /// the system refuses.
  HostBuffer(std::size_t bytes, bool populate);
  ~HostBuffer();
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  std::size_t bytes() const { return bytes_; }
  HostRegion region() const;

 private:
  void* data_;
  std::size_t bytes_;
};

}  // namespace autellix
