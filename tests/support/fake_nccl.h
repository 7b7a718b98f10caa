// SPDX-License-Identifier: Apache-2.0
// NCCL over the driver of fake_cuda.h: a shared object with the real symbols. Ranks are threads of one process. A collective
// runs once every rank's stream has reached it. Calls may stay in progress in the background as long as NCCL's may. Each call
// can fail. Use that NCCL leaves undefined is recorded as a mistake of FakeCuda.
#pragma once

#include <cstddef>
#include <string>

namespace forebay::testing {

class FakeNccl {
 public:
  static std::string Library();  // for dlopen(3)

  // Path of NVIDIA's library, for dlopen(3). The library is loaded so that its internal calls bind to its own symbols, although
  // this fake has defined the same names in the process.
  static std::string RealLibrary();

  // Forgets all state. Call after FakeCuda::Start().
  static void Start();
  static void set_version(int version);  // 22105: 2.21.5

  // Makes call number `call` fail with ncclInternalError without an effect. Counts all functions except those that name errors.
  static void FailCall(size_t call);
  static size_t calls();
  static size_t communicators();  // number of live communicators
};

}  // namespace forebay::testing
