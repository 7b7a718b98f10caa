// SPDX-License-Identifier: Apache-2.0
#include "tests/support/durable_run.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <iterator>

#include "daemon/core/blocks/block_map.h"
#include "daemon/exec/block_tasks.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "protocol/os/check.h"
#include "protocol/units.h"
#include "tests/support/durable_jobs.h"

namespace forebay::testing {
namespace {

using daemon::BlockMap;
using daemon::DurableBytes;
using daemon::DurableContent;
using daemon::DurableJob;

constexpr size_t kSlotsPerEntry = 3;

void Wait(nvme::Volume& volume, nvme::IoEngine& engine) {
  std::vector<nvme::Finished> finished;
  while (finished.empty()) {
    std::array<nvme::Completion, 16> completions;
    const auto count = engine.Wait(std::chrono::seconds(60), completions);
    FOREBAY_CHECK(count.ok() && *count > 0);
    for (size_t i = 0; i < *count; ++i) volume.OnCompletion(completions[i], finished);
  }
  FOREBAY_CHECK(finished[0].status.ok());
}

// Copy of a job without durable steps: only its layout and sizes.
DurableJob Unwritten(const DurableJob& job) {
  DurableJob fresh = job;
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  fresh.slot_bytes = protocol::RoundUp(map.full_block_bytes(), protocol::kPageBytes);
  fresh.blocks.assign(map.blocks(), std::nullopt);
  const uint64_t weights = daemon::WeightsInDram(*job.layout, job.weights_on_swap);
  fresh.weights.assign((weights + fresh.slot_bytes - 1) / fresh.slot_bytes, {});
  return fresh;
}

}  // namespace

FileBytes ReadFile(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

DurableRun::DurableRun(std::vector<std::string> dirs, uint64_t seed)
    : dirs_(std::move(dirs)), random_(seed), nonce_(random_()) {}

std::vector<nvme::PathOptions> DurableRun::paths() const {
  std::vector<nvme::PathOptions> paths;
  for (const std::string& dir : dirs_) {
    paths.push_back({.path = dir, .capacity_bytes = kPathBytes});
  }
  return paths;
}

std::string DurableRun::file(size_t path) const {
  return dirs_.at(path) + "/" + nvme::kSwapFileName;
}

const Bytes& DurableRun::Held(const nvme::Slot& slot, size_t commit) const {
  const auto& versions = history_.at(slot);
  return std::prev(versions.upper_bound(commit))->second;
}

std::unique_ptr<DurableRun> DurableRun::Write(const std::vector<std::string>& dirs, uint64_t seed,
                                              nvme::IoEngine& engine) {
  std::unique_ptr<DurableRun> run(new DurableRun(dirs, seed));
  const auto volume =
      nvme::Volume::Open({.paths = run->paths(), .ledger_bytes_max = kLedgerBytes}, engine);
  FOREBAY_CHECK(volume.ok());
  run->MakeJobs(**volume);
  for (size_t commit = 0; commit < kCommits; ++commit) run->CommitNext(**volume, engine);
  return run;
}

void DurableRun::MakeJobs(nvme::Volume& volume) {
  nvme::SlotMap free = volume.free_slots();
  for (const auto& job : MakeDurableNode(/*begin_bytes=*/0).jobs) {
    jobs_.push_back(Unwritten(*job));
    const DurableJob& made = jobs_.back();
    std::vector<Entry>& entries = entries_.emplace_back();
    for (size_t entry = 0; entry < made.blocks.size() + made.weights.size(); ++entry) {
      auto slots = free.Allocate(kSlotsPerEntry, made.slot_bytes);
      FOREBAY_CHECK(slots.has_value());
      entries.push_back({.slots = *std::move(slots)});
    }
  }
}

DurableBytes DurableRun::WriteEntry(nvme::Volume& volume, nvme::IoEngine& engine,
                                    const DurableJob& job, uint32_t entry, size_t commit) {
  Entry& of = entries_[static_cast<size_t>(&job - jobs_.data())][entry];
  const nvme::Slot slot = of.slots[of.writes++ % kSlotsPerEntry];
  DurableJob named = job;  // copy that names the new entry
  const auto blocks = static_cast<uint32_t>(job.blocks.size());
  DurableBytes made{.slot = slot, .written_step = job.step};
  if (entry < blocks) {
    named.blocks[entry] = made;
  } else {
    named.weights[entry - blocks] = made;
  }
  const DurableContent content(std::make_shared<const DurableJob>(std::move(named)));
  const DurableContent::Expected expected = *content.At(entry);
  Bytes bytes = Pattern(expected.bytes, ++patterns_ + (random_() << 20));
  const nvme::Identity identity = daemon::MakeIdentity(expected.identity, nonce_);
  made.checksum = nvme::Checksum(identity, bytes);
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  if (entry < blocks && map.has_weights(entry)) {
    nvme::PageDigests digests{std::span(bytes).subspan(map.weights_plane_offset(entry))};
    digests.Add(0, digests.pages());
    made.weights_digests = std::make_shared<const std::vector<uint64_t>>(digests.digests().begin(),
                                                                         digests.digests().end());
  }
  FOREBAY_CHECK(volume.Write(slot, bytes, /*token=*/1).ok());
  Wait(volume, engine);
  history_[slot].emplace(commit, std::move(bytes));
  return made;
}

void DurableRun::CommitNext(nvme::Volume& volume, nvme::IoEngine& engine) {
  const size_t commit = commits_.size();
  Commit& made = commits_.emplace_back();
  made.node.last_job = 12;
  for (DurableJob& job : jobs_) {
    job.step += 1 + random_() % 2;
    for (uint32_t entry = 0; entry < job.blocks.size() + job.weights.size(); ++entry) {
      const bool is_block = entry < job.blocks.size();
      const bool must = !is_block && commit == 0;
      const bool may = !is_block || entry % 5 != 4 || commit > 2;
      if (!must && (!may || random_() % 10 < 3)) continue;
      const DurableBytes bytes = WriteEntry(volume, engine, job, entry, commit);
      if (is_block) {
        job.blocks[entry] = bytes;
      } else {
        job.weights[entry - job.blocks.size()] = bytes;
      }
    }
    std::vector<std::vector<std::byte>> by_rank(2);
    by_rank[0].assign(100, static_cast<std::byte>(commit));
    job.extra_states =
        std::make_shared<const std::vector<std::vector<std::byte>>>(std::move(by_rank));
    std::ranges::fill(job.param_updates, job.step);
    made.node.jobs.push_back(std::make_shared<const DurableJob>(job));
  }
  const auto ledger = daemon::EncodeLedger(made.node, nonce_);
  FOREBAY_CHECK(ledger.ok());
  FOREBAY_CHECK(volume.CommitLedger(*ledger, daemon::SlotsOf(made.node), /*token=*/2).ok());
  Wait(volume, engine);
  for (size_t path = 0; path < kPaths; ++path) made.files.push_back(ReadFile(file(path)));
}

}  // namespace forebay::testing
