// Extents with two slots each, over one or more swap paths: asynchronous reads and writes,
// checksums that know whose bytes they are, and commits that survive a power cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/checksum.h"
#include "nvme/io/io_engine.h"
#include "nvme/swap_files.h"

namespace forebay::nvme {

namespace internal {
struct Protections;  // tests alone: nvme/internal/protections.h
}  // namespace internal

// Dense: the lowest free numbers are given out first.
enum class ExtentId : uint32_t {};

struct VolumeOptions {
  std::vector<PathOptions> paths;  // 1 to Volume::kPathsMax
  OpenMode mode = OpenMode::kReclaim;
  FileLife life = FileLife::kKept;  // kUnlinked goes with kReclaim only
  uint32_t extents_max =
      16384;  // 1 to Volume::kExtentsMax; the size of the block tables (80 bytes an extent)
};

// What an extent's current slot must hold. A value: take it with Read(), give it to a worker.
struct ExpectedContent {
  ExtentId extent{};
  uint32_t path_index = 0;
  std::string_view path;  // lives as long as the volume
  Identity identity{};
  uint64_t checksum = 0;
  size_t size_bytes = 0;  // as written
  bool verified = true;   // false in tests that switch the protection off
};

// OK where `bytes` are the expected ones.
//
// Threads  Pure; call it on a worker, after the read and before the first use.
// Errors   E_CORRUPT  names path, extent and identity (hex).
absl::Status Verify(const ExpectedContent& expected, std::span<const std::byte> bytes);

struct PathStats {
  uint64_t read_bytes = 0,
           written_bytes = 0;  // as the kernel reported them, short transfers included
  uint64_t reads = 0, writes = 0, flushes = 0;
  uint64_t retries = 0, errors = 0;  // errors: requests that failed for good
  uint64_t capacity_bytes = 0, allocated_bytes = 0;
  bool flush_failed = false;  // no new extent is placed here any more
};

struct VolumeStats {
  std::vector<PathStats> paths;
  uint64_t extents = 0;
  uint64_t commits = 0;
};

// How a kRecover found the volume; sequence 0: nothing was ever committed.
struct RecoveryReport {
  uint64_t sequence = 0;
  uint32_t damaged_records =
      0;  // copies that are not whole; a cut in the middle of a commit leaves some
  uint32_t damaged_tables = 0;  // copies that a whole record names and that do not verify
  bool fell_back = false;  // the newest whole record had no whole table: an older one was taken
};

// A request that has ended.
struct Finished {
  uint64_t token = 0;
  absl::Status status;  // OK, or E_SWAP_IO with path, extent, offset and errno
};

// Every extent has two slots, each whole on one path. Read() reads the current slot. Write() fills
// the other one; Publish() makes it current in memory. Commit() makes what is current now durable,
// for all extents together: data flushed; block table written out of place, flushed; one
// checksummed record that names it, flushed. Slots that the last durable record names are never
// overwritten before a newer one is durable.
//
// A failed flush is final: it is never repeated as a cure. What was written to that path since its
// last good flush counts as lost: NeedsRewrite() lists it, and Commit() refuses until it has been
// written again.
//
// Ownership  Files are the volume's; engine and buffers are the caller's. The engine outlives the
//            volume. Buffers are in use until their token is finished. Requests in flight must be
//            finished before the volume dies.
// Threads    Open() anywhere, it blocks; everything else on the engine's thread, and nothing
//            blocks.
// Limits     kRequestsMax requests unfinished; one commit at a time. A transfer without progress is
//            tried 1 + kRetriesMax times.
class Volume {
 public:
  static constexpr uint32_t kPathsMax = 16;
  static constexpr uint32_t kExtentsMax = 1 << 20;
  static constexpr uint32_t kRequestsMax = 1024;
  static constexpr int kRetriesMax = 8;       // EAGAIN, EINTR, short transfers without progress
  static constexpr int kErrorRetriesMax = 2;  // every other errno

  // Completions whose token has this top byte belong to the volume; the caller's other tokens must
  // not have it.
  static constexpr uint64_t kTokenTag = uint64_t{0xB5} << 56;
  static constexpr bool Owns(uint64_t token) { return (token >> 56) == (kTokenTag >> 56); }

