// SPDX-License-Identifier: Apache-2.0
// Goal    On the machine's own file system a volume is O_DIRECT, reserved, private and locked. A path that cannot hold swap is
//         refused with its index and numbers, before any work starts.
// Method  Real directories in the build tree, both engines, a second process for the lock. What a
//         machine cannot show (no tmpfs, no loop device) is skipped with its reason.

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/io/engine_factory.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "protocol/os/unique_fd.h"
#include "tests/nvme/temp_dir.h"
#include "tests/nvme/volume_world.h"
#include "tests/support/block_devices.h"
#include "tests/support/pattern.h"
#include "tests/support/status_test.h"

namespace forebay::nvme::volume_files_test {
namespace {

using ::forebay::testing::HasError;
using protocol::ErrorId;
using protocol::UniqueFd;
using ::testing::HasSubstr;

constexpr uint64_t kPathBytes = 1 << 20;
constexpr uid_t kNobody = 65534;

class VolumeFiles : public ::testing::TestWithParam<EngineChoice> {
 protected:
  void SetUp() override {
    if (GetParam() == EngineChoice::kUring && !ProbeUring().ok()) {
      GTEST_SKIP() << "no io_uring here: " << ProbeUring();
    }
    ASSERT_OK_AND_ASSIGN(chosen_, CreateIoEngine({.choice = GetParam()}));
    a_ = directory_.Make("a");
    b_ = directory_.Make("b");
    descriptors_before_ = OpenDescriptors();
  }

  void TearDown() override {
    if (IsSkipped()) return;
    // descriptors_before_ may include descriptors of starting threads.
    EXPECT_LE(OpenDescriptors(), descriptors_before_);
  }

  VolumeOptions Options(const std::vector<std::string>& paths) const {
    VolumeOptions options;
    for (const std::string& path : paths) {
      options.paths.push_back({.path = path, .capacity_bytes = kPathBytes});
    }
    options.ledger_bytes_max = 4096;
    return options;
  }

  absl::StatusOr<std::unique_ptr<Volume>> Open(const VolumeOptions& options) {
    return Volume::Open(options, *chosen_.engine);
  }

  IoEngine& engine() { return *chosen_.engine; }

