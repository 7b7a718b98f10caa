// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/scrub_message.h"

#include <algorithm>
#include <string>

#include "protocol/durability.h"

namespace forebay::daemon {
namespace {

void Fill(const DamagedSlot& slot, const ScrubMessageLimits& limits,
          schema::DamagedSlot::Builder out) {
  out.setWhat(slot.what.c_str());
  out.setPath(slot.path.c_str());
  out.setOffsetBytes(slot.slot.offset_bytes);
  out.setBytes(slot.slot.size_bytes);
  const size_t named = std::min(slot.params.size(), limits.params_per_slot);
  out.setMoreParams(static_cast<uint32_t>(slot.params.size() - named));
  auto params = out.initParams(static_cast<unsigned>(named));
  for (unsigned i = 0; i < params.size(); ++i) params.set(i, slot.params[i].c_str());
  out.setError(std::string(slot.status.message()).c_str());
}

void Fill(const ScrubbedJob& job, const ScrubMessageLimits& limits,
          schema::ScrubbedJob::Builder out) {
  out.setName(job.job->name.c_str());
  out.setUid(job.job->uid);
  out.setDurability(protocol::FormatDurability(job.job->durability).c_str());
  out.setDurableStep(job.job->step);
  out.setSlots(job.slots);
  out.setBytes(job.bytes);
  out.setSeconds(job.seconds);
  out.setDamagedSlots(job.damaged.size());
  const size_t named = std::min(job.damaged.size(), limits.slots_per_job);
  auto damaged = out.initDamaged(static_cast<unsigned>(named));
  for (unsigned i = 0; i < damaged.size(); ++i) Fill(job.damaged[i], limits, damaged[i]);
}

}  // namespace

void FillScrubReport(const ScrubReport& report, const ScrubMessageLimits& limits,
                     schema::ScrubReport::Builder out) {
  out.setClean(report.is_clean());
  out.setSequence(report.recovery.sequence);
  out.setFellBack(report.recovery.fell_back);
  out.setDamagedLabels(report.recovery.damaged_labels);
  out.setDamagedRecords(report.recovery.damaged_records);
  out.setDamagedLedgers(report.recovery.damaged_ledgers);
  auto jobs = out.initJobs(static_cast<unsigned>(report.jobs.size()));
  for (unsigned i = 0; i < jobs.size(); ++i) Fill(report.jobs[i], limits, jobs[i]);
}

}  // namespace forebay::daemon
