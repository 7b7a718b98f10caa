// SPDX-License-Identifier: Apache-2.0
// A memfd with its mode and seals.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/os/unique_fd.h"

namespace forebay::pinned_mem::internal {

// Creates a memfd of exactly `size_bytes` bytes, without pages. Close-on-exec; not executable if the kernel supports that
// (6.3); mode 0400 if clients only read it, otherwise 0600. Sealed with SHRINK, GROW and SEAL: its size cannot change, and no
// process can add a seal that would stop its owner from writing or from freeing its pages.
//
// Errors  E_LIMIT     no more descriptors can be opened.
//         E_INTERNAL  a system call failed: which one, and its errno.
absl::StatusOr<protocol::UniqueFd> MakeMemfd(const std::string& name, uint64_t size_bytes,
                                             Access access);

// Checks that `fd` is a memfd that MakeMemfd() created in an earlier process of this user with the same arguments.
//
// Errors  E_CORRUPT   a property of the memfd differs; names it, with both values.
//         E_INTERNAL  as MakeMemfd.
absl::Status CheckMemfd(const protocol::UniqueFd& fd, const std::string& name, uint64_t size_bytes,
                        Access access);

// Returns the offset of the first page without memory in `parts`, which are ascending. Returns nothing if all pages have
// memory, in DRAM or in swap. Checks each page once.
//
// Errors  E_INTERNAL  the kernel does not say.
// Source  lseek(2) SEEK_HOLE.
absl::StatusOr<std::optional<uint64_t>> FindHole(const protocol::UniqueFd& fd,
                                                 std::span<const ArenaPart> parts);

// Opens the same memfd again. The new open file description shares no flags and locks with `fd`. `flags` is O_RDONLY or O_RDWR.
//
// Errors  as MakeMemfd.
absl::StatusOr<protocol::UniqueFd> Reopen(const protocol::UniqueFd& fd, int flags);

// Opens a memfd of mode 0400 again, with O_RDWR. During the call the memfd's owner can open it for writing. A process that has
// only a client's descriptor is not the owner.
absl::StatusOr<protocol::UniqueFd> ReopenWritable(const protocol::UniqueFd& fd);

// Frees a part's pages. Mappings stay valid and read as zeros. Returns false if the kernel refuses.
bool FreePages(int fd, const ArenaPart& part);

// Users of a memfd: open file descriptions from Reopen(), other than `reader_fd` of UseCheck, which is O_RDONLY itself. A
// mapping holds an open file description. Descriptions that are open with O_PATH are not found.
enum class OtherUsers { kNone, kSome, kUnknown };
class UseCheck {
 public:
  // Asks for a write lease, which the kernel refuses while other descriptions are open. While this object lives and has found
  // kNone, an open of the memfd waits.
  //
  // Source  fcntl(2) F_SETLEASE; fs/locks.c check_conflicting_open().
  explicit UseCheck(int reader_fd);
  UseCheck(const UseCheck&) = delete;
  UseCheck& operator=(const UseCheck&) = delete;
  ~UseCheck();

  OtherUsers result() const { return result_; }

 private:
  int fd_;
  OtherUsers result_;
};

}  // namespace forebay::pinned_mem::internal
