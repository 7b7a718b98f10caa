// SPDX-License-Identifier: Apache-2.0
// Goal    Every IoEngine meets the same contract: io_uring, threads, and the simulated disk that replaces them in all other
//         tests.
// Method  The same cases on all three. Files are real (O_DIRECT, in the build tree) but for the
//         simulated one. Nothing sleeps to wait: Wait() has a deadline far above any delay.

#include "nvme/io/io_engine.h"

#include <fcntl.h>
#include <liburing.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/io/engine_factory.h"
#include "nvme/io/rate_limited_engine.h"
#include "nvme/io/thread_engine.h"
#include "nvme/io/uring_engine.h"
#include "nvme/swap_files.h"
#include "protocol/os/unique_fd.h"
#include "tests/nvme/temp_dir.h"
#include "tests/support/pattern.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/status_test.h"

namespace forebay::nvme {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::HasCode;
using ::forebay::testing::Pattern;
using ::forebay::testing::SimulatedDisk;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr uint64_t kFileBytes = 1 << 20;
constexpr std::chrono::seconds kDeadline(60);
constexpr std::chrono::nanoseconds kNow(0);

enum class Kind { kUring, kThreads, kSimulated, kRateLimited };

std::string KindName(const ::testing::TestParamInfo<Kind>& info) {
  return std::array{"Uring", "Threads", "Simulated",
                    "RateLimited"}[static_cast<size_t>(info.param)];
}

class IoEngineContract : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    descriptors_before_ = OpenDescriptors();
    Create();
  }

  void TearDown() override {
    if (IsSkipped()) return;
    files_.clear();
    engine_.reset();
    fd_.Reset();
    EXPECT_EQ(OpenDescriptors(), descriptors_before_);
  }

  void Create() {
    switch (GetParam()) {
      case Kind::kUring: {
        absl::StatusOr<std::unique_ptr<UringEngine>> engine = UringEngine::Create(/*depth=*/64);
        if (!engine.ok()) GTEST_SKIP() << "no io_uring here: " << engine.status();
        engine_ = *std::move(engine);
        break;
      }
      case Kind::kThreads: {
        ASSERT_OK_AND_ASSIGN(engine_, ThreadEngine::Create(/*threads=*/3));
        break;
      }
      case Kind::kRateLimited: {
        ASSERT_OK_AND_ASSIGN(auto engine, ThreadEngine::Create(/*threads=*/3));
        engine_ = std::make_unique<RateLimitedEngine>(std::move(engine),
                                                      std::vector<uint64_t>{uint64_t{1} << 30});
        break;
      }
      case Kind::kSimulated: {
        auto disk = std::make_unique<SimulatedDisk>(
            ::forebay::testing::SimulatedDiskOptions{.paths = 1, .capacity_bytes = kFileBytes});
        const PathOptions path{.path = disk->path_name(0), .capacity_bytes = kFileBytes};
        ASSERT_OK_AND_ASSIGN(files_, disk->Open({&path, 1}, OpenMode::kReclaim, FileLife::kKept,
                                                [](auto...) { return absl::OkStatus(); }));
        ASSERT_OK_AND_ASSIGN(file_, disk->RegisterFile(files_[0]->fd()));
        engine_ = std::move(disk);
        return;
      }
    }
    const std::string name = directory_.path() + "/file";
    fd_.Reset(open(name.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600));
    ASSERT_TRUE(fd_.valid());
    ASSERT_EQ(ftruncate(fd_.get(), kFileBytes), 0);
    ASSERT_OK_AND_ASSIGN(file_, engine_->RegisterFile(fd_.get()));
  }

  absl::Status SubmitRead(FileIndex file, uint64_t offset_bytes, std::span<std::byte> bytes,
                          uint64_t token) {
    return engine_->Submit({.kind = IoKind::kRead,
                            .file = file,
                            .offset_bytes = offset_bytes,
                            .data = bytes.data(),
                            .size_bytes = bytes.size(),
                            .token = token});
  }
  absl::Status SubmitWrite(FileIndex file, uint64_t offset_bytes, std::span<const std::byte> bytes,
                           uint64_t token) {
    return engine_->Submit({.kind = IoKind::kWrite,
                            .file = file,
                            .offset_bytes = offset_bytes,
                            // The engine only reads these bytes.
                            .data = const_cast<std::byte*>(bytes.data()),
                            .size_bytes = bytes.size(),
                            .token = token});
  }
  absl::Status SubmitFlush(FileIndex file, uint64_t token) {
    return engine_->Submit({.kind = IoKind::kFlush, .file = file, .token = token});
  }

  // Waits until `count` completions have arrived, then polls once more for unexpected ones.
  std::vector<Completion> WaitFor(size_t count) {
    std::vector<Completion> all;
    const auto end = std::chrono::steady_clock::now() + kDeadline;
    std::array<Completion, 32> some;
    while (all.size() < count && std::chrono::steady_clock::now() < end) {
      const absl::StatusOr<size_t> filled = engine_->Wait(std::chrono::seconds(1), some);
      EXPECT_OK(filled);
      if (!filled.ok()) return all;
      all.insert(all.end(), some.begin(), some.begin() + static_cast<ptrdiff_t>(*filled));
    }
    const absl::StatusOr<size_t> filled = engine_->Wait(kNow, some);
    EXPECT_OK(filled);
    if (filled.ok()) {
      all.insert(all.end(), some.begin(), some.begin() + static_cast<ptrdiff_t>(*filled));
    }
    return all;
  }

  static protocol::UniqueFd EventFd(int flags) {
    return protocol::UniqueFd(eventfd(0, flags | EFD_CLOEXEC));
  }
  static void Signal(const protocol::UniqueFd& fd, uint64_t value = 1) {
    ASSERT_EQ(write(fd.get(), &value, sizeof(value)), static_cast<ssize_t>(sizeof(value)));
  }
  static Completion Event(uint64_t token, int64_t counter) {
    return {.token = token, .result = counter, .kind = IoKind::kEvent};
  }

  size_t descriptors_before_ = 0;
  TempDir directory_;
  protocol::UniqueFd fd_;
  std::unique_ptr<IoEngine> engine_;
  std::vector<std::unique_ptr<SwapFile>> files_;
  FileIndex file_{};
};

