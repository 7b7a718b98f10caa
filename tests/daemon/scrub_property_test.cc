// SPDX-License-Identifier: Apache-2.0
// Goal    No corruption of a stopped volume is silent. The volume is refused, or exactly the damaged slots are named, or an
//         older ledger is used and reported. Otherwise every slot that a job recovers from holds the bytes that were written.
// Method  A run of generated durable jobs on real files, with the content of every slot known after every commit. One
//         corruption at a time, from a printed seed: bits, pages, misdirected and lost writes, cut files, files of other
//         volumes and of earlier commits, and both copies of a ledger or a record. FOREBAY_CORRUPTIONS sets the number of
//         corruptions (300), and FOREBAY_SEED another seed.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "daemon/core/blocks/durable_content.h"
#include "daemon/exec/offline_scrub.h"
#include "gtest/gtest.h"
#include "nvme/internal/disk_format.h"
#include "nvme/io/engine_factory.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/unique_fd.h"
#include "protocol/units.h"
#include "tests/support/daemon_process.h"
#include "tests/support/durable_run.h"
#include "tests/support/pattern.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

using protocol::kPageBytes;
using testing::DurableRun;
using testing::FileBytes;
using testing::Pattern;

constexpr size_t kLast = DurableRun::kCommits - 1;
constexpr size_t kNever = DurableRun::kCommits;

// A range of bytes of a path.
struct Region {
  size_t path = 0;
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
};

// Number of corruptions of one kind, by outcome.
struct Outcomes {
  uint64_t refused = 0;  // Volumes refused with an error that gives the cause.
  uint64_t named = 0;    // Volumes whose damaged slots were named.
  // Volumes without damaged slots, reported as using an older ledger, certainly or possibly.
  uint64_t fell_back = 0;
  uint64_t harmless = 0;
  // Volumes in which a slot that a job recovers from holds other bytes than were written.
  uint64_t changed = 0;
};

bool Same(const DurableBytes& a, const DurableBytes& b) {
  return a.slot == b.slot && a.checksum == b.checksum && a.written_step == b.written_step;
}

bool Same(const DurableJob& a, const DurableJob& b) {
  if (a.id != b.id || a.name != b.name || a.step != b.step || a.blocks.size() != b.blocks.size() ||
      a.param_updates != b.param_updates || *a.extra_states != *b.extra_states) {
    return false;
  }
  for (size_t i = 0; i < a.blocks.size(); ++i) {
    if (a.blocks[i].has_value() != b.blocks[i].has_value()) return false;
    if (a.blocks[i] && !Same(*a.blocks[i], *b.blocks[i])) return false;
  }
  return std::ranges::equal(a.weights, b.weights,
                            [](const auto& one, const auto& other) { return Same(one, other); });
}

class Campaign {
 public:
  Campaign(const testing::TempDir& dir, uint64_t seed, nvme::IoEngine& engine)
      : engine_(engine),
        random_(seed),
        run_(DurableRun::Write({dir.Make("a"), dir.Make("b")}, seed, engine)),
        other_(DurableRun::Write({dir.Make("other_a"), dir.Make("other_b")}, seed + 1, engine)),
        now_(run_->files()) {
    for (size_t commit = 0; commit < kLast; ++commit) {
      for (size_t path = 0; path < DurableRun::kPaths; ++path) {
        const std::string name = "past_" + std::to_string(commit) + std::to_string(path);
        past_[commit].push_back(dir.Make(name));
        WriteFile(past_[commit].back() + "/" + nvme::kSwapFileName, run_->files(commit)[path]);
      }
    }
    std::set<nvme::Slot> named;
    for (const auto& job : run_->node(kLast).jobs) {
      for (const nvme::Slot& slot : job->Slots()) named.insert(slot);
    }
    for (const auto& [slot, versions] : run_->history()) {
      auto& slots = named.contains(slot) ? named_slots_ : superseded_slots_;
      slots.push_back({slot.path, slot.offset_bytes, versions.begin()->second.size()});
    }
    const std::array<uint64_t, 2> capacity_bytes = {DurableRun::kPathBytes, DurableRun::kPathBytes};
    const nvme::internal::Geometry geometry(capacity_bytes, DurableRun::kLedgerBytes);
    for (uint32_t copy = 0; copy < 2; ++copy) {
      for (uint32_t path = 0; path < DurableRun::kPaths; ++path) {
        labels_.push_back(RegionOf(geometry.LabelPlace(path, copy), kPageBytes));
      }
      for (uint32_t area = 0; area < 2; ++area) {
        records_[area].push_back(RegionOf(geometry.RecordPlace(area, copy), kPageBytes));
        areas_[area].push_back(RegionOf(geometry.AreaPlace(area, copy), LedgerBytes()));
      }
    }
    const auto content = [](const auto& job) { return DurableContent(job); };
    for (size_t commit = 0; commit <= kLast; ++commit) {
      for (const auto& job : run_->node(commit).jobs) contents_[commit].push_back(content(job));
    }
  }

