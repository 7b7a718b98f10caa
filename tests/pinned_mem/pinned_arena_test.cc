// SPDX-License-Identifier: Apache-2.0
// Goal    An arena is exactly its size, zero, populated and aligned. Its seals block attacks that succeed on a segment without
//         seals.
// Method  Make arenas of odd sizes, query the kernel (st_blocks, mincore), then attack them with the system calls that a client
//         could use on its descriptor.

#include "pinned_mem/pinned_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <vector>

#include "gmock/gmock.h"
#include "protocol/error.h"
#include "tests/pinned_mem/arena_support.h"

namespace forebay::pinned_mem {
namespace {

using ::forebay::protocol::ErrorId;
using ::forebay::protocol::IdOf;
using ::forebay::protocol::UniqueFd;
using ::forebay::testing::kMib;
using ::forebay::testing::kPage;
using ::forebay::testing::MakeArena;
using ::forebay::testing::OptionsFor;

class PinnedArenaTest : public ::forebay::testing::DescriptorsAsBefore {};
class PinnedArenaSeals : public ::forebay::testing::DescriptorsAsBefore {};

// Attacks on a descriptor of a segment of two pages or more. Each returns 0 on success, else the errno.
struct Attack {
  static int MapWritable(int fd) {
    void* const map = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) return errno;
    munmap(map, kPage);
    return 0;
  }
  static int Write(int fd) { return pwrite(fd, "x", 1, 0) == 1 ? 0 : errno; }
  static int Shrink(int fd) { return ftruncate(fd, kPage) == 0 ? 0 : errno; }
  static int Grow(int fd) { return ftruncate(fd, 1 << 30) == 0 ? 0 : errno; }
  static int PunchHole(int fd) {
    const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    return fallocate(fd, mode, 0, kPage) == 0 ? 0 : errno;
  }
  static int AddSeal(int fd) { return fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0 ? 0 : errno; }
};

TEST_F(PinnedArenaTest, IsExactlyItsSizeZeroAndAlignedWhateverTheSize) {
  for (const uint64_t capacity : {kPage, 3 * kPage, 2 * kMib - kPage, 2 * kMib, 2 * kMib + kPage,
                                  4 * kMib, 7 * kMib + 5 * kPage}) {
    SCOPED_TRACE(capacity);
    const auto arena = MakeArena(OptionsFor(capacity, Access::kPrivate));
    ASSERT_NE(arena, nullptr);
    EXPECT_EQ(arena->bytes().size(), capacity);
    EXPECT_EQ(arena->capacity_bytes(), capacity);
    EXPECT_EQ(arena->allocated_bytes(), capacity) << "by st_blocks: all of it, and no page more";
    EXPECT_LE(arena->huge_bytes(), capacity);
    EXPECT_EQ(arena->huge_bytes() % (2 * kMib), 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena->bytes().data()) % (2 * kMib), 0u);
    EXPECT_TRUE(std::ranges::all_of(arena->bytes(), [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(arena->allocated_bytes(), capacity) << "reading changed nothing";
  }
}

TEST_F(PinnedArenaTest, EveryPageIsPopulatedBeforeCreateReturns) {
  const auto arena = MakeArena(OptionsFor(5 * kMib + kPage, Access::kPrivate));
  ASSERT_NE(arena, nullptr);
  std::vector<unsigned char> resident(arena->capacity_bytes() / kPage);
  ASSERT_EQ(mincore(arena->bytes().data(), arena->capacity_bytes(), resident.data()), 0);
  EXPECT_TRUE(std::ranges::all_of(resident, [](unsigned char r) { return (r & 1) != 0; }));
}

TEST_F(PinnedArenaTest, IsPopulatedByAllThreadsWithItsProgressAndNodesKnown) {
  ArenaOptions options = OptionsFor(101 * kMib + kPage, Access::kPrivate);
  options.threads = 3;
  options.populated_bytes = std::make_shared<std::atomic<uint64_t>>(0);
  const auto machine = LoadNumaTopology();
  ASSERT_TRUE(machine.ok());
  options.placement = {.nodes = {machine->nodes.back().index}};
  const auto arena = MakeArena(options);
  ASSERT_NE(arena, nullptr);
  EXPECT_EQ(arena->allocated_bytes(), options.capacity_bytes);
  EXPECT_EQ(*options.populated_bytes, options.capacity_bytes);
  EXPECT_EQ(arena->PlacedNode(0), machine->nodes.back().index);
  if (!arena->numa_nodes().empty()) {
    EXPECT_EQ(arena->numa_nodes(), std::vector<int>{machine->nodes.back().index});
  }
}

TEST_F(PinnedArenaTest, IsInterleavedPieceByPiece) {
  const auto machine = LoadNumaTopology();
  ASSERT_TRUE(machine.ok());
  if (machine->nodes.size() < 2) GTEST_SKIP() << "this machine has one NUMA node";
  ArenaOptions options = OptionsFor(64 * kMib, Access::kPrivate);
  const int first = machine->nodes[0].index;
  const int second = machine->nodes[1].index;
  options.placement = {.nodes = {first, second}};
  const auto arena = MakeArena(options);
  ASSERT_NE(arena, nullptr);
  EXPECT_EQ(arena->numa_nodes(), (std::vector<int>{first, second}));
  EXPECT_EQ(arena->PlacedNode(2 * kMib), second);
}

TEST_F(PinnedArenaTest, PartsGetAndLoseTheirMemoryAndNoPageMore) {
  ArenaOptions options = OptionsFor(16 * kMib, Access::kPrivate);
  const uint64_t part_bytes = 3 * kMib + kPage;  // no boundary on a huge page
  options.parts = {{.offset_bytes = 0, .size_bytes = 2 * part_bytes}};
  options.populated_bytes = std::make_shared<std::atomic<uint64_t>>(0);
  const auto arena = MakeArena(options);
  ASSERT_NE(arena, nullptr);
  EXPECT_EQ(arena->allocated_bytes(), 2 * part_bytes);
  EXPECT_EQ(*options.populated_bytes, 2 * part_bytes);
  EXPECT_LE(arena->huge_bytes(), 2 * part_bytes);
  std::ranges::fill(arena->bytes().first(2 * part_bytes), std::byte{7});

  ASSERT_TRUE(arena->FreePart({.offset_bytes = part_bytes, .size_bytes = part_bytes}).ok());
  EXPECT_EQ(arena->allocated_bytes(), part_bytes);
  EXPECT_EQ(arena->populated_bytes(), part_bytes);
  EXPECT_LE(arena->huge_bytes(), part_bytes);
  EXPECT_TRUE(std::ranges::all_of(arena->bytes().first(part_bytes),
                                  [](std::byte b) { return b == std::byte{7}; }));

  ASSERT_TRUE(arena->Populate({.offset_bytes = 2 * part_bytes, .size_bytes = part_bytes}).ok());
  EXPECT_EQ(arena->allocated_bytes(), 2 * part_bytes);
  EXPECT_EQ(arena->populated_bytes(), 2 * part_bytes);
  EXPECT_TRUE(std::ranges::all_of(arena->bytes().subspan(2 * part_bytes, part_bytes),
                                  [](std::byte b) { return b == std::byte{0}; }));
}

TEST_F(PinnedArenaTest, AnArenaWithoutPartsHasNoMemoryYet) {
  constexpr uint64_t kBytes = uint64_t{1} << 38;  // ThreadSanitizer has 1.5 TiB of addresses
  ArenaOptions options = OptionsFor(kBytes, Access::kPrivate);
  options.parts.emplace();
  const auto arena = MakeArena(options);
  ASSERT_NE(arena, nullptr);
  EXPECT_EQ(arena->allocated_bytes(), 0U);
  ASSERT_TRUE(arena->Populate({.offset_bytes = kBytes / 2, .size_bytes = kMib}).ok());
  EXPECT_EQ(arena->allocated_bytes(), kMib);
}

// Bytes in a field of /proc/self/smaps for the mapping that starts at `begin`.
uint64_t SmapsBytes(const void* begin, const std::string& field) {
  std::ifstream smaps("/proc/self/smaps");
  const std::string start = [begin] {
    std::ostringstream text;
    text << std::hex << reinterpret_cast<uintptr_t>(begin) << "-";
    return text.str();
  }();
  std::string line;
  bool inside = false;
  while (std::getline(smaps, line)) {
    const std::string first = line.substr(0, line.find(' '));
    if (first.find('-') != std::string::npos) inside = line.starts_with(start);
    if (inside && first == field) return std::stoull(line.substr(field.size())) * 1024;
  }
  ADD_FAILURE() << "no " << field << " for this mapping";
  return 0;
}

TEST_F(PinnedArenaTest, HugeBytesAreWhatTheKernelMapsInTwoMegabytePieces) {
  const auto arena = MakeArena(OptionsFor(8 * kMib + kPage, Access::kPrivate));
  ASSERT_NE(arena, nullptr);
  std::printf("[ pages ] %.0f of 8 MiB on 2 MiB pages\n",
              static_cast<double>(arena->huge_bytes()) / static_cast<double>(kMib));
  EXPECT_EQ(SmapsBytes(arena->bytes().data(), "ShmemPmdMapped:"), arena->huge_bytes());
}

TEST_F(PinnedArenaTest, IsLockedWherePossibleAndLeftOutOfCoreFiles) {
  const auto arena = MakeArena(OptionsFor(kMib, Access::kPrivate));
  ASSERT_NE(arena, nullptr);
  if (arena->locked()) {
    EXPECT_EQ(SmapsBytes(arena->bytes().data(), "Locked:"), kMib);
  }
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false, dont_dump = false;
  while (std::getline(smaps, line)) {
    if (line.find("/memfd:test") != std::string::npos) inside = true;
    if (inside && line.starts_with("VmFlags:")) {
      dont_dump = line.find(" dd") != std::string::npos;
      break;
    }
  }
  EXPECT_TRUE(dont_dump);
}

TEST_F(PinnedArenaTest, WrongOptionsAreRefusedByName) {
  const auto refusal = [](auto change) {
    ArenaOptions options = OptionsFor(kPage, Access::kPrivate);
    change(options);
    return IdOf(PinnedArena::Create(options).status());
  };
  EXPECT_EQ(refusal([](ArenaOptions& o) { o.capacity_bytes = 0; }), ErrorId::kRange);
  EXPECT_EQ(refusal([](ArenaOptions& o) { o.capacity_bytes = 4097; }), ErrorId::kRange);
  EXPECT_EQ(refusal([](ArenaOptions& o) { o.capacity_bytes = uint64_t{1} << 60; }),
            ErrorId::kRange);
  EXPECT_EQ(refusal([](ArenaOptions& o) { o.capacity_bytes = uint64_t{1} << 45; }),
            ErrorId::kDramLimit);
  EXPECT_EQ(refusal([](ArenaOptions& o) { o.name = ""; }), ErrorId::kRange);
  EXPECT_EQ(refusal([](ArenaOptions& o) { o.name = "a/b"; }), ErrorId::kRange);
  EXPECT_EQ(refusal([](ArenaOptions& o) { o.name = std::string(201, 'x'); }), ErrorId::kRange);
}

// Runs the attacks below on an unsealed memfd. Each succeeds, which proves that the attacks work.
TEST_F(PinnedArenaSeals, WithoutThemEveryAttackSucceeds) {
  const UniqueFd fd(memfd_create("bare", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 4 * kPage), 0);
  EXPECT_EQ(Attack::MapWritable(fd.get()), 0);
  EXPECT_EQ(Attack::Write(fd.get()), 0);
  EXPECT_EQ(Attack::PunchHole(fd.get()), 0);
  EXPECT_EQ(Attack::Grow(fd.get()), 0);
  EXPECT_EQ(Attack::Shrink(fd.get()), 0);
  EXPECT_EQ(Attack::AddSeal(fd.get()), 0);
}

TEST_F(PinnedArenaSeals, ClientsCannotResizeOrSealASharedArena) {
  const auto arena = MakeArena(OptionsFor(4 * kPage, Access::kShared));
  ASSERT_NE(arena, nullptr);
  const auto fd = arena->ClientFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(fcntl(fd->get(), F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(Attack::Shrink(fd->get()), EPERM);
  EXPECT_EQ(Attack::Grow(fd->get()), EPERM);
  EXPECT_EQ(Attack::AddSeal(fd->get()), EPERM);
  EXPECT_EQ(Attack::MapWritable(fd->get()), 0);
  ASSERT_EQ(pwrite(fd->get(), "x", 1, kPage), 1);
  EXPECT_EQ(arena->bytes()[kPage], std::byte{'x'});
}

TEST_F(PinnedArenaSeals, AHoleThatAClientPunchesReadsAsZeros) {
  const auto arena = MakeArena(OptionsFor(4 * kPage, Access::kShared));
  ASSERT_NE(arena, nullptr);
  const auto fd = arena->ClientFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  arena->bytes()[0] = std::byte{7};
  EXPECT_EQ(Attack::PunchHole(fd->get()), 0);
  EXPECT_EQ(arena->bytes()[0], std::byte{0});
}

TEST_F(PinnedArenaSeals, ADescriptorOfAClientSharesNoFlagsWithOurs) {
  const auto arena = MakeArena(OptionsFor(4 * kPage, Access::kShared));
  ASSERT_NE(arena, nullptr);
  const auto one = arena->ClientFd();
  const auto other = arena->ClientFd();
  ASSERT_TRUE(one.ok() && other.ok());
  ASSERT_EQ(fcntl(one->get(), F_SETFL, O_APPEND), 0);
  EXPECT_EQ(fcntl(other->get(), F_GETFL) & O_APPEND, 0);
}

TEST_F(PinnedArenaSeals, AServedArenaIsReadOnlyForClients) {
  const auto arena = MakeArena(OptionsFor(4 * kPage, Access::kServed));
  ASSERT_NE(arena, nullptr);
  arena->bytes()[5] = std::byte{42};
  const auto fd = arena->ClientFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(fcntl(fd->get(), F_GETFL) & O_ACCMODE, O_RDONLY);
  EXPECT_EQ(fcntl(fd->get(), F_GETFD), FD_CLOEXEC);
  void* const map = mmap(nullptr, 4 * kPage, PROT_READ, MAP_SHARED, fd->get(), 0);
  ASSERT_NE(map, MAP_FAILED);
  EXPECT_EQ(static_cast<char*>(map)[5], 42);
  EXPECT_EQ(mprotect(map, kPage, PROT_READ | PROT_WRITE), -1);
  EXPECT_EQ(madvise(map, kPage, MADV_REMOVE), -1);
  munmap(map, 4 * kPage);
  EXPECT_EQ(Attack::MapWritable(fd->get()), EACCES);
  EXPECT_EQ(Attack::Write(fd->get()), EBADF);
  EXPECT_EQ(Attack::PunchHole(fd->get()), EBADF);
  EXPECT_EQ(Attack::AddSeal(fd->get()), EPERM);
  struct stat info = {};
  ASSERT_EQ(fstat(fd->get(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0400u);
}

TEST_F(PinnedArenaSeals, AServedArenaCanBeMappedWritableByWhomItsOwnerLets) {
  const auto arena = MakeArena(OptionsFor(4 * kPage, Access::kServed));
  ASSERT_NE(arena, nullptr);
  auto fd = arena->WritableClientFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(fcntl(fd->get(), F_GETFL) & O_ACCMODE, O_RDWR);
  void* const map = mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
  ASSERT_NE(map, MAP_FAILED);
  static_cast<char*>(map)[5] = 42;
  EXPECT_EQ(arena->bytes()[5], std::byte{42});
  EXPECT_EQ(Attack::Shrink(fd->get()), EPERM);
  EXPECT_EQ(Attack::Grow(fd->get()), EPERM);
  EXPECT_EQ(Attack::AddSeal(fd->get()), EPERM);
  // The access of all other clients is unchanged.
  struct stat info = {};
  ASSERT_EQ(fstat(fd->get(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0400u);
  const auto reader = arena->ClientFd();
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(Attack::MapWritable(reader->get()), EACCES);
  munmap(map, 4 * kPage);
}

TEST_F(PinnedArenaTest, PagesThatAClientHasMappedWritableAreInUse) {
  const auto arena = MakeArena(OptionsFor(4 * kPage, Access::kServed));
  ASSERT_NE(arena, nullptr);
  auto fd = arena->WritableClientFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  void* const map = mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
  ASSERT_NE(map, MAP_FAILED);
  ASSERT_EQ(mprotect(map, 4 * kPage, PROT_READ), 0);
  EXPECT_FALSE(arena->FreeIfUnused());
  fd->Reset();
  EXPECT_FALSE(arena->FreeIfUnused());
  munmap(map, 4 * kPage);
  EXPECT_TRUE(arena->FreeIfUnused());
}

TEST_F(PinnedArenaTest, APrivateArenaHasNoDescriptorForClients) {
  const auto arena = MakeArena(OptionsFor(kPage, Access::kPrivate));
  ASSERT_NE(arena, nullptr);
  EXPECT_EQ(IdOf(arena->ClientFd().status()), ErrorId::kRange);
}

uint64_t AllocatedBytes(const UniqueFd& fd) {
  struct stat info = {};
  EXPECT_EQ(fstat(fd.get(), &info), 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

TEST_F(PinnedArenaTest, TheEndOfASharedArenaFreesItsPagesUnderTheClient) {
  for (const Access access : {Access::kShared, Access::kServed}) {
    auto arena = MakeArena(OptionsFor(4 * kMib, access));
    ASSERT_NE(arena, nullptr);
    const auto fd = arena->ClientFd();
    ASSERT_TRUE(fd.ok()) << fd.status();
    void* const map = mmap(nullptr, 4 * kMib, PROT_READ, MAP_SHARED, fd->get(), 0);
    ASSERT_NE(map, MAP_FAILED);
    arena->bytes()[5] = std::byte{42};
    EXPECT_EQ(AllocatedBytes(*fd), 4 * kMib);
    arena.reset();
    EXPECT_EQ(AllocatedBytes(*fd), 0U);
    EXPECT_EQ(static_cast<char*>(map)[5], 0);
    munmap(map, 4 * kMib);
  }
}

TEST_F(PinnedArenaTest, ReadersKeepThePagesOfAnArenaThatIsMadeForIt) {
  ArenaOptions options = OptionsFor(4 * kMib, Access::kServed);
  options.at_end = AtEnd::kKeepForReaders;
  auto arena = MakeArena(options);
  ASSERT_NE(arena, nullptr);
  arena->bytes()[5] = std::byte{42};
  const auto fd = arena->ClientFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  arena.reset();
  EXPECT_EQ(AllocatedBytes(*fd), 4 * kMib);
  char byte = 0;
  EXPECT_EQ(pread(fd->get(), &byte, 1, 5), 1);
  EXPECT_EQ(byte, 42);
}

TEST_F(PinnedArenaTest, IsNotFreedWhileAReaderHasItOpenOrMapped) {
  const auto arena = MakeArena(OptionsFor(4 * kMib, Access::kServed));
  ASSERT_NE(arena, nullptr);
  arena->bytes()[5] = std::byte{42};
  auto fd = arena->ClientFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_FALSE(arena->FreeIfUnused());
  void* const map = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, fd->get(), 0);
  ASSERT_NE(map, MAP_FAILED);
  fd->Reset();
  EXPECT_FALSE(arena->FreeIfUnused()) << "mapped";
  EXPECT_EQ(static_cast<char*>(map)[5], 42);
  munmap(map, kPage);
  EXPECT_EQ(arena->allocated_bytes(), 4 * kMib);
  EXPECT_TRUE(arena->FreeIfUnused());
  EXPECT_EQ(arena->allocated_bytes(), 0U);
}

// A descriptor of open(2) O_PATH cannot read and does not retain the pages.
TEST_F(PinnedArenaTest, ADescriptorWithoutAccessKeepsNoPages) {
  const auto arena = MakeArena(OptionsFor(4 * kMib, Access::kServed));
  ASSERT_NE(arena, nullptr);
  auto fd = arena->ClientFd();
  ASSERT_TRUE(fd.ok()) << fd.status();
  const std::string path = "/proc/self/fd/" + std::to_string(fd->get());
  const UniqueFd no_access(open(path.c_str(), O_PATH | O_CLOEXEC));
  ASSERT_TRUE(no_access.valid());
  fd->Reset();
  EXPECT_TRUE(arena->FreeIfUnused());
  EXPECT_EQ(arena->allocated_bytes(), 0U);
}

TEST_F(PinnedArenaTest, ItsEndUnmapsIt) {
  const auto arena = MakeArena(OptionsFor(4 * kPage, Access::kServed));
  ASSERT_NE(arena, nullptr);
  std::byte* const begin = arena->bytes().data();
  auto other = MakeArena(OptionsFor(4 * kMib, Access::kServed));
  std::byte* const other_begin = other->bytes().data();
  other.reset();
  unsigned char resident[4 * kMib / kPage];
  EXPECT_EQ(mincore(begin, 4 * kPage, resident), 0);
  EXPECT_EQ(mincore(other_begin, 4 * kMib, resident), -1) << "still mapped";
}

}  // namespace
}  // namespace forebay::pinned_mem