TEST_P(IoEngineContract, WhatIsWrittenIsReadBack) {
  const Bytes written = Pattern(3 * 4096, /*seed=*/1);
  ASSERT_OK(SubmitWrite(file_, 8192, written, /*token=*/7));
  EXPECT_THAT(WaitFor(1),
              ElementsAre(Completion{.token = 7, .result = 3 * 4096, .kind = IoKind::kWrite}));
  ASSERT_OK(SubmitFlush(file_, /*token=*/8));
  EXPECT_THAT(WaitFor(1), ElementsAre(Completion{.token = 8, .result = 0, .kind = IoKind::kFlush}));
  Bytes read(3 * 4096);
  ASSERT_OK(SubmitRead(file_, 8192, read, /*token=*/9));
  EXPECT_THAT(WaitFor(1),
              ElementsAre(Completion{.token = 9, .result = 3 * 4096, .kind = IoKind::kRead}));
  EXPECT_EQ(read, written);
}

TEST_P(IoEngineContract, ManyTransfersEndOnceEach) {
  constexpr size_t kPieces = 200;  // above the depth: some requests queue
  const Bytes written = Pattern(kPieces * 4096, /*seed=*/2);
  Bytes read(written.size());
  for (size_t i = 0; i < kPieces; ++i) {
    ASSERT_OK(SubmitWrite(file_, i * 4096, std::span(written).subspan(i * 4096, 4096), i));
  }
  EXPECT_EQ(WaitFor(kPieces).size(), kPieces);
  for (size_t i = 0; i < kPieces; ++i) {
    ASSERT_OK(SubmitRead(file_, i * 4096, std::span(read).subspan(i * 4096, 4096), 1000 + i));
  }
  std::vector<int> ended(kPieces);
  for (const Completion& completion : WaitFor(kPieces)) {
    EXPECT_EQ(completion.result, 4096);
    ++ended.at(completion.token - 1000);
  }
  EXPECT_THAT(ended, ::testing::Each(1));
  EXPECT_EQ(read, written);
}

