// Without a driver the backend says so; with one, gather then scatter is not tested here (it
// needs device memory): the Python tests do it where torch finds a device.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "autellix/cuda_backend.hpp"
#include "check.hpp"

int main() {
  CHECK_THROWS(std::runtime_error, autellix::CudaLibrary("no-such-library.so"));
  const char* path = std::getenv("AUTELLIX_CUDA_LIBRARY");
  if (path != nullptr) {
    try {
      const autellix::CudaLibrary library{std::string(path)};
      CHECK(library.api().abi == AUTELLIX_CUDA_ABI);
      std::puts("a CUDA device is there");
    } catch (const std::runtime_error& error) {
      std::printf("%s\n", error.what());
      CHECK(std::string(error.what()).rfind("CUDA is not usable", 0) == 0);
    }
  }
  return 0;
}
