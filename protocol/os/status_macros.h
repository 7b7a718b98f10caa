// SPDX-License-Identifier: Apache-2.0
// Early return on an error Status; the only macros that hide control flow.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define FOREBAY_CONCAT_INNER(a, b) a##b
#define FOREBAY_CONCAT(a, b) FOREBAY_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expression)                  \
  do {                                               \
    absl::Status forebay_status = (expression);      \
    if (!forebay_status.ok()) return forebay_status; \
  } while (false)

// ASSIGN_OR_RETURN(auto x, F()): declares or assigns the left side from a StatusOr, or returns its
// status.
#define ASSIGN_OR_RETURN(left, expression) \
  ASSIGN_OR_RETURN_INNER(FOREBAY_CONCAT(forebay_or_, __LINE__), left, expression)
#define ASSIGN_OR_RETURN_INNER(name, left, expression) \
  auto name = (expression);                            \
  if (!name.ok()) return std::move(name).status();     \
  left = *std::move(name)
