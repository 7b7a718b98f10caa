// SPDX-License-Identifier: Apache-2.0
// Messages of the schema as JSON.
#pragma once

#include <capnp/dynamic.h>

#include <string>

namespace forebay::protocol {

// A struct or a list as indented JSON: keys are the schema's names in snake_case, in its order;
// integers are exact, doubles read back as they are. Fields named "obsolete..." are left out. What is no UTF-8 in a text becomes U+FFFD.
std::string JsonOf(const capnp::DynamicValue::Reader& value);

}  // namespace forebay::protocol
