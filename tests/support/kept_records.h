// SPDX-License-Identifier: Apache-2.0
// The records of a node's jobs, kept as the executor keeps them, and read as the next daemon reads them.
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

  // In the order of actions.
  void Execute(const daemon::Action& action);
  // Of the jobs that go on if the node is killed now.
  std::vector<daemon::DurableJob> Read() const;

 private:
  std::map<uint64_t, std::unique_ptr<daemon::KeptRecord>> records_;  // by job
  protocol::UniqueFd step_arena_;  // of all of them: nobody looks at bytes
};

}  // namespace forebay::testing
