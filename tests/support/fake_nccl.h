// SPDX-License-Identifier: Apache-2.0
// NCCL over the driver of fake_cuda.h: a shared object with the real symbols. Ranks are threads of one
// process. A collective runs when every rank's stream has come to it; calls go on in the background as long
// as NCCL's may; each call can fail. What NCCL leaves undefined is a mistake of FakeCuda's.
#pragma once

#include <cstddef>
#include <string>

namespace forebay::testing {

class FakeNccl {
 public:
  static std::string Library();  // for dlopen(3)

  // For dlopen(3): NVIDIA's, loaded so that what it calls of itself is its own and not of the names that this library has
  // given to the process.
  static std::string RealLibrary();

  // Forgets everything. Behind FakeCuda::Start().
  static void Start();
  static void set_version(int version);  // 22105: 2.21.5

  // The call of this number, counted over all functions but those that name errors, fails with
  // ncclInternalError and does nothing.
  static void FailCall(size_t call);
  static size_t calls();
  static size_t communicators();  // that are alive
};

}  // namespace forebay::testing
