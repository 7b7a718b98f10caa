// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/offline_scrub.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/exec/swap_space.h"
#include "nvme/find_volume.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr uint32_t kScrubReadsPerPath = 4;
constexpr std::chrono::seconds kSilentMax(60);

}  // namespace

absl::StatusOr<ScrubReport> ScrubPaths(const std::vector<nvme::PathOptions>& paths,
                                       nvme::IoEngine& engine) {
  ASSIGN_OR_RETURN(const std::vector<nvme::PathOptions> sized, nvme::WithSizes(paths));
  ASSIGN_OR_RETURN(const std::unique_ptr<SwapSpace> swap, SwapSpace::Inspect(sized, engine));
  if (swap == nullptr) return ScrubReport{};
  std::optional<Scrubber> scrubber;
  const auto end_transfers = [&scrubber](const std::vector<SwapDone>& done) {
    for (const SwapDone& one : done) scrubber->OnTransferred(one);
  };
  scrubber.emplace(
      ScrubberOptions{.swap = swap.get(),
                      .jobs = [&swap] { return swap->recovered().jobs; },
                      .end_transfers = end_transfers,
                      .reads = kScrubReadsPerPath * static_cast<uint32_t>(sized.size())});
  std::optional<absl::StatusOr<ScrubReport>> answer;
  scrubber->Start({.bytes_per_s = UINT64_MAX, .is_logged = false},
                  [&answer](absl::StatusOr<ScrubReport> report) { answer = std::move(report); });
  uint32_t silent_waits = 0;
  while (scrubber->Tick(), !answer) {
    std::array<nvme::Completion, 64> completions;
    ASSIGN_OR_RETURN(const size_t count, engine.Wait(kSilentMax, completions));
    silent_waits = count == 0 ? silent_waits + 1 : 0;
    if (silent_waits > 1) {  // a single silent wait may be a signal or a suspended process
      return MakeError(ErrorId::kSwapTimeout,
                       absl::StrCat("the disk has not answered ", swap->in_flight(), " reads for ",
                                    kSilentMax.count(), " s"),
                       "look at the device's health (dmesg)");
    }
    std::vector<SwapDone> done;
    for (size_t i = 0; i < count; ++i) swap->OnCompletion(completions[i], done);
    end_transfers(done);
  }
  if (answer->ok()) (*answer)->recovery = swap->recovery();
  return *std::move(answer);
}

}  // namespace forebay::daemon
