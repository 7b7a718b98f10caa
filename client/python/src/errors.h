// SPDX-License-Identifier: Apache-2.0
// Python's exceptions for our statuses: one class a family, each with .code, .hint and .retryable.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::python {

void BindErrors(nanobind::module_& module);

// Raises `status` as a Python exception. If a Python signal handler raised inside the call, that exception is raised instead.
//
// Threads  Holds the GIL.
[[noreturn]] void Raise(const absl::Status& status);

// Runs `call` without the GIL. Returns the result of the call.
template <typename Call>
auto WithoutGil(Call call) {
  const nanobind::gil_scoped_release released;
  return call();
}

inline void Check(const absl::Status& status) {
  if (!status.ok()) Raise(status);
}

template <typename T>
T ValueOrThrow(absl::StatusOr<T> value) {
  if (!value.ok()) Raise(value.status());
  return *std::move(value);
}

}  // namespace forebay::python
