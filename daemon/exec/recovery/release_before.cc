// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/release_before.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "protocol/os/memfd.h"
#include "protocol/os/status_macros.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

constexpr char kLedgerDescriptor[] = "ledger";

absl::StatusOr<DecodedLedger> ReadLedger(const DescriptorsByName& left) {
  const auto found = left.find(kLedgerDescriptor);
  if (found == left.end()) return DecodedLedger{};
  ASSIGN_OR_RETURN(const uint64_t size, SizeOf(found->second));
  if (size > nvme::Volume::kLedgerBytesMax) {
    return protocol::MakeError(
        protocol::ErrorId::kCorrupt,
        absl::StrCat("the ledger that the daemon before has left has ", size, " bytes"));
  }
  std::vector<std::byte> bytes(size);
  if (protocol::ReadFromStart(found->second.get(), bytes) != static_cast<int64_t>(size)) {
    return protocol::MakeError(protocol::ErrorId::kCorrupt,
                               "the ledger that the daemon before has left is cut short");
  }
  return DecodeLedger(bytes);
}

// Returns the job in the form of a record. The ledger lists durable copies of blocks in DRAM and of the weights. A record does
// not, since the ledger on swap lists them.
RecordedJob Converted(DurableJob job, uint64_t nonce) {
  for (size_t block = 0; block < job.blocks.size(); ++block) {
    if (job.kept->resident[block]) job.blocks[block].reset();
  }
  job.weights.clear();
  job.kept->has_record = false;
  return {.job = std::move(job), .nonce = nonce};
}

}  // namespace

void AddHandedOver(const DescriptorsByName& left, std::vector<RecordedJob>& recorded) {
  const absl::StatusOr<DecodedLedger> ledger = ReadLedger(left);
  if (!ledger.ok()) {
    spdlog::error("what the daemon before has left is not used: {}",
                  protocol::FormatError(ledger.status()));
    return;
  }
  for (const auto& job : ledger->node.jobs) {
    if (!ledger->handed_over.contains(job->id)) continue;
    const auto is_it = [&](const RecordedJob& one) { return one.job.id == job->id; };
    const auto found = std::ranges::find_if(recorded, is_it);
    if (found == recorded.end()) {
      recorded.push_back(Converted(*job, ledger->nonce));
    } else if (found->job.step != job->step || found->job.kept->update != nullptr) {
      *found = Converted(*job, ledger->nonce);
    }
  }
}

}  // namespace forebay::daemon
