// SPDX-License-Identifier: Apache-2.0
// GoogleTest macros for absl::Status and absl::StatusOr. Failures print the whole error.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::testing {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }

template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

inline ::testing::AssertionResult IsOk(const absl::Status& status) {
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << status << "\n" << protocol::FormatError(status);
}

// EXPECT_THAT(status, HasError(ErrorId::kBusy)); also for a StatusOr.
MATCHER_P(HasError, id, protocol::Info(id).name.data()) {
  *result_listener << StatusOf(arg);
  return !StatusOf(arg).ok() && protocol::IdOf(StatusOf(arg)) == id;
}

// EXPECT_THAT(status, HasCode(absl::StatusCode::kFailedPrecondition)); also for a StatusOr.
MATCHER_P(HasCode, code, absl::StatusCodeToString(code)) {
  *result_listener << StatusOf(arg);
  return StatusOf(arg).code() == code;
}

}  // namespace forebay::testing

#define EXPECT_OK(expression) \
  EXPECT_TRUE(::forebay::testing::IsOk(::forebay::testing::StatusOf(expression)))
#define ASSERT_OK(expression) \
  ASSERT_TRUE(::forebay::testing::IsOk(::forebay::testing::StatusOf(expression)))

// ASSERT_OK_AND_ASSIGN(auto x, F()): declares or assigns the left side, or fails the test.
#define ASSERT_OK_AND_ASSIGN(left, expression) \
  ASSERT_OK_AND_ASSIGN_INNER(FOREBAY_CONCAT(forebay_test_or_, __LINE__), left, expression)
#define ASSERT_OK_AND_ASSIGN_INNER(name, left, expression)             \
  auto name = (expression);                                            \
  ASSERT_TRUE(::forebay::testing::IsOk(name.status())) << #expression; \
  left = *std::move(name)
