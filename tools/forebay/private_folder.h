// SPDX-License-Identifier: Apache-2.0
// Folders of one process, removed when it ends.
#pragma once

#include <filesystem>
#include <memory>

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::tools {

// A new folder that this user alone can enter; its destructor removes it with all that is in it.
//
// A process that is killed leaves it: then the next Create() in the same parent removes it, if nobody else has. What
// another boot has left stays, as it may be of another machine, where the file system is shared.
class PrivateFolder {
 public:
  // Errors  E_OPTION  it cannot be made inside `parent`.
  static absl::StatusOr<PrivateFolder> Create(const std::filesystem::path& parent);

  PrivateFolder(PrivateFolder&&) = default;
  PrivateFolder& operator=(PrivateFolder&&) = default;
  ~PrivateFolder();

  const std::filesystem::path& path() const { return *path_; }

 private:
  explicit PrivateFolder(std::filesystem::path path);

  std::unique_ptr<std::filesystem::path> path_;
  protocol::UniqueFd lock_;  // of a file in it, as long as this process lives
};

}  // namespace forebay::tools
