// SPDX-License-Identifier: Apache-2.0
// Small TOML files about swap paths that outlive the daemon. Their contents are private to the callers.
#pragma once

#include <toml++/toml.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace forebay::daemon {

// Place of the records of one swap path, and the device that they describe.
struct RecordPlace {
  std::string prefix;  // "/swap/forebay."
  int64_t device = 0;

  std::string File(std::string_view name) const;  // "/swap/forebay.rates.toml"
};

// Returns the place of a path's records. The records of a directory are in that directory. The records of a block device are in
// `state_folder`, under the identity of the disk, or under the device's name if the disk states no identity; `device` is then
// the size in sectors. Returns nothing if the path is neither a directory nor a block device, or if `state_folder` is empty for
// a block device.
std::optional<RecordPlace> RecordPlaceOf(const std::string& path, const std::string& state_folder);

// Returns the record `name`. Returns nothing if no such record exists, if the record is of another version or device, or if it
// cannot be parsed (logged).
std::optional<toml::table> LoadRecord(const RecordPlace& place, std::string_view name);

// Replaces the record `name` by the lines of `comment`, then of `values`. Failures are logged. Blocks, but does not wait for
// the disk.
void SaveRecord(const RecordPlace& place, std::string_view name, std::string_view comment,
                std::string_view values);

}  // namespace forebay::daemon
