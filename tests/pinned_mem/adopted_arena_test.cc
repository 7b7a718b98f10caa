// SPDX-License-Identifier: Apache-2.0
// Goal    An adopted arena has the bytes, pages and lock of the previous arena, and behaves like it. A descriptor of other
//         memory, or of an arena that has lost a page, is refused and not changed.
// Method  Retain an arena's pages beyond its end, adopt them from the retained descriptor, and query the kernel. For the
//         refusals change one thing at a time.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/error.h"
#include "tests/pinned_mem/arena_support.h"
#include "tests/support/pattern.h"

namespace forebay::pinned_mem {
namespace {

using ::forebay::protocol::ErrorId;
using ::forebay::protocol::IdOf;
using ::forebay::protocol::UniqueFd;
using ::forebay::testing::kMib;
using ::forebay::testing::kPage;
using ::forebay::testing::MakeArena;
using ::forebay::testing::OptionsFor;
using ::forebay::testing::Pattern;
using ::testing::HasSubstr;

class AdoptedArena : public ::forebay::testing::DescriptorsAsBefore {};

uint64_t AllocatedBytes(const UniqueFd& fd) {
  struct stat info = {};
  EXPECT_EQ(fstat(fd.get(), &info), 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

// Ends the arena. Returns a descriptor that retains the arena's pages.
UniqueFd Keep(std::unique_ptr<PinnedArena> arena) {
  auto fd = arena->DuplicateFd();
  EXPECT_TRUE(fd.ok()) << fd.status();
  arena->SetAtEnd(AtEnd::kKeepForReaders);
  return fd.ok() ? *std::move(fd) : UniqueFd();
}

std::unique_ptr<PinnedArena> Adopt(const ArenaOptions& options, UniqueFd fd) {
  auto arena = PinnedArena::Adopt(options, std::move(fd));
  EXPECT_TRUE(arena.ok()) << arena.status();
  return arena.ok() ? *std::move(arena) : nullptr;
}

UniqueFd Duplicate(const UniqueFd& fd) { return UniqueFd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)); }

bool SameBytes(std::span<const std::byte> some, std::span<const std::byte> others) {
  return std::ranges::equal(some, others);
}

TEST_F(AdoptedArena, HasTheBytesPagesNodesAndLockOfTheOneBefore) {
  for (const Access access : {Access::kPrivate, Access::kServed, Access::kShared}) {
    for (const uint64_t capacity : {kPage, 2 * kMib - kPage, 2 * kMib, 7 * kMib + 5 * kPage}) {
      SCOPED_TRACE(capacity);
      ArenaOptions options = OptionsFor(capacity, access);
      auto made = MakeArena(options);
      ASSERT_NE(made, nullptr);
      const auto bytes = Pattern(capacity, /*seed=*/capacity);
      std::ranges::copy(bytes, made->bytes().begin());
      const uint64_t huge_bytes = made->huge_bytes();
      const std::vector<int> nodes = made->numa_nodes();
      const bool locked = made->locked();

      options.populated_bytes = std::make_shared<std::atomic<uint64_t>>(0);
      options.threads = 2;
      const auto adopted = Adopt(options, Keep(std::move(made)));
      ASSERT_NE(adopted, nullptr);
      EXPECT_TRUE(SameBytes(adopted->bytes(), bytes));
      EXPECT_EQ(adopted->populated_bytes(), capacity);
      EXPECT_EQ(*options.populated_bytes, capacity);
      EXPECT_EQ(adopted->allocated_bytes(), capacity);
      EXPECT_EQ(adopted->numa_nodes(), nodes);
      EXPECT_EQ(adopted->locked(), locked);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(adopted->bytes().data()) % (2 * kMib), 0u);
      // 0 if the kernel does not report huge pages.
      EXPECT_THAT(adopted->huge_bytes(), ::testing::AnyOf(huge_bytes, 0));
      std::printf("[ pages ] %.0f MiB on 2 MiB pages, before %.0f\n",
                  static_cast<double>(adopted->huge_bytes()) / static_cast<double>(kMib),
                  static_cast<double>(huge_bytes) / static_cast<double>(kMib));
    }
  }
}

TEST_F(AdoptedArena, HasEveryPageMapped) {
  const auto adopted = Adopt(OptionsFor(5 * kMib, Access::kPrivate),
                             Keep(MakeArena(OptionsFor(5 * kMib, Access::kPrivate))));
  ASSERT_NE(adopted, nullptr);
  const UniqueFd pagemap(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(pagemap.valid());
  std::vector<uint64_t> pages(5 * kMib / kPage);
  const auto at = static_cast<off_t>(reinterpret_cast<uintptr_t>(adopted->bytes().data()) / kPage *
                                     sizeof(uint64_t));
  const auto size = static_cast<ssize_t>(pages.size() * sizeof(uint64_t));
  ASSERT_EQ(pread(pagemap.get(), pages.data(), static_cast<size_t>(size), at), size);
  // Bit 63 (proc(5)): the page is in this process's page table.
  EXPECT_TRUE(std::ranges::all_of(pages, [](uint64_t page) { return page >> 63 == 1; }));
}

TEST_F(AdoptedArena, GetsAndLosesPartsAsBefore) {
  const uint64_t part_bytes = 3 * kMib + kPage;  // no boundary on a huge page
  ArenaOptions options = OptionsFor(16 * kMib, Access::kPrivate);
  const ArenaPart first = {.offset_bytes = 0, .size_bytes = part_bytes};
  const ArenaPart middle = {.offset_bytes = part_bytes, .size_bytes = part_bytes};
  const ArenaPart last = {.offset_bytes = 2 * part_bytes, .size_bytes = part_bytes};
  options.parts = {first, last};
  auto made = MakeArena(options);
  ASSERT_NE(made, nullptr);
  std::ranges::fill(made->bytes().first(part_bytes), std::byte{7});
  std::ranges::fill(made->bytes().subspan(last.offset_bytes, part_bytes), std::byte{9});

  const auto adopted = Adopt(options, Keep(std::move(made)));
  ASSERT_NE(adopted, nullptr);
  EXPECT_EQ(adopted->allocated_bytes(), 2 * part_bytes) << "the hole stays one";
  EXPECT_EQ(adopted->populated_bytes(), 2 * part_bytes);
  ASSERT_TRUE(adopted->Populate(middle).ok());
  EXPECT_EQ(adopted->allocated_bytes(), 3 * part_bytes);
  ASSERT_TRUE(adopted->FreePart(first).ok());
  EXPECT_EQ(adopted->allocated_bytes(), 2 * part_bytes);
  EXPECT_EQ(adopted->populated_bytes(), 2 * part_bytes);
  EXPECT_LE(adopted->huge_bytes(), 2 * part_bytes);
  const std::vector<std::byte> zeros(part_bytes);
  const std::vector<std::byte> nines(part_bytes, std::byte{9});
  EXPECT_TRUE(SameBytes(adopted->bytes().subspan(middle.offset_bytes, part_bytes), zeros));
  EXPECT_TRUE(SameBytes(adopted->bytes().subspan(last.offset_bytes, part_bytes), nines));
}

TEST_F(AdoptedArena, CanBeKeptAndAdoptedAgain) {
  const ArenaOptions options = OptionsFor(kMib, Access::kServed);
  auto arena = MakeArena(options);
  ASSERT_NE(arena, nullptr);
  for (int round = 0; round < 3; ++round) {
    arena->bytes()[static_cast<size_t>(round)] = std::byte{42};
    arena = Adopt(options, Keep(std::move(arena)));
    ASSERT_NE(arena, nullptr);
  }
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(arena->bytes()[i], std::byte{42});
}

TEST_F(AdoptedArena, FreesItsPagesAtItsEndOrKeepsThem) {
  const ArenaOptions options = OptionsFor(4 * kMib, Access::kShared);
  auto adopted = Adopt(options, Keep(MakeArena(options)));
  ASSERT_NE(adopted, nullptr);
  const auto client = adopted->ClientFd();
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(fcntl(client->get(), F_GETFD), FD_CLOEXEC);
  adopted.reset();
  EXPECT_EQ(AllocatedBytes(*client), 0U);

  auto fd = Keep(MakeArena(options));
  EXPECT_EQ(AllocatedBytes(fd), 4 * kMib);
}

// An arena that ends by default frees its pages; only SetAtEnd() in Keep() retains them.
TEST_F(AdoptedArena, IsRefusedWhereThePagesWereNotKept) {
  const ArenaOptions options = OptionsFor(4 * kMib, Access::kPrivate);
  auto made = MakeArena(options);
  ASSERT_NE(made, nullptr);
  auto fd = made->DuplicateFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  made.reset();
  const absl::Status status = PinnedArena::Adopt(options, *std::move(fd)).status();
  EXPECT_EQ(IdOf(status), ErrorId::kCorrupt);
  EXPECT_THAT(std::string(status.message()), HasSubstr("lost memory at offset 0"));
}

// Detects users by fcntl(2) F_SETLEASE, with and without a client.
TEST_F(AdoptedArena, IsFreedWhenNobodyHasItOpenOrMapped) {
  const ArenaOptions options = OptionsFor(4 * kMib, Access::kServed);
  auto made = MakeArena(options);
  ASSERT_NE(made, nullptr);
  made->bytes()[5] = std::byte{42};
  auto client = made->ClientFd();
  ASSERT_TRUE(client.ok()) << client.status();
  UniqueFd kept = Keep(std::move(made));
  const UniqueFd store = Duplicate(kept);  // a duplicate does not count as a user
  const auto adopted = Adopt(options, std::move(kept));
  ASSERT_NE(adopted, nullptr);

  EXPECT_FALSE(adopted->FreeIfUnused()) << "open";
  void* const map = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, client->get(), 0);
  ASSERT_NE(map, MAP_FAILED);
  client->Reset();
  EXPECT_FALSE(adopted->FreeIfUnused()) << "mapped";
  EXPECT_EQ(static_cast<char*>(map)[5], 42);
  adopted->bytes()[5] = std::byte{43};
  EXPECT_EQ(static_cast<char*>(map)[5], 43);
  munmap(map, kPage);
  EXPECT_EQ(adopted->allocated_bytes(), 4 * kMib);
  EXPECT_TRUE(adopted->FreeIfUnused());
  EXPECT_EQ(adopted->allocated_bytes(), 0U);

  auto second = adopted->ClientFd();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_FALSE(adopted->FreeIfUnused());
}

// The adopted descriptor must be a duplicate of the arena's open file: a second open counts as a user.
TEST_F(AdoptedArena, FromAnotherDescriptionWouldNeverBeUnused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to open a segment of mode 0400 for writing";
  const ArenaOptions options = OptionsFor(kMib, Access::kServed);
  const UniqueFd kept = Keep(MakeArena(options));
  const std::string path = "/proc/self/fd/" + std::to_string(kept.get());
  const auto adopted = Adopt(options, UniqueFd(open(path.c_str(), O_RDWR | O_CLOEXEC)));
  ASSERT_NE(adopted, nullptr);
  EXPECT_FALSE(adopted->FreeIfUnused());
}

TEST_F(AdoptedArena, WithAHoleInAPartIsRefusedAndGetsNoZeros) {
  const ArenaOptions options = OptionsFor(8 * kMib, Access::kShared);
  auto made = MakeArena(options);
  ASSERT_NE(made, nullptr);
  const auto bytes = Pattern(8 * kMib, /*seed=*/3);
  std::ranges::copy(bytes, made->bytes().begin());
  for (const uint64_t hole : {8 * kMib - kPage, 5 * kMib, kPage, uint64_t{0}}) {
    SCOPED_TRACE(hole);
    UniqueFd kept = Keep(std::move(made));
    ASSERT_EQ(fallocate(kept.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                        static_cast<off_t>(hole), kPage),
              0);
    const absl::Status status = PinnedArena::Adopt(options, Duplicate(kept)).status();
    EXPECT_EQ(IdOf(status), ErrorId::kCorrupt);
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr("arena test has lost memory at offset " + std::to_string(hole)));
    EXPECT_THAT(message, HasSubstr("8384512 bytes have some, 8388608 should"));
    EXPECT_EQ(AllocatedBytes(kept), 8 * kMib - kPage) << "the refusal gave the hole memory";

    // A page outside the parts belongs to no part: it may be a hole.
    ArenaOptions others = options;
    others.parts.emplace();
    if (hole > 0) others.parts->push_back({.offset_bytes = 0, .size_bytes = hole});
    if (hole + kPage < 8 * kMib) {
      others.parts->push_back(
          {.offset_bytes = hole + kPage, .size_bytes = 8 * kMib - hole - kPage});
    }
    made = Adopt(others, std::move(kept));
    ASSERT_NE(made, nullptr);
    EXPECT_EQ(made->allocated_bytes(), 8 * kMib - kPage);
    for (const ArenaPart& part : *others.parts) {
      EXPECT_TRUE(SameBytes(made->bytes().subspan(part.offset_bytes, part.size_bytes),
                            std::span(bytes).subspan(part.offset_bytes, part.size_bytes)));
    }
    ASSERT_TRUE(made->Populate({.offset_bytes = hole, .size_bytes = kPage}).ok());
    std::ranges::copy(bytes, made->bytes().begin());
  }
}