  // Locks and reserves every path, or refuses before anything is written.
  //
  // Errors  those of SwapFileSystem::Open; E_SWAP_PATH: kRecover of something that is not this
  //         volume; E_SWAP_IO; E_CORRUPT: kRecover found records, but none whole with a whole
  //         table.
  static absl::StatusOr<std::unique_ptr<Volume>> Open(const VolumeOptions& options,
                                                      IoEngine& engine, SwapFileSystem& files);

  // The same on the machine's own file system.
  static absl::StatusOr<std::unique_ptr<Volume>> Open(const VolumeOptions& options,
                                                      IoEngine& engine);

  // Tests alone: with protections switched off.
  static absl::StatusOr<std::unique_ptr<Volume>> OpenForTest(
      const VolumeOptions& options, const internal::Protections& protections, IoEngine& engine,
      SwapFileSystem& files);

  Volume(const Volume&) = delete;
  Volume& operator=(const Volume&) = delete;
  ~Volume();

  // Takes `count` extents of `size_bytes` (> 0, rounded up to 4 KiB), slots striped over the paths
  // by weight. All or nothing. The slots hold what was there before: ZeroExtents() is the caller's
  // next step.
  //
  // Errors  E_SWAP_NOSPC  needed and free bytes. E_LIMIT: more than extents_max.
  absl::StatusOr<std::vector<ExtentId>> AllocateExtents(uint32_t count, uint64_t size_bytes);

  // Gives the extents back. What the last durable record names stays reserved until the next
  // commit.
  //
  // Errors  kFailedPrecondition  a request is in flight on one of them, or one is not allocated;
  //                              none is freed.
  absl::Status FreeExtents(std::span<const ExtentId> extents);

  // Writes zeros over both slots of fresh extents, in pieces of `zeros` (a multiple of 4 KiB, all
  // zero, in use until the token is finished). Makes later writes plain overwrites without
  // metadata.
  absl::Status ZeroExtents(std::span<const ExtentId> extents, std::span<const std::byte> zeros,
                           uint64_t token);

  // Starts reading the first `bytes.size()` bytes of the current slot. The bytes are not believed
  // before Verify() with the expected() of the time of this call.
  //
  // Errors  kFailedPrecondition  never written, or being overwritten in place. kResourceExhausted:
  //                              kRequestsMax.
  absl::Status Read(ExtentId extent, std::span<std::byte> bytes, uint64_t token);

  // Starts writing `bytes` into the slot that is not current (or, where the last durable record
  // needs that one, over the current one). `checksum` is Checksum(identity, bytes). During a commit
  // that needs both slots the write waits for its end. Written again before Publish(): the last one
  // counts.
  absl::Status Write(ExtentId extent, std::span<const std::byte> bytes, const Identity& identity,
                     uint64_t checksum, uint64_t token);

  // Makes the finished write current. In-memory; call it when the write's token has finished OK.
  //
  // Errors  kFailedPrecondition  there is no finished write.
  absl::Status Publish(ExtentId extent);

  // Makes the published state of every extent durable; finished OK means that no power cut undoes
  // it. After an error the old or the new state is durable; Commit() again settles it.
  //
  // Errors  kFailedPrecondition  a commit is pending, or NeedsRewrite() is not empty.
  absl::Status Commit(uint64_t token);

  // Extents whose current content a failed flush has put in doubt. Read, verify, write and publish
  // them again.
  std::vector<ExtentId> NeedsRewrite() const;

  // To be called with every completion for which Owns(token); appends what has finished.
  void OnCompletion(const Completion& completion, std::vector<Finished>& finished);

  // Nothing where the extent is not allocated or was never published.
  std::optional<ExpectedContent> expected(ExtentId extent) const;

  std::vector<ExtentId> extents() const;  // allocated ones, ascending; after kRecover those found
  uint64_t size_bytes(ExtentId extent) const;  // 0: not allocated
  uint64_t free_bytes() const;                 // over all paths
  uint64_t durable_sequence() const;           // of the last durable commit, 0: none
  const RecoveryReport& recovery() const;
  uint32_t requests_in_flight() const;
  VolumeStats stats() const;

 private:
  struct State;
  explicit Volume(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::nvme
