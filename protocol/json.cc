// SPDX-License-Identifier: Apache-2.0
#include "protocol/json.h"

#include <kj/encoding.h>

#include <array>
#include <charconv>
#include <cmath>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace forebay::protocol {
namespace {

using capnp::DynamicValue;

void Append(capnp::Text::Reader text, std::string& json) {
  json += '"';
  for (char32_t code : kj::encodeUtf32(text)) {
    if (code >= 0xD800 && code < 0xE000) code = 0xFFFD;  // half of a surrogate pair
    if (code >= 0x20 && code < 0x7F && code != '"' && code != '\\') {
      json += static_cast<char>(code);
    } else if (code < 0x10000) {
      absl::StrAppendFormat(&json, "\\u%04x", static_cast<unsigned>(code));
    } else {
      absl::StrAppendFormat(&json, "\\u%04x\\u%04x", static_cast<unsigned>(0xD7C0 + (code >> 10)),
                            static_cast<unsigned>(0xDC00 + (code & 0x3FF)));
    }
  }
  json += '"';
}

void Append(double number, std::string& json) {
  if (!std::isfinite(number)) {
    json += "null";
    return;
  }
  std::array<char, 32> text{};
  json.append(text.data(), std::to_chars(text.begin(), text.end(), number).ptr);
}

std::string SnakeCase(capnp::Text::Reader name) {
  std::string key;
  for (const char letter : name) {
    if (absl::ascii_isupper(static_cast<unsigned char>(letter))) key += '_';
    key += absl::ascii_tolower(static_cast<unsigned char>(letter));
  }
  return key;
}

// Returns the fields in use. A field "obsolete14" only reserves its number.
std::vector<capnp::StructSchema::Field> FieldsOf(const capnp::DynamicStruct::Reader& object) {
  std::vector<capnp::StructSchema::Field> fields;
  for (const auto field : object.getSchema().getFields()) {
    if (!field.getProto().getName().startsWith("obsolete")) fields.push_back(field);
  }
  return fields;
}

void Append(const DynamicValue::Reader& value, const std::string& indent, std::string& json);

// `items` between brackets, a line each.
template <typename Items, typename AppendItem>
void AppendAll(const char* brackets, const Items& items, const std::string& indent,
               std::string& json, AppendItem append) {
  json += brackets[0];
  const char* separator = "\n";
  for (const auto item : items) {
    absl::StrAppend(&json, separator, indent, "  ");
    append(item);
    separator = ",\n";
  }
  if (items.size() > 0) absl::StrAppend(&json, "\n", indent);
  json += brackets[1];
}

void Append(const DynamicValue::Reader& value, const std::string& indent, std::string& json) {
  const std::string deeper = indent + "  ";
  switch (value.getType()) {
    case DynamicValue::BOOL:
      json += value.as<bool>() ? "true" : "false";
      return;
    case DynamicValue::INT:
      return absl::StrAppend(&json, value.as<int64_t>());
    case DynamicValue::UINT:
      return absl::StrAppend(&json, value.as<uint64_t>());
    case DynamicValue::FLOAT:
      return Append(value.as<double>(), json);
    case DynamicValue::TEXT:
      return Append(value.as<capnp::Text>(), json);
    case DynamicValue::LIST:
      return AppendAll("[]", value.as<capnp::DynamicList>(), indent, json,
                       [&](const DynamicValue::Reader& item) { Append(item, deeper, json); });
    case DynamicValue::STRUCT: {
      const auto object = value.as<capnp::DynamicStruct>();
      return AppendAll("{}", FieldsOf(object), indent, json, [&](capnp::StructSchema::Field field) {
        absl::StrAppend(&json, "\"", SnakeCase(field.getProto().getName()), "\": ");
        Append(object.get(field), deeper, json);
      });
    }
    default:  // kinds that no message has
      json += "null";
  }
}

}  // namespace

std::string JsonOf(const DynamicValue::Reader& value) {
  std::string json;
  Append(value, "", json);
  return json;
}

}  // namespace forebay::protocol