struct Mismatch {
  std::string said;
  std::function<UniqueFd(UniqueFd)> descriptor;
  std::function<void(ArenaOptions&)> options = [](ArenaOptions&) {};
};

TEST_F(AdoptedArena, IsRefusedWhereTheDescriptorIsNotThatArena) {
  const auto itself = [](UniqueFd fd) { return fd; };
  const std::vector<Mismatch> all = {
      {"it is /memfd:test (deleted)", itself, [](ArenaOptions& o) { o.name = "other"; }},
      {"it has 16384 bytes, not 12288", itself,
       [](ArenaOptions& o) { o.capacity_bytes = 3 * kPage; }},
      {"it has 16384 bytes, not 20480", itself,
       [](ArenaOptions& o) { o.capacity_bytes = 5 * kPage; }},
      {"its mode is 100, not 180", itself, [](ArenaOptions& o) { o.access = Access::kShared; }},
      {"its mode is 180, not 100",
       [](UniqueFd fd) {
         EXPECT_EQ(fchmod(fd.get(), 0600), 0);
         return fd;
       }},
      {"its seals are",
       [](UniqueFd) {
         UniqueFd bare(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
         EXPECT_EQ(ftruncate(bare.get(), 4 * kPage), 0);
         return bare;
       }},
      {"it has no seals",
       [](UniqueFd) { return UniqueFd(open("/proc/self/exe", O_RDONLY | O_CLOEXEC)); }},
      {"it has no seals: Bad file descriptor", [](UniqueFd) { return UniqueFd(); }},
      {"it is not open for reading and writing",
       [](const UniqueFd& fd) {
         const std::string path = "/proc/self/fd/" + std::to_string(fd.get());
         return UniqueFd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
       }},
  };
  for (const Mismatch& mismatch : all) {
    ArenaOptions options = OptionsFor(4 * kPage, Access::kServed);
    UniqueFd kept = Keep(MakeArena(options));
    mismatch.options(options);
    const absl::Status status =
        PinnedArena::Adopt(options, mismatch.descriptor(std::move(kept))).status();
    EXPECT_EQ(IdOf(status), ErrorId::kCorrupt) << mismatch.said;
    EXPECT_THAT(std::string(status.message()), HasSubstr(mismatch.said));
  }
}

TEST_F(AdoptedArena, OfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to give a file away";
  const ArenaOptions options = OptionsFor(4 * kPage, Access::kServed);
  UniqueFd kept = Keep(MakeArena(options));
  ASSERT_EQ(fchown(kept.get(), 65534, 65534), 0);
  const absl::Status status = PinnedArena::Adopt(options, std::move(kept)).status();
  EXPECT_EQ(IdOf(status), ErrorId::kCorrupt);
  EXPECT_THAT(std::string(status.message()), HasSubstr("it belongs to uid 65534, not 0"));
}

TEST_F(AdoptedArena, ClosesItsDescriptorOnExec) {
  const ArenaOptions options = OptionsFor(4 * kPage, Access::kPrivate);
  UniqueFd kept = Keep(MakeArena(options));
  ASSERT_EQ(fcntl(kept.get(), F_SETFD, 0), 0);
  const int number = kept.get();
  const auto adopted = Adopt(options, std::move(kept));
  EXPECT_EQ(fcntl(number, F_GETFD), FD_CLOEXEC);
}

}  // namespace
}  // namespace forebay::pinned_mem
