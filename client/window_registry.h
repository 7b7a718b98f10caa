// SPDX-License-Identifier: Apache-2.0
// Handles writes of this process into a job's weights. If the window allows writes, the pages become private to the process.
// Otherwise an explanation on stderr names the parameter.
//
// A signal handler has no argument of the client's. The table of windows and the handler are therefore global: the only global
// state of the client.
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

// A write into a further window ends the process without an explanation.
inline constexpr int kWindowsMax = 1024;

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

  // Makes what this process writes into the window from now on private to this process. The window must be a shared mapping of
  // `file` from the first byte on, and `file` must outlive the registration. Returns false if the table was full. To be called
  // at most once.
  bool AllowWrites(int file);
  // Private pages of the window. Null before AllowWrites.
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

// Writes an explanation to `fd`: the parameter to which `address` belongs, and what to do instead of writing to it. Returns
// false and writes nothing if `address` lies in no window. Async-signal-safe.
bool ExplainWrite(const void* address, int fd);

// Installs a handler of SIGSEGV. After a write into a window that allows writes, the process continues with private pages. Any
// other SIGSEGV within a window is explained on stderr before the previous handler runs (or the process dies, as it would
// have). A second call does nothing.
void InstallSegvHandler();

}  // namespace forebay::client
