// SPDX-License-Identifier: Apache-2.0
// Goal    A probe of swap paths ends within its time limit, however slow the paths are, and returns their true rates.
// Method  A disk in virtual time that moves no bytes: it serves the requests of a path one after the other. The swap
//         files are real, but reserved alone.

#include "nvme/path_probe.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "nvme/io/io_engine.h"
#include "nvme/volume.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tests/nvme/temp_dir.h"
#include "tests/support/status_test.h"

namespace forebay::nvme::path_probe_test {
namespace {

using protocol::kMiB;
using TimePoint = std::chrono::steady_clock::time_point;
using Seconds = std::chrono::duration<double>;

constexpr std::chrono::seconds kLimit(8);
constexpr double kMb = 1e6;
constexpr double kFirstBytes = 256 << 10;

// Rates in bytes per second, and a latency in seconds of each request. Latencies of requests overlap.
struct DiskSpeed {
  double read = 0;
  double write = 0;
  double latency_seconds = 0;
};

class TimedDisk final : public IoEngine {
 public:
  explicit TimedDisk(DiskSpeed speed) : speed_(speed) {}

  // Sets the speed of the disk from `time` on.
  void ChangeAt(TimePoint time, DiskSpeed speed) {
    change_at_ = time;
    changed_ = speed;
  }
  TimePoint now() const { return now_; }
  TimePoint last_submitted() const { return last_submitted_; }
  uint64_t bytes() const { return bytes_; }

  std::string_view name() const override { return "timed"; }
  absl::StatusOr<FileIndex> RegisterFile(int /*fd*/) override { return AllocateFileIndex(); }
  void UnregisterFile(FileIndex file) override { ReleaseFileIndex(file); }
  bool RegisterBuffer(std::span<std::byte> /*bytes*/) override { return false; }
  void UnregisterBuffer(std::span<std::byte> /*bytes*/) override {}
  absl::Status Submit(const IoRequest& request) override {
    RETURN_IF_ERROR(Check(request));
    const DiskSpeed& speed = change_at_ && now_ >= *change_at_ ? changed_ : speed_;
    const double rate = request.kind == IoKind::kRead ? speed.read : speed.write;
    last_submitted_ = now_;
    bytes_ += request.size_bytes;
    TimePoint& free_at = free_at_[static_cast<size_t>(request.file)];
    free_at = std::max(now_, free_at) + Time(static_cast<double>(request.size_bytes) / rate);
    under_way_.push_back({.due = free_at + Time(speed.latency_seconds),
                          .completion = {.token = request.token,
                                         .result = static_cast<int64_t>(request.size_bytes),
                                         .kind = request.kind}});
    return absl::OkStatus();
  }
  absl::Status WatchEventFd(int /*fd*/, uint64_t /*token*/) override {
    return absl::UnimplementedError("a probe watches nothing");
  }
  void UnwatchEventFd(int /*fd*/) override {}
  absl::StatusOr<size_t> Wait(std::chrono::nanoseconds /*timeout*/,
                              std::span<Completion> out) override {
    if (under_way_.empty()) return absl::InternalError("waits for nothing");
    now_ = std::max(now_, under_way_.front().due);
    size_t count = 0;
    while (count < out.size() && !under_way_.empty() && under_way_.front().due <= now_) {
      out[count++] = under_way_.front().completion;
      under_way_.pop_front();
    }
    return count;
  }

 private:
  struct UnderWay {
    TimePoint due;
    Completion completion;
  };

  static std::chrono::nanoseconds Time(double seconds) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(seconds));
  }

  DiskSpeed speed_;
  DiskSpeed changed_;
  std::optional<TimePoint> change_at_;
  TimePoint now_ = TimePoint(std::chrono::hours(1));
  TimePoint last_submitted_;
  uint64_t bytes_ = 0;
  std::array<TimePoint, kFilesMax> free_at_{};
  std::deque<UnderWay> under_way_;  // requests of one path, in order of completion
};

