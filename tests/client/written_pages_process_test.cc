// SPDX-License-Identifier: Apache-2.0
// Goal    Pages that this process writes become private at the same addresses, however many threads meet the first fault. The
//         pages of other processes and the shared file do not change. A return to the file's pages loses the written values.
// Method  A window over a file that is opened for reading, larger than a chunk, and writes by plain stores.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/internal/mapping.h"
#include "client/internal/written_pages.h"
#include "client/window_registry.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/status_test.h"

namespace forebay::client::internal::written_pages_process_test {
namespace {

using protocol::UniqueFd;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kChunk = WrittenPages::kChunkBytesMin;
// The last chunk has one page and a part of another.
constexpr uint64_t kBytes = 3 * kChunk + 4096 + 100;

bool AllAre(std::span<const std::byte> bytes, std::byte value) {
  return std::ranges::all_of(bytes, [value](std::byte one) { return one == value; });
}

class WrittenPagesProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    InstallSegvHandler();
    writable_ = UniqueFd(::memfd_create("weights", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(::ftruncate(writable_.get(), kBytes), 0);
    ASSERT_EQ(::fcntl(writable_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    file_ = UniqueFd(
        ::open(absl::StrCat("/proc/self/fd/", writable_.get()).c_str(), O_RDONLY | O_CLOEXEC));
    ASSERT_OK_AND_ASSIGN(window_, Mapping::MapFile(file_.get(), kBytes, MapAccess::kRead));
    ASSERT_OK_AND_ASSIGN(theirs_, Mapping::MapFile(writable_.get(), kBytes, MapAccess::kReadWrite));
    std::ranges::fill(theirs_->bytes(), std::byte{1});
    registration_ = RegisterWindow(window_->bytes(), "gpt", {});
    ASSERT_TRUE(registration_->AllowWrites(file_.get()));
  }

  WrittenPages& pages() { return *registration_->written(); }
  volatile std::byte& At(uint64_t offset) { return window_->bytes()[offset]; }
  std::byte Read(uint64_t offset) { return At(offset); }

  UniqueFd writable_;
  UniqueFd file_;
  std::shared_ptr<Mapping> window_;
  std::shared_ptr<Mapping> theirs_;
  std::unique_ptr<WindowRegistration> registration_;
};

TEST_F(WrittenPagesProcess, AWriteIsThisProcessesAlone) {
  EXPECT_TRUE(pages().empty());
  EXPECT_THAT(pages().Ranges(), IsEmpty());
  At(kChunk + 5) = std::byte{9};
  EXPECT_THAT(pages().Ranges(), ElementsAre(WindowRange{kChunk, 2 * kChunk}));
  EXPECT_EQ(Read(kChunk + 5), std::byte{9});
  EXPECT_EQ(Read(kChunk + 4), std::byte{1});
  EXPECT_TRUE(AllAre(theirs_->bytes(), std::byte{1}));
  theirs_->bytes()[0] = std::byte{7};  // in chunk 0, which was not written here
  EXPECT_EQ(Read(0), std::byte{7});
}

TEST_F(WrittenPagesProcess, TheFilesPagesComeBack) {
  for (const uint64_t offset : {uint64_t{0}, kChunk - 1, 2 * kChunk, kBytes - 1}) {
    At(offset) = std::byte{9};
  }
  EXPECT_THAT(pages().Ranges(),
              ElementsAre(WindowRange{0, kChunk}, WindowRange{2 * kChunk, 3 * kChunk + 8192}));
  std::ranges::fill(theirs_->bytes(), std::byte{2});
  pages().GiveBack();
  EXPECT_TRUE(pages().empty());
  EXPECT_TRUE(AllAre(window_->bytes(), std::byte{2}));
  theirs_->bytes()[0] = std::byte{3};
  EXPECT_EQ(Read(0), std::byte{3});
  At(0) = std::byte{4};  // once more
  EXPECT_EQ(Read(0), std::byte{4});
  EXPECT_EQ(theirs_->bytes()[0], std::byte{3});
}

TEST_F(WrittenPagesProcess, ThreadsThatMeetTheSameFaultLoseNoWrite) {
  constexpr uint64_t kThreads = 8;
  for (int round = 0; round < 50; ++round) {
    std::barrier begin(kThreads);
    std::vector<std::thread> threads;
    for (uint64_t number = 0; number < kThreads; ++number) {
      threads.emplace_back([&, number] {
        begin.arrive_and_wait();
        for (uint64_t at = number; at < kBytes; at += 509 * kThreads) {
          At(at) = static_cast<std::byte>(10 + number);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (uint64_t number = 0; number < kThreads; ++number) {
      for (uint64_t at = number; at < kBytes; at += 509 * kThreads) {
        ASSERT_EQ(Read(at), static_cast<std::byte>(10 + number)) << "at " << at;
      }
    }
    EXPECT_THAT(pages().Ranges(), ElementsAre(WindowRange{0, 3 * kChunk + 8192}));
    pages().GiveBack();
    EXPECT_EQ(Read(0), std::byte{1});
  }
}

TEST_F(WrittenPagesProcess, AForkedChildWritesIntoItsOwn) {
  At(0) = std::byte{9};
  const pid_t child = ::fork();
  if (child == 0) {
    At(1) = std::byte{8};
    At(2 * kChunk) = std::byte{8};
    ::_exit(At(0) == std::byte{9} && At(1) == std::byte{8} && At(2 * kChunk) == std::byte{8} ? 0
                                                                                             : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Read(1), std::byte{1});
  EXPECT_EQ(Read(2 * kChunk), std::byte{1});
}

TEST_F(WrittenPagesProcess, ALargeWindowIsCutIntoFewChunks) {
  // The window has 16 GiB. The test touches few of its pages.
  constexpr uint64_t kLarge = (WrittenPages::kChunksMax << 21) + kChunk;
  const UniqueFd file(::memfd_create("large", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(file.get(), kLarge), 0);
  ASSERT_EQ(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Mapping> large,
                       Mapping::MapFile(file.get(), kLarge, MapAccess::kRead));
  const auto registration = RegisterWindow(large->bytes(), "large", {});
  ASSERT_TRUE(registration->AllowWrites(file.get()));
  *const_cast<volatile std::byte*>(&large->bytes()[kLarge - 1]) = std::byte{1};
  EXPECT_THAT(registration->written()->Ranges(), ElementsAre(WindowRange{kLarge - kChunk, kLarge}));
  *const_cast<volatile std::byte*>(&large->bytes()[0]) = std::byte{1};
  EXPECT_THAT(registration->written()->Ranges(),
              ElementsAre(WindowRange{0, 2 * kChunk}, WindowRange{kLarge - kChunk, kLarge}));
}

using WrittenPagesProcessDeathTest = WrittenPagesProcess;

TEST_F(WrittenPagesProcessDeathTest, WithoutMappingsItIsSaidWhatIsShort) {
  EXPECT_DEATH(
      {
        file_.Reset();  // mmap fails
        At(0) = std::byte{9};
      },
      "padding at byte 0\nhint: the system gives this process no mapping");
}

}  // namespace
}  // namespace forebay::client::internal::written_pages_process_test
