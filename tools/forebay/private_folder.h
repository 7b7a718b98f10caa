// SPDX-License-Identifier: Apache-2.0
// Private folders of a process, removed when the process ends.
#pragma once

#include <filesystem>
#include <memory>

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::tools {

// A new folder that only this user can enter. The destructor removes the folder and its content.
//
// The folder of a killed process remains until the next Create() in the same parent removes it. Folders of another boot are
// not removed: on a shared file system they may belong to another machine.
class PrivateFolder {
 public:
  // Errors  E_OPTION  the folder cannot be created inside `parent`.
  static absl::StatusOr<PrivateFolder> Create(const std::filesystem::path& parent);

  PrivateFolder(PrivateFolder&&) = default;
  PrivateFolder& operator=(PrivateFolder&&) = default;
  ~PrivateFolder();

  const std::filesystem::path& path() const { return *path_; }

 private:
  explicit PrivateFolder(std::filesystem::path path);

  std::unique_ptr<std::filesystem::path> path_;
  protocol::UniqueFd lock_;  // lock on a file in the folder
};

}  // namespace forebay::tools
