// SPDX-License-Identifier: Apache-2.0
// Loaded into a daemon before its own libraries (LD_PRELOAD): counts the pieces and bytes of its live heap for a test.

#include "tests/support/live_heap.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>

extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t align, size_t size);
void __libc_free(void* memory);
}

namespace {

using forebay::testing::LiveHeap;

LiveHeap before_main;
// The counters in use: those in the file once it is mapped.
std::atomic<LiveHeap*> counts{&before_main};

__attribute__((constructor)) void Share() {
  const char* const path = std::getenv("FOREBAY_TEST_HEAP");
  const int fd = path == nullptr ? -1 : ::open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void* const at = ::mmap(nullptr, sizeof(LiveHeap), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (at == MAP_FAILED) return;
  counts = static_cast<LiveHeap*>(at);
}

void* Added(void* memory) {
  if (memory == nullptr) return nullptr;
  LiveHeap& live = *counts.load();
  live.pieces += 1;
  live.bytes += static_cast<int64_t>(::malloc_usable_size(memory));
  return memory;
}

void Remove(void* memory) {
  if (memory == nullptr) return;
  LiveHeap& live = *counts.load();
  live.pieces -= 1;
  live.bytes -= static_cast<int64_t>(::malloc_usable_size(memory));
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void* malloc(size_t size) {
  return Added(__libc_malloc(size));
}

__attribute__((visibility("default"))) void* calloc(size_t count, size_t size) {
  return Added(__libc_calloc(count, size));
}

__attribute__((visibility("default"))) void* realloc(void* memory, size_t size) {
  Remove(memory);
  void* const moved = __libc_realloc(memory, size);
  if (moved == nullptr && size > 0) {
    (void)Added(memory);  // realloc failed: the old memory is still allocated
    return nullptr;
  }
  return Added(moved);
}

__attribute__((visibility("default"))) void* memalign(size_t align, size_t size) {
  return Added(__libc_memalign(align, size));
}

__attribute__((visibility("default"))) void* aligned_alloc(size_t align, size_t size) {
  return Added(__libc_memalign(align, size));
}

__attribute__((visibility("default"))) int posix_memalign(void** memory, size_t align,
                                                          size_t size) {
  void* const made = Added(__libc_memalign(align, size));
  if (made == nullptr) return ENOMEM;
  *memory = made;
  return 0;
}

__attribute__((visibility("default"))) void free(void* memory) {
  Remove(memory);
  __libc_free(memory);
}
}
