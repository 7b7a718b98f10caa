// SPDX-License-Identifier: Apache-2.0
// Messages of the schema as JSON.
#pragma once

#include <capnp/dynamic.h>

#include <string>

namespace forebay::protocol {

// Encodes a struct or a list as indented JSON. Keys are the schema's names in snake_case, in the schema's order. Integers are
// exact, and doubles parse back to the same value. Fields named "obsolete..." are omitted. Bytes of a text that are not UTF-8
// become U+FFFD.
std::string JsonOf(const capnp::DynamicValue::Reader& value);

}  // namespace forebay::protocol
