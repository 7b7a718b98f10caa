// SPDX-License-Identifier: Apache-2.0
// A library that is found at run time.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::gpu::internal {

// Never closed: what such a library starts (contexts, threads) lives as long as the process.
class SharedLibrary {
 public:
  // `name` as dlopen(3) takes it. The error is dlopen's text.
  static absl::StatusOr<SharedLibrary> Open(const std::string& name);

  // False where the library has no such function; `function` is null then.
  template <typename Function>
  bool Find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(Symbol(name));  // POSIX lets a program convert it
    return function != nullptr;
  }

 private:
  explicit SharedLibrary(void* handle) : handle_(handle) {}
  void* Symbol(const char* name) const;

  void* handle_;
};

}  // namespace forebay::gpu::internal
