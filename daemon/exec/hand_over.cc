#include "daemon/exec/hand_over.h"

#include <sys/stat.h>

#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/core/block_map.h"
#include "daemon/core/placement.h"
#include "daemon/exec/session_io.h"
#include "protocol/error.h"
#include "protocol/os/memfd.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

constexpr const char* kLedger = "ledger";

absl::StatusOr<UniqueFd> Take(const std::string& name, const DurableJob& job,
                              DescriptorsByName& from) {
  auto node = from.extract(name);
  if (!node.empty()) return std::move(node.mapped());
  return MakeError(ErrorId::kCorrupt, absl::StrCat("job ", job.name, ": of what the daemon before ",
                                                   "has left, ", name, " is missing"));
}

absl::StatusOr<uint64_t> SizeOf(const UniqueFd& fd) {
  struct stat info = {};
  if (::fstat(fd.get(), &info) == 0) return static_cast<uint64_t>(info.st_size);
  return MakeError(ErrorId::kInternal, protocol::ErrnoText("fstat of an arena", errno));
}

}  // namespace

std::string WeightsDescriptor(JobId job) { return absl::StrCat("weights.", job); }
std::string StatesDescriptor(JobId job) { return absl::StrCat("states.", job); }
std::string StepDescriptor(JobId job) { return absl::StrCat("step.", job); }
std::string GradientsDescriptor(JobId job, uint32_t rank) {
  return absl::StrCat("gradients.", job, ".", rank);
}

absl::Status AddHandedOver(const DurableNode& node, uint64_t nonce, uint64_t sequence,
                           DescriptorsByName& to) {
  ASSIGN_OR_RETURN(const std::vector<std::byte> ledger,
                   EncodeHandedOver(node, nonce, sequence));
  UniqueFd fd = protocol::MakeSealedMemfd("forebay-ledger", ledger);
  if (!fd.valid()) {
    return MakeError(ErrorId::kLimit, protocol::ErrnoText("a memfd for the ledger", errno));
  }
  to.emplace(kLedger, std::move(fd));
  return absl::OkStatus();
}

absl::StatusOr<DecodedLedger> ReadHandedOver(const DescriptorsByName& from) {
  const auto found = from.find(kLedger);
  if (found == from.end()) return DecodedLedger{};
  ASSIGN_OR_RETURN(const uint64_t size, SizeOf(found->second));
  std::vector<std::byte> bytes(size);
  if (protocol::ReadFromStart(found->second.get(), bytes) != static_cast<int64_t>(size)) {
    return MakeError(ErrorId::kCorrupt, "the ledger that the daemon before has left is cut short");
  }
  return DecodeLedger(bytes);
}

absl::StatusOr<AdoptedArenas> AdoptArenas(const DurableJob& job, const ArenaPolicy& policy,
                                          DescriptorsByName& from) {
  AdoptedArenas adopted{.id = job.id,
                        .name = {.uid = job.uid, .name = job.name},
                        .layout = job.layout,
                        .weights = nullptr,
                        .state = nullptr,
                        .step = nullptr};
  const auto adopt = [](const pinned_mem::ArenaOptions& options,
                        UniqueFd fd) -> absl::StatusOr<ArenaRegistry::Arena> {
    ASSIGN_OR_RETURN(auto arena, pinned_mem::PinnedArena::Adopt(options, std::move(fd)));
    // Until the daemon starts: where it does not, the pages are still what was left.
    arena->SetAtEnd(pinned_mem::AtEnd::kKeepForReaders);
    return ArenaRegistry::Arena(std::move(arena));
  };
  const KeptMemory& kept = *job.kept;
  ASSIGN_OR_RETURN(UniqueFd weights, Take(WeightsDescriptor(job.id), job, from));
  ASSIGN_OR_RETURN(adopted.weights, adopt(WeightsOptions(policy, adopted.name, kept.weights_bytes),
                                          std::move(weights)));
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  const Placement placement(*job.layout, map, kept.resident, {});
  if (placement.arena_bytes() > 0) {
    ASSIGN_OR_RETURN(UniqueFd states, Take(StatesDescriptor(job.id), job, from));
    ASSIGN_OR_RETURN(adopted.state,
                     adopt(StateOptions(policy, adopted.name, placement.arena_bytes(),
                                        map.full_block_bytes(), placement.ResidentParts()),
                           std::move(states)));
  }
  if (auto step = from.extract(StepDescriptor(job.id)); !step.empty()) {
    ASSIGN_OR_RETURN(const uint64_t size, SizeOf(step.mapped()));
    ASSIGN_OR_RETURN(adopted.step, adopt(StepOptions(policy, adopted.name, kept.step_bytes, size),
                                         std::move(step.mapped())));
  }
  for (uint32_t rank = 0; rank < job.world_size; ++rank) {
    auto node = from.extract(GradientsDescriptor(job.id, rank));
    if (node.empty()) continue;
    ASSIGN_OR_RETURN(const uint64_t size, SizeOf(node.mapped()));
    ASSIGN_OR_RETURN(adopted.gradients[rank],
                     adopt(GradientOptions(policy, job.name, static_cast<int32_t>(rank), size),
                           std::move(node.mapped())));
  }
  return adopted;
}

}  // namespace forebay::daemon
