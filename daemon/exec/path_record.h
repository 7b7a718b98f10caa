// SPDX-License-Identifier: Apache-2.0
// Small TOML files about swap paths that outlive the daemon: private to what keeps them.
#pragma once

#include <toml++/toml.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace forebay::daemon {

// Where the records of one swap path are, and of which device they are.
struct RecordPlace {
  std::string prefix;  // "/swap/forebay."
  int64_t device = 0;

  std::string File(std::string_view name) const;  // "/swap/forebay.rates.toml"
};

// Of a directory: beside its data. Of a block device: in `state_folder`, by what the disk says of itself, or by its
// name and size where it says nothing. Nothing: there is no such path, or no state folder ("").
std::optional<RecordPlace> RecordPlaceOf(const std::string& path, const std::string& state_folder);

// Nothing where there is none, or it is of another version or device; one that is broken is logged.
std::optional<toml::table> LoadRecord(const RecordPlace& place, std::string_view name);

// Replaces it: lines of `comment`, then of `values`. What fails is logged. Blocks, but does not wait for the disk.
void SaveRecord(const RecordPlace& place, std::string_view name, std::string_view comment,
                std::string_view values);

}  // namespace forebay::daemon