  // Applies one corruption, scrubs and undoes the corruption. Returns the fault found in the scrub's report; empty if none.
  std::string Try() {
    kind_ = PickKind();
    paths_ = run_->paths();
    files_ = {&now_[0], &now_[1]};
    Corrupt();
    const absl::StatusOr<ScrubReport> report = ScrubPaths(paths_, engine_);
    const std::string fault = Judge(report);
    Undo();
    return fault;
  }

  // True if the volume is clean and has its original bytes.
  bool IsClean() {
    const auto report = ScrubPaths(run_->paths(), engine_);
    return report.ok() && report->is_clean() && report->jobs.size() == 4 &&
           FindCommit(*report) == kLast && testing::ReadFile(run_->file(0)) == run_->files()[0] &&
           testing::ReadFile(run_->file(1)) == run_->files()[1];
  }

  const std::map<std::string, Outcomes>& outcomes() const { return outcomes_; }

 private:
  static Region RegionOf(const nvme::internal::Place& place, uint64_t bytes) {
    return {place.path, place.offset_bytes, bytes};
  }
  // Approximate bytes of the longest ledger. Bytes behind the ledger are not scrubbed.
  static uint64_t LedgerBytes() { return DurableRun::kLedgerBytes / 2; }

  static void WriteFile(const std::string& name, std::span<const std::byte> bytes,
                        uint64_t offset_bytes = 0) {
    const protocol::UniqueFd file(::open(name.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const auto written =
        ::pwrite(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes));
    FOREBAY_CHECK(written == static_cast<ssize_t>(bytes.size()));
  }

  uint64_t Below(uint64_t bound) { return random_() % bound; }
  template <typename T>
  const T& Any(const std::vector<T>& list) {
    return list[Below(list.size())];
  }

  std::string PickKind() {
    static const std::vector<std::pair<const char*, uint64_t>> kKinds = {
        {"bit", 22}, {"page", 20}, {"misdirected", 20}, {"stale", 20},
        {"cut", 6},  {"files", 2}, {"both copies", 10}};
    uint64_t share = Below(100);
    for (const auto& [kind, percent] : kKinds) {
      if (share < percent) return kind;
      share -= percent;
    }
    return "bit";
  }

  Region AnySlot() { return Any(Below(4) > 0 ? named_slots_ : superseded_slots_); }
  Region AnyRegion() {
    const uint64_t share = Below(10);
    if (share < 5) return AnySlot();
    if (share == 5) return Any(labels_);
    if (share == 6) return Any(records_[Below(2)]);
    if (share <= 8) return Any(areas_[Below(2)]);
    return {Below(DurableRun::kPaths), Below(DurableRun::kPathBytes / kPageBytes) * kPageBytes,
            kPageBytes};
  }
  Region PageOf(const Region& region) {
    return {region.path, region.offset_bytes + Below(region.bytes / kPageBytes) * kPageBytes,
            kPageBytes};
  }

  // ------------------------------------------------------------------------------------ corruptions

  void Change(size_t path, uint64_t offset_bytes, std::span<const std::byte> bytes) {
    const uint64_t room = DurableRun::kPathBytes - offset_bytes;
    const std::span<const std::byte> put = bytes.first(std::min<uint64_t>(bytes.size(), room));
    const auto at = now_[path].begin() + static_cast<ptrdiff_t>(offset_bytes);
    undo_.push_back({path, offset_bytes, FileBytes(at, at + static_cast<ptrdiff_t>(put.size()))});
    std::ranges::copy(put, at);
    WriteFile(run_->file(path), put, offset_bytes);
  }
  std::span<const std::byte> Bytes(const Region& region) const {
    return std::span(now_[region.path]).subspan(region.offset_bytes, region.bytes);
  }

  void Corrupt() {
    if (kind_ == "bit") return FlipBit(AnyRegion());
    if (kind_ == "page") return OverwritePage(PageOf(AnyRegion()));
    if (kind_ == "misdirected") return Misdirect();
    if (kind_ == "stale") return Restore();
    if (kind_ == "cut") return Cut();
    if (kind_ == "files") return ExchangeFiles();
    DamageBothCopies();
  }

  void FlipBit(const Region& region) {
    const uint64_t at = region.offset_bytes + Below(region.bytes);
    const std::byte flipped = now_[region.path][at] ^ (std::byte{1} << Below(8));
    Change(region.path, at, {&flipped, 1});
  }

  void OverwritePage(const Region& page) {
    auto bytes = Pattern(kPageBytes, random_());
    const uint64_t how = Below(4);
    if (how < 2) std::ranges::fill(bytes, how == 0 ? std::byte{0} : std::byte{255});
    const uint64_t sectors = how == 3 ? 1 + Below(7) : 8;  // torn
    Change(page.path, page.offset_bytes, std::span(bytes).first(sectors * 512));
  }

  // Copies a region's bytes over another region, or exchanges the bytes of two slots.
  void Misdirect() {
    const Region from = AnyRegion();
    const auto span = Bytes(from);
    const FileBytes bytes(span.begin(), span.end());
    const Region to = AnyRegion();
    if (Below(2) == 0) {
      const Region one = AnySlot();
      const Region other = AnySlot();
      const FileBytes of_one(Bytes(one).begin(), Bytes(one).end());
      const FileBytes of_other(Bytes(other).begin(), Bytes(other).end());
      Change(one.path, one.offset_bytes, of_other);
      return Change(other.path, other.offset_bytes, of_one);
    }
    Change(to.path, to.offset_bytes, bytes);
  }

  // Makes a write lost: restores the earlier bytes of a slot, of one of its pages, or of one copy of a record, a label or a
  // ledger.
  void Restore() {
    const Region region = Below(4) > 0 ? AnySlot() : AnyRegion();
    const Region lost = Below(2) == 0 ? region : PageOf(region);
    const FileBytes& old = run_->files(Below(kLast))[lost.path];
    Change(lost.path, lost.offset_bytes, std::span(old).subspan(lost.offset_bytes, lost.bytes));
  }

  void Cut() {
    const size_t path = Below(DurableRun::kPaths);
    uint64_t length = Below(DurableRun::kPathBytes);
    if (Below(4) > 0) length = DurableRun::kPathBytes - 1 - Below(64 << 10);
    if (Below(2) == 0) length = length / kPageBytes * kPageBytes;
    cut_ = {path, length};
    FOREBAY_CHECK(::truncate(run_->file(path).c_str(), static_cast<off_t>(length)) == 0);
  }

  // Replaces one path by a file of another volume or of an earlier commit, or exchanges the two paths. Never replaces both
  // paths by files of one earlier commit, because those are an intact volume.
  void ExchangeFiles() {
    const size_t path = Below(DurableRun::kPaths);
    const uint64_t how = Below(4);
    if (how == 0) {
      std::swap(paths_[0], paths_[1]);
      std::swap(files_[0], files_[1]);
    } else if (how == 1) {
      paths_[path] = other_->paths()[path];
      files_[path] = &other_->files()[path];
    } else {
      const size_t commit = Below(kLast);
      paths_[path].path = past_[commit][path];
      files_[path] = &run_->files(commit)[path];
    }
  }

  void DamageBothCopies() {
    const auto& regions = Below(2) == 0 ? records_[Below(2)] : areas_[Below(2)];
    for (const Region& region : regions) {
      if (Below(2) == 0) {
        FlipBit({region.path, region.offset_bytes, std::min<uint64_t>(region.bytes, 80)});
      } else {
        OverwritePage({region.path, region.offset_bytes, kPageBytes});
      }
    }
  }

  void Undo() {
    if (cut_) {
      const auto& [path, length] = *cut_;
      WriteFile(run_->file(path), std::span(now_[path]).subspan(length), length);
      cut_.reset();
    }
    for (; !undo_.empty(); undo_.pop_back()) {
      const auto& [path, offset_bytes, bytes] = undo_.back();
      std::ranges::copy(bytes, now_[path].begin() + static_cast<ptrdiff_t>(offset_bytes));
      WriteFile(run_->file(path), bytes, offset_bytes);
    }
  }

  // ------------------------------------------------------------------------------------ judgement

  size_t FindCommit(const ScrubReport& report) const {
    for (size_t commit = 0; commit <= kLast; ++commit) {
      const bool same = std::ranges::equal(
          run_->node(commit).jobs, report.jobs,
          [](const auto& job, const ScrubbedJob& found) { return Same(*job, *found.job); });
      if (same) return commit;
    }
    return kNever;
  }

  bool Holds(const nvme::Slot& slot, const testing::Bytes& bytes) const {
    if (cut_ && cut_->first == slot.path && slot.offset_bytes + bytes.size() > cut_->second) {
      return false;
    }
    const auto at = files_[slot.path]->begin() + static_cast<ptrdiff_t>(slot.offset_bytes);
    return std::equal(bytes.begin(), bytes.end(), at);
  }

  // Returns the slots of the newest ledger whose content differs from what was written.
  std::set<nvme::Slot> Changed(size_t commit) const {
    std::set<nvme::Slot> changed;
    for (const DurableContent& content : contents_.at(commit)) {
      for (uint32_t entry = 0; entry < content.entries(); ++entry) {
        const auto expected = content.At(entry);
        if (!expected || Holds(expected->slot, run_->Held(expected->slot, commit))) continue;
        changed.insert(expected->slot);
      }
    }
    return changed;
  }

  std::string Judge(const absl::StatusOr<ScrubReport>& report) {
    Outcomes& outcomes = outcomes_[kind_];
    outcomes.changed += Changed(kLast).empty() ? 0 : 1;
    if (!report.ok()) {
      ++outcomes.refused;
      const std::string text(report.status().message());
      const bool says_why = protocol::IdOf(report.status()) != protocol::ErrorId::kNone &&
                            text.find("swap") != std::string::npos;
      return says_why ? "" : "an error that does not say why: " + text;
    }
    const size_t commit = FindCommit(*report);
    if (commit == kNever) return "jobs that no commit has left";
    const bool said = report->recovery.fell_back;
    if (commit != kLast && !said) return "an older ledger, and nothing is said";
    if (commit + 1 < kLast) return "a ledger before the one before the newest";
    std::set<nvme::Slot> named;
    for (const ScrubbedJob& job : report->jobs) {
      for (const DamagedSlot& damage : job.damaged) {
        named.insert(damage.slot);
        if (damage.params.empty()) return damage.what + " without parameters";
        if (damage.path != paths_[damage.slot.path].path + "/" + nvme::kSwapFileName) {
          return damage.what + " on " + damage.path;
        }
      }
    }
    const std::set<nvme::Slot> changed = Changed(commit);
    if (std::ranges::includes(named, changed) && !std::ranges::includes(changed, named)) {
      return "a slot is named that holds what was written";
    }
    if (named != changed) return "a slot holds something else, and is not named";
    if (report->is_clean() != (named.empty() && !said)) return "clean or not, it says otherwise";
    ++(!named.empty() ? outcomes.named : said ? outcomes.fell_back : outcomes.harmless);
    return "";
  }

  nvme::IoEngine& engine_;
  std::mt19937_64 random_;
  const std::unique_ptr<const DurableRun> run_;
  const std::unique_ptr<const DurableRun> other_;
  std::array<std::vector<std::string>, kLast> past_;  // directories, by commit and path
  std::vector<FileBytes> now_;
  std::vector<Region> named_slots_;  // Slots named by the newest ledger.
  std::vector<Region> superseded_slots_;
  std::vector<Region> labels_;
  // Both copies of the record at each of the two places.
  std::array<std::vector<Region>, 2> records_;
  std::array<std::vector<Region>, 2> areas_;
  // Content by commit and job.
  std::array<std::vector<DurableContent>, DurableRun::kCommits> contents_;

  // State of the current corruption.
  std::string kind_;
  std::vector<nvme::PathOptions> paths_;
  std::array<const FileBytes*, DurableRun::kPaths> files_{};
  struct Undone {
    size_t path;
    uint64_t offset_bytes;
    FileBytes bytes;
  };
  std::vector<Undone> undo_;
  std::optional<std::pair<size_t, uint64_t>> cut_;  // path and length
  std::map<std::string, Outcomes> outcomes_;
};

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const chosen = std::getenv(name);
  return chosen == nullptr ? otherwise : std::strtoull(chosen, nullptr, 10);
}

