// SPDX-License-Identifier: Apache-2.0
// The records of all jobs of this daemon (KeptRecord), from which another daemon continues the jobs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "daemon/core/base/record_actions.h"
#include "daemon/exec/recovery/kept_record.h"
#include "daemon/exec/recovery/stored_descriptors.h"

namespace forebay::daemon {

// A record that this daemon continues. `record` is null if the job has none. `number`: number in the record's name
// (RecordDescriptor). `is_converted`: `record` is new, and the store has a record of release 0.2.0 (record_before.h) under the
// name.
struct AdoptedRecord {
  std::unique_ptr<KeptRecord> record = {};
  uint64_t number = 0;
  bool is_converted = false;
};

// An action that a record takes.
template <typename Record>
concept Recordable = requires(KeptRecord& to, const Record& record) {
  to.Set(record);
};

// States of a job:
//
//   no record   the job ends with this daemon
//   stored      the store has the record under the entry's name: another daemon continues the job if this daemon is killed
//   private     the name is empty: the record only serves the update that this daemon resumes, until the step is published
//   converted   a stored record whose name has a record of release 0.2.0, until Own() stores the new record
//
// Invariants
//
//   1. A job has at most one record. Records have ascending numbers, also over daemons.
//   2. The store lists the name of each record whose name is not empty.
class JobRecords {
 public:
  // `store` outlives this object.
  explicit JobRecords(StoredDescriptors& store) : store_(store) {}

  // Adds a record of the previous daemon. Ignores a record that serves neither the next daemon nor an update.
  void Add(JobId job, AdoptedRecord record);
  // Owns the records that were added (KeptRecord::Own), and stores those that were converted.
  void Own();
  // Makes a record and replaces the job's record. After an error the job retains its older record, if RecordJob::has_record.
  //
  // Errors  those of KeptRecord::Make() and of the store.
  absl::Status Make(const RecordJob& action, uint64_t nonce, uint64_t workers);
  // Adds `record` to the job's record. Does nothing if the job has none.
  template <Recordable Record>
  void Set(const Record& record) {
    const auto found = records_.find(record.job);
    if (found != records_.end()) found->second.record->Set(record);
  }
  void End(JobId job);
  // Leaves the record to the next daemon. Returns the record's step.
  uint64_t Leave(JobId job);

  // Returns null if the job has no record. An update shares the record, which may end meanwhile.
  std::shared_ptr<KeptRecord> Find(JobId job) const;
  // Returns the jobs that the next daemon finds.
  std::set<JobId> stored() const;
  // True if a record has a step that is prepared or decided, and not published.
  bool has_update() const;

 private:
  struct Entry {
    std::shared_ptr<KeptRecord> record;
    std::string name;
    bool is_converted = false;
  };

  StoredDescriptors& store_;
  std::map<JobId, Entry> records_;
  uint64_t last_number_ = 0;
};

}  // namespace forebay::daemon
