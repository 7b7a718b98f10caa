// SPDX-License-Identifier: Apache-2.0
// The fate of a write into a job's weights: the pages become the writer's own where that is allowed, else it is
// explained which parameter was meant.
//
// A signal handler has no argument of ours, so this table and the handler are the process's own:
// the one place of the client with global state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "protocol/layout.h"

namespace forebay::client {

namespace internal {
class WrittenPages;
}  // namespace internal

inline constexpr int kWindowsMax = 1024;  // a write into a further window is not explained

struct WindowPart {
  uint64_t begin_bytes = 0;  // into the window
  uint64_t end_bytes = 0;
  uint64_t elem_bytes = 4;
  uint32_t group = 0;
  std::string param;
  std::string group_name;
};

// The parts of a job's weights, in ascending order.
std::vector<WindowPart> WindowParts(const protocol::Layout& layout);

// A window's entry in the table. The destructor removes the entry.
class WindowRegistration {
 public:
  WindowRegistration(const WindowRegistration&) = delete;
  WindowRegistration& operator=(const WindowRegistration&) = delete;
  ~WindowRegistration();

  // From now on what this process writes into the window is its own. `file`: the window is a shared mapping of it, from
  // the first byte on; outlives the registration. False where the table was full. At most once.
  bool AllowWrites(int file);
  // Null before AllowWrites.
  internal::WrittenPages* written() const;

 private:
  friend std::unique_ptr<WindowRegistration> RegisterWindow(std::span<const std::byte>, std::string,
                                                            std::vector<WindowPart>);
  explicit WindowRegistration(int index) : index_(index) {}

  int index_;  // -1: the table was full
};

// Threads  Any.
std::unique_ptr<WindowRegistration> RegisterWindow(std::span<const std::byte> window,
                                                   std::string job, std::vector<WindowPart> parts);

// Writes to `fd` which parameter `address` belongs to and what to do instead of writing there;
// false, and nothing written, where it lies in no window. Async-signal-safe.
bool ExplainWrite(const void* address, int fd);

// From now on a write into a window that allows it goes on in pages of this process's own. Any other SIGSEGV within a window
// is explained on stderr before the handler that was there runs (or the process dies, as it would have). A second call does
// nothing.
void InstallSegvHandler();

}  // namespace forebay::client
