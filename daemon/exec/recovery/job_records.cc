// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/job_records.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "protocol/error.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {

void JobRecords::Add(JobId job, AdoptedRecord record) {
  if (record.record == nullptr) return;
  const bool is_stored = store_.is_available();
  if (!is_stored && !record.record->is_in_step()) return;
  Entry& entry = records_[job];
  entry.record = std::move(record.record);
  last_number_ = std::max(last_number_, record.number);
  if (!is_stored) return;
  entry.name = RecordDescriptor(job, record.number);
  entry.is_converted = record.is_converted;
  store_.List(entry.name);
}

void JobRecords::Own() {
  for (auto& [job, entry] : records_) {
    entry.record->Own();
    if (!std::exchange(entry.is_converted, false)) continue;
    const std::string before = std::exchange(entry.name, RecordDescriptor(job, ++last_number_));
    if (const absl::Status stored = store_.Put(entry.name, entry.record->fd()); !stored.ok()) {
      spdlog::warn("{}", protocol::FormatError(stored));
      entry.name.clear();
    }
    store_.Drop(before);
  }
}

absl::Status JobRecords::Make(const RecordJob& action, uint64_t nonce, uint64_t workers) {
  const JobId job = action.job->id;
  absl::StatusOr<std::unique_ptr<KeptRecord>> made = KeptRecord::Make(action, nonce, workers);
  absl::Status status = made.status();
  const std::string name = RecordDescriptor(job, ++last_number_);
  if (status.ok()) status = store_.Put(name, (*made)->fd());
  if (status.ok() || !action.has_record) End(job);
  if (status.ok()) records_[job] = {.record = *std::move(made), .name = name};
  return status;
}

void JobRecords::End(JobId job) {
  const auto node = records_.extract(job);
  if (node.empty()) return;
  node.mapped().record->Drop();  // an update may still use the record
  store_.Drop(node.mapped().name);
}

uint64_t JobRecords::Leave(JobId job) {
  KeptRecord& record = *records_.at(job).record;
  record.Leave();
  return record.step();
}

std::shared_ptr<KeptRecord> JobRecords::Find(JobId job) const {
  const auto found = records_.find(job);
  return found == records_.end() ? nullptr : found->second.record;
}

std::set<JobId> JobRecords::stored() const {
  std::set<JobId> jobs;
  for (const auto& [job, entry] : records_) {
    if (!entry.name.empty()) jobs.insert(job);
  }
  return jobs;
}

bool JobRecords::has_update() const {
  return std::ranges::any_of(records_,
                             [](const auto& of) { return of.second.record->is_in_step(); });
}

}  // namespace forebay::daemon