TEST(ScrubProperty, NoCorruptionIsSilent) {
  const uint64_t corruptions = FromEnvironment("FOREBAY_CORRUPTIONS", 300);
  const uint64_t seed = FromEnvironment("FOREBAY_SEED", 20);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  ASSERT_OK_AND_ASSIGN(const nvme::ChosenEngine chosen, nvme::CreateIoEngine());
  const testing::TempDir dir;
  Campaign campaign(dir, seed, *chosen.engine);
  ASSERT_TRUE(campaign.IsClean());
  for (uint64_t i = 0; i < corruptions; ++i) {
    const std::string fault = campaign.Try();
    ASSERT_EQ(fault, "") << "seed " << seed << ", corruption " << i;
  }
  ASSERT_TRUE(campaign.IsClean());
  uint64_t changed = 0;
  std::printf("%-12s %8s %8s %8s %10s %9s %8s\n", "kind", "tried", "refused", "named", "fell back",
              "harmless", "changed");
  for (const auto& [kind, of] : campaign.outcomes()) {
    const uint64_t tried = of.refused + of.named + of.fell_back + of.harmless;
    std::printf("%-12s %8lu %8lu %8lu %10lu %9lu %8lu\n", kind.c_str(), tried, of.refused, of.named,
                of.fell_back, of.harmless, of.changed);
    changed += of.changed;
  }
  EXPECT_EQ(campaign.outcomes().size(), 7U) << "a kind was never tried";
  EXPECT_GT(changed, corruptions / 10) << "without verification these would be silent";
}

}  // namespace
}  // namespace forebay::daemon
