#include "daemon/exec/swap_space.h"

#include <sys/random.h>

#include <cerrno>
#include <utility>

#include "daemon/exec/block_tasks.h"
#include "daemon/exec/clock.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

constexpr uint64_t kZerosBytes = protocol::kMiB;  // one write of a new extent

}  // namespace

uint64_t SwapSpace::StagingBytes(const SwapSpaceOptions& options) {
  return options.staging_slots * options.staging_slot_bytes + kZerosBytes;
}

SwapSpace::SwapSpace(const SwapSpaceOptions& options, nvme::IoEngine& engine)
    : options_(options), engine_(engine) {}

SwapSpace::~SwapSpace() {
  volume_.reset();
  if (staging_ != nullptr) engine_.UnregisterBuffer(staging_->bytes());
}

absl::StatusOr<std::unique_ptr<SwapSpace>> SwapSpace::Open(const SwapSpaceOptions& options,
                                                           nvme::IoEngine& engine) {
  std::unique_ptr<SwapSpace> space(new SwapSpace(options, engine));
  // Memory first: where it cannot be had, no space was taken on a disk.
  ASSIGN_OR_RETURN(space->staging_,
                   pinned_mem::PinnedArena::Create({.name = "forebay-staging",
                                                    .capacity_bytes = StagingBytes(options),
                                                    .lock = options.lock}));
  ASSIGN_OR_RETURN(space->volume_,
                   nvme::Volume::Open({.paths = options.paths,
                                       .mode = nvme::OpenMode::kReclaim,
                                       .life = options.life,
                                       .extents_max = static_cast<uint32_t>(options.extents_max)},
                                      engine));
  (void)engine.RegisterBuffer(space->staging_->bytes());  // speed alone
  if (::getrandom(&space->nonce_, sizeof(space->nonce_), 0) != sizeof(space->nonce_)) {
    return protocol::MakeError(protocol::ErrorId::kInternal,
                               protocol::ErrnoText("getrandom", errno));
  }
  return space;
}

std::span<std::byte> SwapSpace::Slot(uint32_t slot, uint64_t bytes) const {
  FOREBAY_CHECK(slot < options_.staging_slots && bytes <= options_.staging_slot_bytes);
  return staging_->bytes().subspan(slot * options_.staging_slot_bytes, bytes);
}

nvme::ExtentId SwapSpace::ExtentOf(JobId job, uint32_t extent) const {
  const auto found = extents_.find(job);
  FOREBAY_CHECK(found != extents_.end() && extent < found->second.size());
  return found->second[extent];
}

absl::Status SwapSpace::StartMake(const CreateJobSwap& action) {
  ASSIGN_OR_RETURN(std::vector<nvme::ExtentId> extents,
                   volume_->AllocateExtents(action.extents, action.extent_bytes));
  const auto zeros = staging_->bytes().last(kZerosBytes);
  const absl::Status status = volume_->ZeroExtents(extents, zeros, action.task);
  if (!status.ok()) {
    RETURN_IF_ERROR(volume_->FreeExtents(extents));
    return status;
  }
  extents_.emplace(action.job, std::move(extents));
  pending_[action.task] = {.task = action.task,
                           .kind = SwapDone::Kind::kMade,
                           .job = action.job,
                           .start_ns = MonotonicNs()};
  return absl::OkStatus();
}

bool SwapSpace::IsFresh(const ReadBlock& action) const {
  return !volume_->expected(ExtentOf(action.job, action.place.extent)).has_value();
}

absl::Status SwapSpace::StartRead(const ReadBlock& action) {
  RETURN_IF_ERROR(volume_->Read(ExtentOf(action.job, action.place.extent),
                                Slot(action.place.staging_slot, action.bytes), action.task));
  pending_[action.task] = {.task = action.task,
                           .kind = SwapDone::Kind::kRead,
                           .job = action.job,
                           .extent = action.place.extent,
                           .bytes = action.bytes,
                           .start_ns = MonotonicNs()};
  return absl::OkStatus();
}

absl::Status SwapSpace::StartWrite(const WriteBlock& action) {
  RETURN_IF_ERROR(volume_->Write(
      ExtentOf(action.job, action.place.extent), Slot(action.place.staging_slot, action.bytes),
      MakeIdentity(action.identity, nonce_), action.checksum, action.task));
  pending_[action.task] = {.task = action.task,
                           .kind = SwapDone::Kind::kWritten,
                           .job = action.job,
                           .extent = action.place.extent,
                           .bytes = action.bytes,
                           .start_ns = MonotonicNs()};
  return absl::OkStatus();
}

std::optional<nvme::ExpectedContent> SwapSpace::Expected(JobId job, const BlockPlace& place,
                                                         const BlockIdentity& identity,
                                                         uint64_t checksum) const {
  std::optional<nvme::ExpectedContent> expected = volume_->expected(ExtentOf(job, place.extent));
  if (expected.has_value()) {
    expected->identity = MakeIdentity(identity, nonce_);
    expected->checksum = checksum;
  }
  return expected;
}

void SwapSpace::FreeJob(JobId job) {
  const auto found = extents_.find(job);
  if (found == extents_.end()) return;
  FOREBAY_CHECK(volume_->FreeExtents(found->second).ok());  // no task of the job is left
  extents_.erase(found);
}

void SwapSpace::OnCompletion(const nvme::Completion& completion, std::vector<SwapDone>& done) {
  std::vector<nvme::Finished> finished;
  volume_->OnCompletion(completion, finished);
  for (const nvme::Finished& one : finished) {
    auto node = pending_.extract(one.token);
    FOREBAY_CHECK(!node.empty());
    SwapDone result = std::move(node.mapped());
    result.status = one.status;
    if (result.kind == SwapDone::Kind::kWritten && result.status.ok()) {
      result.status = volume_->Publish(ExtentOf(result.job, result.extent));
    }
    done.push_back(std::move(result));
  }
}

}  // namespace forebay::daemon
