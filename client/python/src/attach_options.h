// SPDX-License-Identifier: Apache-2.0
// The options of an attach, from Python's mapping.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "client/client.h"
#include "client/python/src/ended_objects.h"

namespace forebay::python {

// Makes the options from a mapping of names to values. An option that is not in the mapping has its default. `ended` gets the
// callable of "nodes" when the options are destroyed.
//
// Errors  Raises E_OPTION with the name if no such option exists, or if the value has another type. The errors of the values.
client::AttachOptions AttachOptionsFrom(const nanobind::dict& mapping,
                                        const std::shared_ptr<EndedObjects>& ended);

}  // namespace forebay::python
