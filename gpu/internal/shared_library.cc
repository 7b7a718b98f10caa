// SPDX-License-Identifier: Apache-2.0
#include "gpu/internal/shared_library.h"

#include <dlfcn.h>

namespace forebay::gpu::internal {

absl::StatusOr<SharedLibrary> SharedLibrary::Open(const std::string& name) {
  void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return SharedLibrary(handle);
  const char* const cause = ::dlerror();
  return absl::NotFoundError(cause == nullptr ? name : cause);
}

void* SharedLibrary::Symbol(const char* name) const { return ::dlsym(handle_, name); }

}  // namespace forebay::gpu::internal