TEST_P(IoEngineContract, MisalignedAndUnknownRequestsAreRefused) {
  Bytes bytes(3 * 4096);
  const std::span<std::byte> span(bytes);
  const auto invalid = HasCode(absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(SubmitRead(file_, 512, span.first(4096), 1), invalid);
  EXPECT_THAT(SubmitRead(file_, 0, span.first(512), 1), invalid);
  EXPECT_THAT(SubmitRead(file_, 0, span.subspan(512, 4096), 1), invalid);
  EXPECT_THAT(SubmitWrite(file_, 0, span.first(4095), 1), invalid);
  EXPECT_THAT(SubmitRead(file_, 0, {}, 1), invalid);
  EXPECT_THAT(SubmitRead(FileIndex{1}, 0, span, 1), invalid);
  EXPECT_THAT(SubmitFlush(FileIndex{1}, 1), invalid);
  EXPECT_THAT(engine_->Submit({.kind = IoKind::kEvent, .file = file_}), invalid);
  EXPECT_THAT(WaitFor(0), IsEmpty());
}

TEST_P(IoEngineContract, ReadsAcrossTheEndAreShort) {
  Bytes bytes(3 * 4096);
  ASSERT_OK(SubmitRead(file_, kFileBytes - 4096, bytes, 1));
  Bytes other(3 * 4096);
  ASSERT_OK(SubmitRead(file_, kFileBytes, other, 2));
  EXPECT_THAT(WaitFor(2),
              UnorderedElementsAre(Completion{.token = 1, .result = 4096, .kind = IoKind::kRead},
                                   Completion{.token = 2, .result = 0, .kind = IoKind::kRead}));
}

TEST_P(IoEngineContract, AFullBacklogRefusesAndThenGoesOn) {
  Bytes all(IoEngine::kBacklogMax * 4096);  // requests of one page that run concurrently
  const auto page = [&all](uint32_t i) { return std::span(all).subspan(i * size_t{4096}, 4096); };
  for (uint32_t i = 0; i < IoEngine::kBacklogMax; ++i) {
    ASSERT_OK(SubmitRead(file_, 0, page(i), i));
  }
  EXPECT_THAT(SubmitRead(file_, 0, page(0), 99999), HasCode(absl::StatusCode::kResourceExhausted));
  std::vector<int> ended(IoEngine::kBacklogMax);
  for (const Completion& completion : WaitFor(IoEngine::kBacklogMax)) ++ended.at(completion.token);
  EXPECT_THAT(ended, ::testing::Each(1));
  ASSERT_OK(SubmitRead(file_, 0, page(0), 5));
  EXPECT_EQ(WaitFor(1).size(), 1u);
}

TEST_P(IoEngineContract, ASmallOutputLosesNothing) {
  Bytes bytes(5 * 4096);
  protocol::UniqueFd event = EventFd(0);
  ASSERT_OK(engine_->WatchEventFd(event.get(), 100));
  Signal(event);
  for (uint64_t i = 0; i < 5; ++i) {
    ASSERT_OK(SubmitRead(file_, 0, std::span(bytes).subspan(i * 4096, 4096), i));
  }
  std::vector<uint64_t> tokens;
  for (int i = 0; i < 100 && tokens.size() < 6; ++i) {
    Completion one;
    ASSERT_OK_AND_ASSIGN(const size_t filled, engine_->Wait(std::chrono::seconds(1), {&one, 1}));
    if (filled == 1) tokens.push_back(one.token);
  }
  EXPECT_THAT(tokens, UnorderedElementsAre(0, 1, 2, 3, 4, 100));
  engine_->UnwatchEventFd(event.get());
}

TEST_P(IoEngineContract, WaitReturnsWhenItsTimeIsOver) {
  Completion one;
  for (const std::chrono::nanoseconds timeout :
       {kNow, std::chrono::nanoseconds(1), std::chrono::nanoseconds(2'000'000)}) {
    const auto start = std::chrono::steady_clock::now();
    ASSERT_OK_AND_ASSIGN(const size_t filled, engine_->Wait(timeout, {&one, 1}));
    EXPECT_EQ(filled, 0u);
    EXPECT_GE(std::chrono::steady_clock::now() - start, timeout);
  }
}

TEST_P(IoEngineContract, AWatchReportsEveryWriteAndRearmsItself) {
  for (const int flags : {0, static_cast<int>(EFD_NONBLOCK)}) {
    protocol::UniqueFd event = EventFd(flags);
    ASSERT_OK(engine_->WatchEventFd(event.get(), 11));
    EXPECT_THAT(WaitFor(0), IsEmpty());
    for (uint64_t round = 1; round <= 100; ++round) {
      Signal(event, round);
      EXPECT_THAT(WaitFor(1), ElementsAre(Event(11, static_cast<int64_t>(round))));
    }
    Signal(event, 2);
    Signal(event, 3);
    EXPECT_THAT(WaitFor(1), ElementsAre(Event(11, 5)));
    engine_->UnwatchEventFd(event.get());
  }
}

TEST_P(IoEngineContract, ACounterAboveZeroIsReportedAtOnce) {
  protocol::UniqueFd event = EventFd(0);
  Signal(event, 9);
  ASSERT_OK(engine_->WatchEventFd(event.get(), 12));
  EXPECT_THAT(WaitFor(1), ElementsAre(Event(12, 9)));
  engine_->UnwatchEventFd(event.get());
}

TEST_P(IoEngineContract, AWatchThatIsRemovedIsNeverReported) {
  for (const int flags : {0, static_cast<int>(EFD_NONBLOCK)}) {
    for (const bool pending : {false, true}) {
      for (const bool waited : {false, true}) {
        SCOPED_TRACE(::testing::Message() << flags << pending << waited);
        protocol::UniqueFd event = EventFd(flags);
        ASSERT_OK(engine_->WatchEventFd(event.get(), 13));
        if (waited) {
          EXPECT_THAT(WaitFor(0), IsEmpty());
        }
        if (pending) Signal(event);
        engine_->UnwatchEventFd(event.get());
        Signal(event);
        EXPECT_THAT(WaitFor(0), IsEmpty());
        event.Reset();
        EXPECT_THAT(WaitFor(0), IsEmpty());
      }
    }
  }
}

TEST_P(IoEngineContract, ADescriptorNumberThatIsUsedAgainHasItsOwnWatch) {
  for (uint64_t round = 0; round < 50; ++round) {
    protocol::UniqueFd event = EventFd(0);
    const int number = event.get();
    ASSERT_OK(engine_->WatchEventFd(number, 1000 + round));
    if (round % 2 == 0) Signal(event);
    if (round % 3 == 0) WaitFor(0);
    engine_->UnwatchEventFd(number);
    event.Reset();

    protocol::UniqueFd next;
    for (int tries = 0; next.get() != number; ++tries) {
      ASSERT_LT(tries, 1000) << "threads of the run time may hold the number for a moment";
      next = EventFd(0);
    }
    ASSERT_OK(engine_->WatchEventFd(number, 2000 + round));
    Signal(next, 4);
    EXPECT_THAT(WaitFor(1), ElementsAre(Event(2000 + round, 4)));
    engine_->UnwatchEventFd(number);
  }
}

TEST_P(IoEngineContract, TheSameEventFdMayBeWatchedAgain) {
  protocol::UniqueFd event = EventFd(0);
  ASSERT_OK(engine_->WatchEventFd(event.get(), 14));
  EXPECT_THAT(WaitFor(0), IsEmpty());
  engine_->UnwatchEventFd(event.get());
  Signal(event, 6);
  ASSERT_OK(engine_->WatchEventFd(event.get(), 15));
  EXPECT_THAT(WaitFor(1), ElementsAre(Event(15, 6)));
  engine_->UnwatchEventFd(event.get());
  engine_->UnwatchEventFd(event.get());  // the file is already unknown: ignored
}

TEST_P(IoEngineContract, OnlyEventFdsAreWatchedAndOnlyOnce) {
  protocol::UniqueFd event = EventFd(0);
  protocol::UniqueFd file(open("/dev/null", O_RDWR | O_CLOEXEC));
  const auto invalid = HasCode(absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(engine_->WatchEventFd(file.get(), 1), invalid);
  EXPECT_THAT(engine_->WatchEventFd(-1, 1), invalid);
  ASSERT_OK(engine_->WatchEventFd(event.get(), 1));
  EXPECT_THAT(engine_->WatchEventFd(event.get(), 2), invalid);
  engine_->UnwatchEventFd(event.get());
}

TEST_P(IoEngineContract, AnEventOfAnotherThreadEndsTheSleep) {
  protocol::UniqueFd event = EventFd(0);
  ASSERT_OK(engine_->WatchEventFd(event.get(), 16));
  for (int round = 0; round < 20; ++round) {
    std::thread other([&event] { Signal(event); });
    Completion one;
    absl::StatusOr<size_t> filled = 0u;
    for (int tries = 0; tries < 10 && filled.ok() && *filled == 0; ++tries) {
      filled = engine_->Wait(IoEngine::kForever, {&one, 1});  // 0 if a signal interrupted it
    }
    other.join();
    ASSERT_OK(filled);
    EXPECT_EQ(one, Event(16, 1));
  }
  engine_->UnwatchEventFd(event.get());
}

TEST_P(IoEngineContract, AnEngineMadeHereWorksOnAnotherThread) {
  const Bytes written = Pattern(8192, /*seed=*/3);
  Bytes read(8192);
  engine_->RegisterBuffer(read);  // must precede first use, on this thread
  protocol::UniqueFd event = EventFd(EFD_NONBLOCK);
  std::thread reactor([&] {
    ASSERT_OK(engine_->WatchEventFd(event.get(), 17));
    ASSERT_OK(SubmitWrite(file_, 0, written, 1));
    EXPECT_EQ(WaitFor(1).size(), 1u);
    ASSERT_OK(SubmitRead(file_, 0, read, 2));
    Signal(event);
    EXPECT_THAT(WaitFor(2),
                UnorderedElementsAre(Completion{.token = 2, .result = 8192, .kind = IoKind::kRead},
                                     Event(17, 1)));
    engine_->UnwatchEventFd(event.get());
    EXPECT_THAT(WaitFor(0), IsEmpty());
  });
  reactor.join();
  EXPECT_EQ(read, written);
}

TEST_P(IoEngineContract, RegisteredBuffersCarryTheSameBytes) {
  Bytes buffer = Pattern(64 * 4096, /*seed=*/4);
  const Bytes copy = buffer;
  const bool registered = engine_->RegisterBuffer(buffer);
  if (GetParam() != Kind::kUring) {
    EXPECT_FALSE(registered);
  }
  RecordProperty("registered", registered ? "yes" : "no");
  const std::span<std::byte> span(buffer);
  ASSERT_OK(SubmitWrite(file_, 0, span, 1));
  EXPECT_EQ(WaitFor(1).size(), 1u);
  std::fill(buffer.begin(), buffer.end(), std::byte{0});
  // Reads into a part of the buffer, into the whole buffer, and after its registration has ended.
  ASSERT_OK(SubmitRead(file_, 4096, span.subspan(4096, 4096), 2));
  EXPECT_EQ(WaitFor(1).size(), 1u);
  EXPECT_TRUE(std::equal(buffer.begin() + 4096, buffer.begin() + 8192, copy.begin() + 4096));
  engine_->UnregisterBuffer(buffer);
  ASSERT_OK(SubmitRead(file_, 0, span, 3));
  EXPECT_THAT(WaitFor(1),
              ElementsAre(Completion{
                  .token = 3, .result = static_cast<int64_t>(copy.size()), .kind = IoKind::kRead}));
  EXPECT_EQ(buffer, copy);
}

TEST_P(IoEngineContract, TooManyFilesAreRefused) {
  const int fd = GetParam() == Kind::kSimulated ? files_[0]->fd() : fd_.get();
  for (uint32_t i = 1; i < IoEngine::kFilesMax; ++i) {
    ASSERT_OK_AND_ASSIGN(const FileIndex file, engine_->RegisterFile(fd));
    EXPECT_EQ(static_cast<uint32_t>(file), i);
  }
  EXPECT_THAT(engine_->RegisterFile(fd), HasCode(absl::StatusCode::kResourceExhausted));
  engine_->UnregisterFile(FileIndex{5});
  engine_->UnregisterFile(FileIndex{5});  // unknown files are ignored
  engine_->UnregisterFile(FileIndex{9999});
  Bytes bytes(4096);
  EXPECT_THAT(SubmitRead(FileIndex{5}, 0, bytes, 1), HasCode(absl::StatusCode::kInvalidArgument));
  ASSERT_OK_AND_ASSIGN(const FileIndex again, engine_->RegisterFile(fd));
  EXPECT_EQ(again, FileIndex{5});
  ASSERT_OK(SubmitRead(again, 0, bytes, 1));
  EXPECT_EQ(WaitFor(1).size(), 1u);
}

// Makes io_uring_enter of the calling thread fail with EAGAIN unless it also waits for completions, as if the kernel were short
// of memory.
bool RefuseSubmissions() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[3])),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, IORING_ENTER_GETEVENTS, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {.len = 6, .filter = filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(UringEngineFault, AFullQueueThatTheKernelRefusesIsSentLater) {
  if (!ProbeUring().ok()) GTEST_SKIP() << "no io_uring here: " << ProbeUring();
  constexpr int kWatches = 300;  // more than the submission queue holds
  bool filtered = true;
  std::set<uint64_t> seen;
  std::thread other([&filtered, &seen] {
    ASSERT_OK_AND_ASSIGN(const auto engine, UringEngine::Create(/*depth=*/4));
    std::vector<protocol::UniqueFd> events;
    filtered = RefuseSubmissions();
    if (!filtered) return;
    for (int i = 0; i < kWatches; ++i) {
      events.emplace_back(eventfd(1, EFD_CLOEXEC));
      ASSERT_OK(engine->WatchEventFd(events.back().get(), static_cast<uint64_t>(i)));
    }
    const auto end = std::chrono::steady_clock::now() + kDeadline;
    std::array<Completion, 32> some;
    while (seen.size() < kWatches && std::chrono::steady_clock::now() < end) {
      ASSERT_OK_AND_ASSIGN(const size_t count, engine->Wait(std::chrono::seconds(1), some));
      for (size_t i = 0; i < count; ++i) seen.insert(some[i].token);
    }
    for (const protocol::UniqueFd& event : events) engine->UnwatchEventFd(event.get());
  });
  other.join();
  if (!filtered) GTEST_SKIP() << "this machine does not allow seccomp filters";
  EXPECT_EQ(seen.size(), kWatches);
}

// Cancels all requests of the engine's ring with ECANCELED, as the kernel may.
bool CancelAllRequests() {
  int ring = -1;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    if (std::filesystem::read_symlink(entry.path(), closed).string() == "anon_inode:[io_uring]") {
      ring = std::stoi(entry.path().filename());
    }
  }
  io_uring_sync_cancel_reg cancel{};
  cancel.fd = -1;
  cancel.flags = IORING_ASYNC_CANCEL_ALL | IORING_ASYNC_CANCEL_ANY;
  cancel.timeout = {.tv_sec = -1, .tv_nsec = -1};
  return syscall(__NR_io_uring_register, ring, IORING_REGISTER_SYNC_CANCEL, &cancel, 1) >= 0;
}

