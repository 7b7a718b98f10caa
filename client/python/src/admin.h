// SPDX-License-Identifier: Apache-2.0
// Binds the calls of tools: a node's status, and a job's trace, plan and deletion. Results are dicts and lists.
#pragma once

#include <nanobind/nanobind.h>

namespace forebay::python {

void BindAdmin(nanobind::module_& module);

}  // namespace forebay::python
