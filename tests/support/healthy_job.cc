// SPDX-License-Identifier: Apache-2.0
#include "tests/support/healthy_job.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <numeric>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/os/status_macros.h"
#include "tests/support/training_client.h"

namespace forebay::testing {
namespace {

constexpr auto kTimeout = std::chrono::seconds(60);

absl::Status Differs(const std::string& what, uint32_t group, uint64_t step) {
  return absl::DataLossError(
      absl::StrCat(what, " of group ", group, " is not that of step ", step));
}

}  // namespace

HealthyJob::HealthyJob(std::vector<std::unique_ptr<client::Attachment>> ranks)
    : ranks_(std::move(ranks)),
      reference_(ranks_[0]->layout(), static_cast<uint32_t>(ranks_.size()), kSeed) {}

absl::StatusOr<std::unique_ptr<HealthyJob>> HealthyJob::Attach(const HealthyJobOptions& options) {
  std::vector<std::unique_ptr<client::Attachment>> ranks;
  for (uint32_t rank = 0; rank < options.shape.world_size; ++rank) {
    ASSIGN_OR_RETURN(auto session, client::Attachment::Attach(
                                       {.socket = options.socket,
                                        .job = options.job,
                                        .rank = rank,
                                        .world_size = options.shape.world_size,
                                        .layout = MakeLayoutSpec(options.shape),
                                        .memory = {.grad_arena_bytes = options.grad_arena_bytes},
                                        .timeout = kTimeout}));
    if (session->writes_initial()) RETURN_IF_ERROR(WriteInitial(*session, kSeed));
    ranks.push_back(std::move(session));
  }
  std::unique_ptr<HealthyJob> job(new HealthyJob(std::move(ranks)));
  const uint64_t committed = job->ranks_[0]->committed_step();
  for (uint64_t t = 1; t <= committed; ++t) job->AdvanceReference(t);
  RETURN_IF_ERROR(job->HoldsItsBytes());
  return job;
}

void HealthyJob::AdvanceReference(uint64_t t) {
  std::vector<uint32_t> groups(layout().groups().size());
  std::iota(groups.begin(), groups.end(), 0U);
  reference_.Step(t, MakeHyperParams(), 0, groups);
  committed_step_ = t;
}

absl::Status HealthyJob::TrainOneMoreStep() { return Step(Part::kWholeStep); }

absl::Status HealthyJob::StepAsDelivered() { return Step(Part::kAsDelivered); }

absl::Status HealthyJob::Step(Part part) {
  const uint64_t t = committed_step_ + 1;
  std::vector<absl::StatusOr<client::StepResult>> results(ranks_.size());
  {
    std::vector<std::jthread> threads;
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        results[rank] = part == Part::kWholeStep ? TrainStep(*ranks_[rank], {.rank = rank, .t = t})
                                                 : CallStep(*ranks_[rank], {.rank = rank, .t = t});
      });
    }
  }
  for (const auto& result : results) {
    RETURN_IF_ERROR(result.status());
    if (result->committed_step != t || result->repeated) {
      return absl::DataLossError(absl::StrCat("step ", t, " ended as ", result->committed_step));
    }
  }
  AdvanceReference(t);
  return HoldsItsBytes();
}

absl::Status HealthyJob::HoldsItsBytes() {
  for (uint32_t g = 0; g < layout().groups().size(); ++g) {
    ASSIGN_OR_RETURN(const client::Lease lease, ranks_[0]->Fetch(g, kTimeout));
    const bool same = std::ranges::equal(lease.bytes, reference_.Weights(g));
    RETURN_IF_ERROR(ranks_[0]->Release(lease));
    if (!same) return Differs("weights", g, committed_step_);
  }
  return CheckStates(*ranks_[0], reference_);
}

absl::Status TrainsOneMoreStep(const HealthyJobOptions& options) {
  ASSIGN_OR_RETURN(const auto job, HealthyJob::Attach(options));
  RETURN_IF_ERROR(job->TrainOneMoreStep());
  for (uint32_t rank = 0; rank < options.shape.world_size; ++rank) {
    RETURN_IF_ERROR(job->rank(rank).Detach());
  }
  return absl::OkStatus();
}

}  // namespace forebay::testing