  TempDir directory_;
  ChosenEngine chosen_;
  std::string a_;
  std::string b_;
  size_t descriptors_before_ = 0;
};

// Open flags of this process's descriptors whose file name starts with `name`.
std::vector<int> FlagsOf(const std::string& name) {
  std::vector<int> flags;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (gone || !target.starts_with(name)) continue;
    flags.push_back(fcntl(std::stoi(entry.path().filename()), F_GETFL));
  }
  return flags;
}

// Value of a counter in /proc/self/io.
uint64_t KernelCounter(const std::string& wanted) {
  std::ifstream counters("/proc/self/io");
  std::string name;
  uint64_t value = 0;
  while (counters >> name >> value) {
    if (name == wanted) return value;
  }
  return 0;
}

TEST_P(VolumeFiles, CountBytesAsTheKernelDoes) {
  if (!std::ifstream("/proc/self/io").is_open()) GTEST_SKIP() << "/proc/self/io is not readable";
  constexpr uint64_t kBigBytes = 256 << 10;
  VolumeOptions options = Options({a_, b_});
  for (PathOptions& path : options.paths) path.capacity_bytes = 24 << 20;
  const uint64_t read_before = KernelCounter("read_bytes:");
  const uint64_t written_before = KernelCounter("write_bytes:");
  ASSERT_OK_AND_ASSIGN(const auto volume, Open(options));
  SlotMap map = volume->free_slots();
  const std::vector<Slot> slots = map.Allocate(16, kBigBytes).value();
  ASSERT_OK(ZeroNow(*volume, engine(), slots));
  ::forebay::testing::Bytes bytes = ::forebay::testing::Pattern(kBigBytes, /*seed=*/1);
  for (const Slot& slot : std::span(slots).first(8)) {
    ASSERT_OK(WriteNow(*volume, engine(), slot, bytes));
    ASSERT_OK(ReadNow(*volume, engine(), slot, bytes));
  }
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  for (const PathStats& path : volume->stats().paths) {
    read_bytes += path.read_bytes;
    written_bytes += path.written_bytes;
  }
  EXPECT_EQ(read_bytes, 8 * kBigBytes);
  EXPECT_GE(written_bytes, 3 * 8 * kBigBytes);
  // The kernel also counts reads of this program's file and of directories; they are few.
  const auto near_kernel = [](uint64_t ours) {
    return ::testing::AllOf(::testing::Ge(ours), ::testing::Le(ours + ours / 100 + (1 << 20)));
  };
  EXPECT_THAT(KernelCounter("read_bytes:") - read_before, near_kernel(read_bytes));
  EXPECT_THAT(KernelCounter("write_bytes:") - written_before, near_kernel(written_bytes));
}

TEST_P(VolumeFiles, KeepStepsAcrossReopening) {
  for (uint32_t life = 1; life <= 3; ++life) {
    VolumeOptions options = Options({a_, b_});
    options.mode = life == 1 ? OpenMode::kReclaim : OpenMode::kRecover;
    ASSERT_OK_AND_ASSIGN(const auto volume, Open(options));
    BlockStore store(*volume, engine(), 5);
    if (life == 1) {
      ASSERT_OK(ZeroNow(*volume, engine(), store.slots()));
    }
    EXPECT_EQ(store.entries().size(), 5u);
    for (uint32_t i = 0; life > 1 && i < 5; ++i) {
      const BlockState block = store.Read(i);
      EXPECT_OK(block.status);
      EXPECT_TRUE(block.bytes_right);
      EXPECT_EQ(block.step, life - 1);
    }
    EXPECT_OK(store.CommitStep(life));
    EXPECT_EQ(volume->durable_sequence(), life);
  }
}

TEST_P(VolumeFiles, AreDirectReservedAndPrivate) {
  ASSERT_OK_AND_ASSIGN(const auto volume, Open(Options({a_, b_})));
  for (const std::string& directory : {a_, b_}) {
    const std::vector<int> flags = FlagsOf(directory + "/forebay.swap");
    ASSERT_EQ(flags.size(), 1u);
    EXPECT_NE(flags[0] & O_DIRECT, 0);
    struct stat status {};
    ASSERT_EQ(stat((directory + "/forebay.swap").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777, 0600u);
    EXPECT_EQ(static_cast<uint64_t>(status.st_size), kPathBytes);
    EXPECT_GE(static_cast<uint64_t>(status.st_blocks) * 512, kPathBytes) << "not reserved";
  }
}

TEST_P(VolumeFiles, AreReclaimedAtTheNextStart) {
  {
    VolumeOptions options = Options({a_});
    options.paths[0].capacity_bytes = 2 * kPathBytes;
    ASSERT_OK_AND_ASSIGN(const auto volume, Open(options));
    ASSERT_OK(BlockStore(*volume, engine(), 3).CommitStep(1));
  }
  ASSERT_OK_AND_ASSIGN(const auto volume, Open(Options({a_})));
  EXPECT_EQ(volume->durable_sequence(), 0u);
  EXPECT_EQ(std::filesystem::file_size(a_ + "/forebay.swap"), kPathBytes);
}

TEST_P(VolumeFiles, UnlinkedOnesLeaveNothingAndStayLocked) {
  VolumeOptions options = Options({a_});
  options.life = FileLife::kUnlinked;
  {
    ASSERT_OK_AND_ASSIGN(const auto volume, Open(options));
    EXPECT_TRUE(std::filesystem::is_empty(a_));
    EXPECT_OK(BlockStore(*volume, engine(), 1).CommitStep(1));
    EXPECT_THAT(Open(options), HasError(ErrorId::kBusy));
  }
  EXPECT_OK(Open(options));
}

TEST_P(VolumeFiles, AMissingPathIsRefused) {
  const auto volume = Open(Options({a_, directory_.path() + "/none"}));
  EXPECT_THAT(volume, HasError(ErrorId::kSwapPath));
  EXPECT_THAT(volume.status().message(), HasSubstr("swap path 1"));
  EXPECT_THAT(volume.status().message(), HasSubstr("No such file"));
  EXPECT_TRUE(std::filesystem::is_empty(a_)) << "nothing is left on the path that was right";
}

TEST_P(VolumeFiles, APathThatIsAFileIsRefused) {
  std::ofstream(directory_.path() + "/file") << "text";
  EXPECT_THAT(Open(Options({directory_.path() + "/file"})), HasError(ErrorId::kSwapPath));
}

TEST_P(VolumeFiles, APathNamedTwiceIsRefused) {
  const auto volume = Open(Options({a_, b_, a_}));
  EXPECT_THAT(volume, HasError(ErrorId::kSwapPath));
  EXPECT_THAT(volume.status().message(), HasSubstr("the same as swap path 0"));
}

TEST_P(VolumeFiles, ASwapFileThatIsALinkIsNotFollowed) {
  const std::string precious = directory_.path() + "/precious";
  std::ofstream(precious) << "text";
  std::filesystem::create_symlink(precious, a_ + "/forebay.swap");
  EXPECT_THAT(Open(Options({a_})), HasError(ErrorId::kSwapPath));
  EXPECT_EQ(std::filesystem::file_size(precious), 4u);
}

TEST_P(VolumeFiles, AReadOnlyPathIsRefused) {
  ASSERT_EQ(chmod(a_.c_str(), 0555), 0);
  ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0);
  if (geteuid() == 0 && seteuid(kNobody) != 0) GTEST_SKIP() << "root cannot become another user";
  std::error_code error;
  if (!std::filesystem::exists(a_, error)) {
    ASSERT_EQ(seteuid(getuid()), 0);
    GTEST_SKIP() << "another user cannot reach the build tree";
  }
  const auto volume = Open(Options({a_}));
  ASSERT_EQ(seteuid(getuid()), 0);
  EXPECT_THAT(volume, HasError(ErrorId::kSwapPath));
  EXPECT_THAT(volume.status().message(), HasSubstr("read-only"));
}

TEST_P(VolumeFiles, APathInMemoryIsRefused) {
  struct statfs system {};
  if (statfs("/dev/shm", &system) != 0 || system.f_type != TMPFS_MAGIC) {
    GTEST_SKIP() << "/dev/shm is no tmpfs here";
  }
  std::string pattern = "/dev/shm/forebay_test_XXXXXX";
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const auto volume = Open(Options({pattern}));
  EXPECT_THAT(volume, HasError(ErrorId::kSwapPath));
  EXPECT_THAT(volume.status().message(), HasSubstr("no O_DIRECT"));
  EXPECT_TRUE(std::filesystem::is_empty(pattern));
  std::filesystem::remove(pattern);
}

TEST_P(VolumeFiles, ATooSmallDiskIsRefusedWithNeededAndFreeBytes) {
  VolumeOptions options = Options({a_, b_});
  options.paths[1].capacity_bytes = uint64_t{1} << 50;
  auto volume = Open(options);
  EXPECT_THAT(volume, HasError(ErrorId::kSwapNospc));
  EXPECT_THAT(volume.status().message(), HasSubstr("cannot reserve 1024.0 TiB on swap path 0 (/"));
  EXPECT_THAT(volume.status().message(), HasSubstr("(free "));
  EXPECT_TRUE(std::filesystem::is_empty(a_));
  EXPECT_TRUE(std::filesystem::is_empty(b_));
  // Each of the two paths fits alone, but both share one file system.
  struct statfs system {};
  ASSERT_EQ(statfs(a_.c_str(), &system), 0);
  const uint64_t free_bytes =
      static_cast<uint64_t>(system.f_bavail) * static_cast<uint64_t>(system.f_bsize);
  for (PathOptions& path : options.paths) path.capacity_bytes = free_bytes / 4 * 3;
  volume = Open(options);
  EXPECT_THAT(volume, HasError(ErrorId::kSwapNospc));
  EXPECT_THAT(volume.status().message(), HasSubstr("1 more on the same file system"));
}

TEST_P(VolumeFiles, ARefusalLeavesAnOlderFileAsItWas) {
  {
    ASSERT_OK_AND_ASSIGN(const auto volume, Open(Options({a_})));
    ASSERT_OK(BlockStore(*volume, engine(), 2).CommitStep(1));
  }
  VolumeOptions options = Options({a_, b_});
  options.paths[1].capacity_bytes = uint64_t{1} << 50;
  EXPECT_THAT(Open(options), HasError(ErrorId::kSwapNospc));
  VolumeOptions recover = Options({a_});
  recover.mode = OpenMode::kRecover;
  ASSERT_OK_AND_ASSIGN(const auto volume, Open(recover));
  EXPECT_EQ(BlockStore(*volume, engine(), 2).Read(1).step, 1u);
}

TEST_P(VolumeFiles, AFullDeviceIsAnErrorOfTheRequest) {
  // The file is shorter than its capacity, as after a truncation by another program.
  ASSERT_OK_AND_ASSIGN(const auto volume, Open(Options({a_})));
  BlockStore store(*volume, engine(), 1);
  ASSERT_OK(store.CommitStep(1));
  ASSERT_EQ(truncate((a_ + "/forebay.swap").c_str(), 4096), 0);
  const BlockState block = store.Read(0);
  EXPECT_THAT(block.status, HasError(ErrorId::kSwapIo));
  EXPECT_THAT(block.status.message(), HasSubstr("0 of 12288 bytes"));
}

TEST_P(VolumeFiles, ABlockDeviceIsUsedAsItIs) {
  const auto device =
      ::forebay::testing::LoopDevice::Make(directory_.path() + "/backing", 2 * kPathBytes);
  if (device == nullptr) GTEST_SKIP() << "no loop device can be made here";
  const std::string& name = device->path();
  {
    auto volume = Open(Options({name, a_}));
    EXPECT_OK(volume);
    if (volume.ok()) {
      BlockStore store(**volume, engine(), 4);
      EXPECT_OK(store.CommitStep(1));
      EXPECT_EQ(store.Read(3).step, 1u);
      const auto second = Open(Options({name}));
      EXPECT_THAT(second, HasError(ErrorId::kBusy));
      EXPECT_THAT(second.status().message(), HasSubstr("process " + std::to_string(getpid())));
    }
    VolumeOptions options = Options({name});
    options.paths[0].capacity_bytes = 4 * kPathBytes;
    volume = absl::UnknownError("closed");
    EXPECT_THAT(Open(options), HasError(ErrorId::kSwapNospc));
  }
}

VolumeOptions OnePath(const TempDir& directory) {
  VolumeOptions options;
  options.paths = {{.path = directory.Make("a"), .capacity_bytes = kPathBytes}};
  options.ledger_bytes_max = 4096;
  return options;
}

// Forks while no engine exists: a child would lack the engine's threads.
TEST(VolumeLock, ASecondDaemonIsRefusedWithThePidOfTheFirst) {
  TempDir directory;
  const VolumeOptions options = OnePath(directory);
  int ready[2];
  int end[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(end, O_CLOEXEC), 0);
  UniqueFd ready_read(ready[0]);
  UniqueFd ready_write(ready[1]);
  UniqueFd end_read(end[0]);
  UniqueFd end_write(end[1]);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    end_write.Reset();
    auto chosen = CreateIoEngine();
    if (!chosen.ok()) _exit(2);
    const auto volume = Volume::Open(options, *chosen->engine);
    char byte = volume.ok() ? 'y' : 'n';
    if (write(ready_write.get(), &byte, 1) != 1) _exit(3);
    // The child ends when the parent closes its end of the pipe.
    if (read(end_read.get(), &byte, 1) < 0) _exit(4);
    _exit(0);
  }
  end_read.Reset();
  ready_write.Reset();
  char byte = 0;
  ASSERT_EQ(read(ready_read.get(), &byte, 1), 1);
  ASSERT_EQ(byte, 'y');
  ASSERT_OK_AND_ASSIGN(const ChosenEngine chosen, CreateIoEngine());
  VolumeOptions second = options;
  second.paths.insert(second.paths.begin(),
                      {.path = directory.Make("b"), .capacity_bytes = kPathBytes});
  const auto volume = Volume::Open(second, *chosen.engine);
  EXPECT_THAT(volume, HasError(ErrorId::kBusy));
  EXPECT_THAT(volume.status().message(), HasSubstr("swap path 1"));
  EXPECT_THAT(volume.status().message(), HasSubstr("process " + std::to_string(child)));
  end_write.Reset();
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_OK(Volume::Open(second, *chosen.engine));
}