class PathProbe : public ::testing::Test {
 protected:
  // Probes the paths and returns their rates. Afterwards the disk's clock stands at the end of the probe.
  std::vector<std::optional<PathRates>> Probe(TimedDisk& disk, size_t paths) {
    began_ = disk.now();
    VolumeOptions options;
    for (size_t i = 0; i < paths; ++i) {
      options.paths.push_back({.path = dir_.Make(std::to_string(i)), .capacity_bytes = 300 * kMiB});
    }
    auto volume = Volume::Open(options, disk);
    EXPECT_OK(volume);
    if (!volume.ok()) return {};
    auto rates = ProbeVolume(**volume, disk, began_ + kLimit, [&disk] { return disk.now(); });
    EXPECT_OK(rates);
    return rates.ok() ? *rates : std::vector<std::optional<PathRates>>();
  }
  double SecondsOf(const TimedDisk& disk) const { return Seconds(disk.now() - began_).count(); }

  const TempDir dir_;
  TimePoint began_;
};

TEST_F(PathProbe, EndsInItsTimeWithTheRatesOfAPathThatIsFastOrSlow) {
  for (const size_t paths : {size_t{1}, size_t{4}}) {
    for (const double read : {0.5, 1.0, 5.0, 10.0, 50.0, 200.0, 1000.0, 5000.0}) {
      for (const double write_share : {1.0, 0.1}) {
        SCOPED_TRACE(::testing::Message() << paths << " paths, " << read << " MB/s read, "
                                          << read * write_share << " written");
        const DiskSpeed speed{.read = read * kMb, .write = read * write_share * kMb};
        TimedDisk disk(speed);
        const auto rates = Probe(disk, paths);
        // A path's first request starts before its speed is known.
        const double first_seconds = kFirstBytes / speed.write;
        const bool fits = first_seconds <= 8.0 / static_cast<double>(paths);
        EXPECT_LE(SecondsOf(disk), fits ? 8.0 : 8.0 + first_seconds);
        ASSERT_EQ(rates.size(), paths);
        for (const auto& one : rates) {
          const bool is_fast = speed.write / static_cast<double>(paths) >= 5 * kMb;
          EXPECT_TRUE(one.has_value() || !is_fast);
          if (!one) continue;
          EXPECT_NEAR(one->read / speed.read, 1, 0.01);
          EXPECT_NEAR(one->write / speed.write, 1, 0.01);
          const double mixed = 2 / (1 / speed.read + 1 / speed.write);
          EXPECT_NEAR(one->mixed / mixed, 1, 0.1) << "a few requests more of one kind";
          EXPECT_NEAR(one->read_seconds * speed.read / static_cast<double>(kMiB), 1, 0.01);
        }
      }
    }
  }
}

TEST_F(PathProbe, ManyRequestsAtOnceAreTriedWhereOneWaitsLong) {
  for (const double latency_seconds : {0.0001, 0.002, 0.02}) {
    SCOPED_TRACE(latency_seconds);
    TimedDisk disk({.read = 400 * kMb, .write = 200 * kMb, .latency_seconds = latency_seconds});
    const auto rates = Probe(disk, 1);
    EXPECT_LE(SecondsOf(disk), 8.0);
    ASSERT_TRUE(rates.at(0).has_value());
    EXPECT_NEAR(rates[0]->read / (400 * kMb), 1, 0.05);
    const double alone = static_cast<double>(kMiB) / (400 * kMb) + latency_seconds;
    EXPECT_NEAR(rates[0]->read_seconds / alone, 1, 0.01);
  }
}

// Requests in flight at the limit end later; no request starts after the limit.
TEST_F(PathProbe, OfAPathThatBecomesSlowBeginsNothingAfterItsTime) {
  for (const double change_seconds : {0.01, 0.5, 2.0, 5.0, 7.0}) {
    SCOPED_TRACE(change_seconds);
    TimedDisk disk({.read = 1000 * kMb, .write = 1000 * kMb});
    disk.ChangeAt(disk.now() + std::chrono::milliseconds(static_cast<int>(change_seconds * 1000)),
                  {.read = 10 * kMb, .write = 10 * kMb});
    Probe(disk, 1);
    EXPECT_LE(disk.last_submitted() - began_, kLimit);
    constexpr double kInFlightBytes = 32.0 * kMiB;
    EXPECT_LE(SecondsOf(disk), 8.0 + kInFlightBytes / (10 * kMb));
  }
}

TEST_F(PathProbe, OfAPathThatIsTooSlowForOneRequestBeginsNoOther) {
  TimedDisk disk({.read = 1000, .write = 1000});
  EXPECT_FALSE(Probe(disk, 1).at(0).has_value());
  EXPECT_EQ(disk.bytes(), kMiB / 4);
}

}  // namespace
}  // namespace forebay::nvme::path_probe_test