TEST(UringEngineFault, AWatchThatEndsWithAnErrorIsArmedAgain) {
  if (!ProbeUring().ok()) GTEST_SKIP() << "no io_uring here: " << ProbeUring();
  ASSERT_OK_AND_ASSIGN(const auto engine, UringEngine::Create(/*depth=*/4));
  protocol::UniqueFd event(eventfd(0, EFD_CLOEXEC));
  ASSERT_OK(engine->WatchEventFd(event.get(), 7));
  std::array<Completion, 8> some;
  ASSERT_OK_AND_ASSIGN(size_t count, engine->Wait(kNow, some));
  ASSERT_EQ(count, 0u);
  if (!CancelAllRequests()) GTEST_SKIP() << "the kernel has no IORING_REGISTER_SYNC_CANCEL";
  ASSERT_OK_AND_ASSIGN(count, engine->Wait(std::chrono::seconds(1), some));
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(some[0].result, -ECANCELED);
  const uint64_t value = 5;
  ASSERT_EQ(write(event.get(), &value, sizeof(value)), static_cast<ssize_t>(sizeof(value)));
  ASSERT_OK_AND_ASSIGN(count, engine->Wait(std::chrono::seconds(1), some));
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(some[0].result, 5);
}

INSTANTIATE_TEST_SUITE_P(All, IoEngineContract,
                         ::testing::Values(Kind::kUring, Kind::kThreads, Kind::kSimulated,
                                           Kind::kRateLimited),
                         KindName);

}  // namespace
}  // namespace forebay::nvme
