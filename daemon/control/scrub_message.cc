#include "daemon/control/scrub_message.h"

#include <string>

#include "protocol/durability.h"

namespace forebay::daemon {
namespace {

void Fill(const DamagedSlot& slot, schema::DamagedSlot::Builder out) {
  out.setWhat(slot.what.c_str());
  out.setPath(slot.path.c_str());
  out.setOffsetBytes(slot.slot.offset_bytes);
  out.setBytes(slot.slot.size_bytes);
  auto params = out.initParams(static_cast<unsigned>(slot.params.size()));
  for (unsigned i = 0; i < params.size(); ++i) params.set(i, slot.params[i].c_str());
  out.setError(std::string(slot.status.message()).c_str());
}

void Fill(const ScrubbedJob& job, schema::ScrubbedJob::Builder out) {
  out.setName(job.job->name.c_str());
  out.setUid(job.job->uid);
  out.setDurability(protocol::FormatDurability(job.job->durability).c_str());
  out.setDurableStep(job.job->step);
  out.setSlots(job.slots);
  out.setBytes(job.bytes);
  out.setSeconds(job.seconds);
  auto damaged = out.initDamaged(static_cast<unsigned>(job.damaged.size()));
  for (unsigned i = 0; i < damaged.size(); ++i) Fill(job.damaged[i], damaged[i]);
}

}  // namespace

void FillScrubReport(const ScrubReport& report, schema::ScrubReport::Builder out) {
  out.setClean(report.is_clean());
  out.setSequence(report.recovery.sequence);
  out.setFellBack(report.recovery.fell_back);
  out.setDamagedLabels(report.recovery.damaged_labels);
  out.setDamagedRecords(report.recovery.damaged_records);
  out.setDamagedLedgers(report.recovery.damaged_ledgers);
  auto jobs = out.initJobs(static_cast<unsigned>(report.jobs.size()));
  for (unsigned i = 0; i < jobs.size(); ++i) Fill(report.jobs[i], jobs[i]);
}

}  // namespace forebay::daemon
