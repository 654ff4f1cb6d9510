/* What the CUDA backend, a shared object of its own, offers to the module that loads it.
 *
 * Plain C, so that the module needs neither CUDA headers nor a driver. Every function returns 0,
 * or another value after writing a message of at most `message_bytes` to `message`. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define AUTELLIX_CUDA_ABI 1

typedef struct autellix_cuda_segment {
  uint64_t base, stride, bytes;
} autellix_cuda_segment;

typedef struct autellix_cuda_copier autellix_cuda_copier;

/* The ways to move blocks; the fastest that works is chosen when a copier opens. */
enum { AUTELLIX_CUDA_KERNEL = 0, AUTELLIX_CUDA_BATCH = 1, AUTELLIX_CUDA_PER_BLOCK = 2 };

typedef struct autellix_cuda_api {
  int abi;
  /* Whether a driver and a device are there. */
  int (*probe)(char* message, size_t message_bytes);
  int (*pin)(void* host, size_t bytes, char* message, size_t message_bytes);
  int (*unpin)(void* host, char* message, size_t message_bytes);
  /* The copier reads blocks of the cache while it measures, and writes none. `host` is pinned. */
  int (*open)(int device, const autellix_cuda_segment* segments, size_t segment_count,
              int64_t block_count, size_t staging_bytes, void* host, size_t host_bytes,
              autellix_cuda_copier** copier, char* message, size_t message_bytes);
  void (*close)(autellix_cuda_copier* copier);
  int (*method)(const autellix_cuda_copier* copier);
  /* Queue the copy on `stream` and put a fence behind it; `fence` is for wait and done. The
   * caller checked the arguments (Layout::check). */
  int (*gather)(autellix_cuda_copier* copier, const int64_t* block_ids, const int64_t* slot_ids,
                size_t count, uint64_t stream, uint64_t* fence, char* message,
                size_t message_bytes);
  int (*scatter)(autellix_cuda_copier* copier, const int64_t* block_ids, const int64_t* slot_ids,
                 size_t count, uint64_t stream, uint64_t* fence, char* message,
                 size_t message_bytes);
  /* Make `stream` wait for a fence without blocking the host. */
  int (*wait)(autellix_cuda_copier* copier, uint64_t fence, uint64_t stream, char* message,
              size_t message_bytes);
  /* Sets *done to 1 once the copy before the fence has ended, else 0. */
  int (*done)(autellix_cuda_copier* copier, uint64_t fence, int* done, char* message,
              size_t message_bytes);
} autellix_cuda_api;

/* The one exported symbol. */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const autellix_cuda_api*
autellix_cuda_get_api(void);

#ifdef __cplusplus
}
#endif
