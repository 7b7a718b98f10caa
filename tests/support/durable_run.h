// SPDX-License-Identifier: Apache-2.0
// Invented durable jobs that commit to a real volume. Records every block version and the volume's files after each commit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/core/base/durable_job.h"
#include "daemon/core/blocks/durable_content.h"
#include "nvme/checksum.h"
#include "nvme/io/io_engine.h"
#include "nvme/slot_map.h"
#include "nvme/volume.h"
#include "tests/support/pattern.h"

namespace forebay::testing {

// Contents of a whole file.
using FileBytes = std::vector<std::byte>;
FileBytes ReadFile(const std::string& file);

class DurableRun {
 public:
  static constexpr uint64_t kPathBytes = uint64_t{3} << 20;
  static constexpr uint64_t kLedgerBytes = uint64_t{64} << 10;
  static constexpr size_t kPaths = 2;
  static constexpr size_t kCommits = 5;

  // Makes the volume on two directories and commits to it. Later commits reuse slots, and some blocks stay unwritten. Equal
  // seeds give equal bytes, except the nonce and the volume's ids.
  static std::unique_ptr<DurableRun> Write(const std::vector<std::string>& dirs, uint64_t seed,
                                           nvme::IoEngine& engine);

  std::vector<nvme::PathOptions> paths() const;
  std::string file(size_t path) const;

  // The ledger's node and the files' bytes after each commit. The last commit's files are the current files.
  const daemon::DurableNode& node(size_t commit) const { return commits_.at(commit).node; }
  const std::vector<FileBytes>& files(size_t commit) const { return commits_.at(commit).files; }
  const std::vector<FileBytes>& files() const { return commits_.back().files; }
  // Contents of each slot's block by the commit that wrote them, oldest first. Slot bytes beyond the block are omitted.
  const std::map<nvme::Slot, std::map<size_t, Bytes>>& history() const { return history_; }
  // The block that a slot holds after a commit that names the slot.
  const Bytes& Held(const nvme::Slot& slot, size_t commit) const;

 private:
  struct Commit {
    daemon::DurableNode node;
    std::vector<FileBytes> files;
  };
  struct Entry {
    std::vector<nvme::Slot> slots;  // successive writes rotate through these slots
    size_t writes = 0;
  };

  DurableRun(std::vector<std::string> dirs, uint64_t seed);
  void MakeJobs(nvme::Volume& volume);
  daemon::DurableBytes WriteEntry(nvme::Volume& volume, nvme::IoEngine& engine,
                                  const daemon::DurableJob& job, uint32_t entry, size_t commit);
  void CommitNext(nvme::Volume& volume, nvme::IoEngine& engine);

  std::vector<std::string> dirs_;
  std::mt19937_64 random_;
  uint64_t patterns_ = 0;
  uint64_t nonce_;
  std::vector<daemon::DurableJob> jobs_;
  std::vector<std::vector<Entry>> entries_;  // by job
  std::vector<Commit> commits_;
  std::map<nvme::Slot, std::map<size_t, Bytes>> history_;
};

}  // namespace forebay::testing
