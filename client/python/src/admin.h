// SPDX-License-Identifier: Apache-2.0
// What tools show of a node, as dicts.
#pragma once

#include <nanobind/nanobind.h>

namespace forebay::python {

void BindAdmin(nanobind::module_& module);

}  // namespace forebay::python
