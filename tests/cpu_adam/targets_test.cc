// SPDX-License-Identifier: Apache-2.0
// Goal    The best instruction set is used, each one can be forced, and the tests really cover all of them.
// Method  Compare the list with the processor's own feature flags; force every entry and a wrong name.

#include "cpu_adam/targets.h"

#include "gmock/gmock.h"
#include "protocol/error.h"
#include "tests/cpu_adam/planes.h"

namespace forebay::cpu_adam {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

TEST(Targets, ScalarIsAlwaysThereAndLast) { EXPECT_EQ(SupportedTargets().back(), "scalar"); }

TEST(Targets, AnX86ProcessorWithAvx2HasAtLeastTwo) {
  for (const std::string& name : SupportedTargets()) {
    std::printf("[ target ] %s\n", name.c_str());
  }
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    EXPECT_THAT(SupportedTargets(), Contains("avx2"));
    EXPECT_GE(SupportedTargets().size(), 2u);
  }
#ifndef FOREBAY_KERNELS_WITHOUT_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    EXPECT_THAT(SupportedTargets(), Contains("avx3"));
  }
#endif
#endif
}

TEST(Targets, TheBestIsChosenUnlessAnotherIsForced) {
  testing::TargetGuard guard;
  EXPECT_EQ(ChosenTarget(), SupportedTargets().front());
  for (const std::string& name : SupportedTargets()) {
    guard.Force(name);
    EXPECT_EQ(ChosenTarget(), name);
  }
  guard.Force("");
  EXPECT_EQ(ChosenTarget(), SupportedTargets().front());
}

TEST(Targets, AnUnknownNameIsRefusedAndChangesNothing) {
  const std::string before = ChosenTarget();
  const absl::Status status = ForceTarget("mmx");
  EXPECT_EQ(protocol::IdOf(status), protocol::ErrorId::kOption);
  EXPECT_THAT(std::string(status.message()), HasSubstr("scalar"));
  EXPECT_EQ(ChosenTarget(), before);
}

}  // namespace
}  // namespace forebay::cpu_adam