// A duplicate descriptor holds the file's lock, as io_uring may until its ring is polled.
TEST(VolumeLock, IsFreeAtOnceWhereAVolumeIsClosed) {
  TempDir directory;
  const VolumeOptions options = OnePath(directory);
  ASSERT_OK_AND_ASSIGN(const ChosenEngine chosen, CreateIoEngine());
  UniqueFd held;
  {
    ASSERT_OK_AND_ASSIGN(const auto volume, Volume::Open(options, *chosen.engine));
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code ignored;
      const auto target = std::filesystem::read_symlink(entry.path(), ignored);
      if (target.filename() == kSwapFileName) {
        held.Reset(dup(std::stoi(entry.path().filename())));
      }
    }
    ASSERT_TRUE(held.valid());
  }
  const UniqueFd next(open((options.paths[0].path + "/forebay.swap").c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_EQ(flock(next.get(), LOCK_EX | LOCK_NB), 0);
}

// A locked open file acts like a process that was killed during a transfer: the process has ended, but its file is still open.
TEST(VolumeLock, WaitsUntilTransfersOfADeadProcessHaveEnded) {
  TempDir directory;
  const VolumeOptions options = OnePath(directory);
  ASSERT_OK_AND_ASSIGN(const ChosenEngine chosen, CreateIoEngine());
  ASSERT_OK(Volume::Open(options, *chosen.engine));
  UniqueFd file(open((options.paths[0].path + "/forebay.swap").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(flock(file.get(), LOCK_EX | LOCK_NB), 0) << "it is left open";
  std::atomic<bool> ended = false;
  std::thread opener([&] {
    EXPECT_OK(Volume::Open(options, *chosen.engine));
    EXPECT_TRUE(ended);
  });
  // house: allow sleep: as long as an opener that does not wait needs, to be noticed
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ended = true;
  file.Reset();
  opener.join();
}

INSTANTIATE_TEST_SUITE_P(Engines, VolumeFiles,
                         ::testing::Values(EngineChoice::kUring, EngineChoice::kThreads),
                         [](const auto& choice) {
                           return choice.param == EngineChoice::kUring ? "Uring" : "Threads";
                         });

}  // namespace
}  // namespace forebay::nvme::volume_files_test
