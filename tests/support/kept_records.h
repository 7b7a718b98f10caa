// SPDX-License-Identifier: Apache-2.0
// The records of a node's jobs. They are written like the executor writes them and read like the next daemon reads them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/exec/recovery/kept_record.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/unique_fd.h"

namespace forebay::testing {

class KeptRecords {
 public:
  KeptRecords();

  // Applies an action to the records. Call this for all actions, in their order.
  void Execute(const daemon::Action& action);
  // Returns the records of the jobs that continue if the node is killed now.
  std::vector<daemon::DurableJob> Read() const;

 private:
  std::map<uint64_t, std::unique_ptr<daemon::KeptRecord>> records_;  // by job
  protocol::UniqueFd step_arena_;  // shared by all records: no test reads its bytes
};

}  // namespace forebay::testing
