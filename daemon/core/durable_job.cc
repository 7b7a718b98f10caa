#include "daemon/core/durable_job.h"

#include <algorithm>

namespace forebay::daemon {

std::vector<nvme::Slot> DurableJob::Slots() const {
  std::vector<nvme::Slot> slots;
  for (const std::optional<DurableBytes>& block : blocks) {
    if (block) slots.push_back(block->slot);
  }
  for (const DurableBytes& part : weights) slots.push_back(part.slot);
  return slots;
}

uint64_t DurableJob::slots() const {
  const auto written = std::ranges::count_if(
      blocks, [](const std::optional<DurableBytes>& block) { return block.has_value(); });
  return static_cast<uint64_t>(written) + weights.size();
}

}  // namespace forebay::daemon
