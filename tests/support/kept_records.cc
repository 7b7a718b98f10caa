// SPDX-License-Identifier: Apache-2.0
#include "tests/support/kept_records.h"

#include <sys/mman.h>
#include <unistd.h>

namespace forebay::testing {

// NOLINTNEXTLINE(google-build-using-namespace): the actions
using namespace daemon;

KeptRecords::KeptRecords() : step_arena_(::memfd_create("step", MFD_CLOEXEC)) {
  FOREBAY_CHECK(::ftruncate(step_arena_.get(), off_t{1} << 40) == 0);
}

void KeptRecords::Execute(const Action& action) {
  const auto set = [this]<typename Record>(const Record& record) {
    const auto found = records_.find(record.job);
    if (found != records_.end()) found->second->Set(record);
  };
  if (const auto* job = std::get_if<RecordJob>(&action)) {
    auto made = KeptRecord::Make(*job, /*nonce=*/1, /*workers=*/1);
    FOREBAY_CHECK(made.ok());
    records_[job->job->id] = *std::move(made);
  } else if (const auto* block = std::get_if<RecordBlock>(&action)) {
    set(*block);
  } else if (const auto* installed = std::get_if<RecordInstalled>(&action)) {
    set(*installed);
  } else if (const auto* staged = std::get_if<RecordStaged>(&action)) {
    set(*staged);
  } else if (const auto* sums = std::get_if<RecordSums>(&action)) {
    set(*sums);
  } else if (const auto* attempt = std::get_if<RecordAttempt>(&action)) {
    set(*attempt);
  } else if (const auto* prepared = std::get_if<RecordPrepared>(&action)) {
    set(*prepared);
  } else if (const auto* decision = std::get_if<RecordDecision>(&action)) {
    set(*decision);
  } else if (const auto* trust = std::get_if<RecordTrust>(&action)) {
    set(*trust);
  } else if (const auto* step = std::get_if<RecordStep>(&action)) {
    set(*step);
  } else if (const auto* updates = std::get_if<RecordUpdates>(&action)) {
    set(*updates);
  } else if (const auto* lease = std::get_if<RecordLease>(&action)) {
    set(*lease);
  } else if (const auto* ended = std::get_if<RecordLeaseEnd>(&action)) {
    set(*ended);
  } else if (const auto* dropped = std::get_if<DropRecord>(&action)) {
    records_.erase(dropped->job);
  } else if (const auto* replaced = std::get_if<ReplaceStepArena>(&action)) {
    records_.erase(replaced->job);
  } else if (const auto* freed = std::get_if<FreeJob>(&action)) {
    records_.erase(freed->job);
  }
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
