// SPDX-License-Identifier: Apache-2.0
#include "tests/support/kept_records.h"

#include <sys/mman.h>
#include <unistd.h>

#include <type_traits>
#include <utility>
#include <variant>

#include "daemon/exec/recovery/job_records.h"

namespace forebay::testing {

// NOLINTNEXTLINE(google-build-using-namespace): the actions
using namespace daemon;

KeptRecords::KeptRecords() : step_arena_(::memfd_create("step", MFD_CLOEXEC)) {
  FOREBAY_CHECK(::ftruncate(step_arena_.get(), off_t{1} << 40) == 0);
}

void KeptRecords::Execute(const Action& action) {
  std::visit(
      [this]<typename One>(const One& one) {
        if constexpr (std::is_same_v<One, RecordJob>) {
          auto made = KeptRecord::Make(one, /*nonce=*/1, /*workers=*/1);
          FOREBAY_CHECK(made.ok());
          records_[one.job->id] = *std::move(made);
        } else if constexpr (std::is_same_v<One, DropRecord> ||
                             std::is_same_v<One, ReplaceStepArena> ||
                             std::is_same_v<One, FreeJob>) {
          records_.erase(one.job);
        } else if constexpr (Recordable<One>) {
          const auto found = records_.find(one.job);
          if (found != records_.end()) found->second->Set(one);
        }
      },
      action);
}

std::vector<DurableJob> KeptRecords::Read() const {
  std::vector<DurableJob> jobs;
  for (const auto& [id, record] : records_) {
    auto adopted = KeptRecord::Adopt(protocol::UniqueFd(::dup(record->fd())), step_arena_.get());
    FOREBAY_CHECK(adopted.ok() ||
                  protocol::IdOf(adopted.status()) == protocol::ErrorId::kJobFailed);
    if (adopted.ok()) jobs.push_back(std::move(adopted->job));
  }
  return jobs;
}

}  // namespace forebay::testing
