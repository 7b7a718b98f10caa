// SPDX-License-Identifier: Apache-2.0
#include "client/admin.h"

#include <kj/debug.h>

#include <utility>
#include <vector>

#include "client/environment.h"
#include "client/internal/attach_request.h"
#include "client/internal/control.h"
#include "protocol/descriptor.h"
#include "protocol/layout_codec.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {
namespace {

using internal::Deadline;
using internal::Peer;
using internal::WaitLimits;

schema::Admin::Client& AdminOf(Peer& peer) { return KJ_ASSERT_NONNULL(peer.admin); }

}  // namespace

class AdminClient::Impl {
 public:
  Impl(std::unique_ptr<internal::Control> control, std::chrono::milliseconds timeout)
      : control_(std::move(control)), timeout_(timeout) {}

  WaitLimits Limits() const { return {.deadline = Deadline::After(timeout_)}; }
  internal::Control& control() { return *control_; }

 private:
  std::unique_ptr<internal::Control> control_;
  std::chrono::milliseconds timeout_;
};

AdminClient::AdminClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AdminClient::~AdminClient() = default;

absl::StatusOr<std::unique_ptr<AdminClient>> AdminClient::Connect(const AdminOptions& options) {
  const WaitLimits limits{.deadline = Deadline::After(options.timeout)};
  ASSIGN_OR_RETURN(auto control,
                   internal::Control::Connect({.socket = SocketPath(options.socket)}, limits));
  const auto ask_admin = [](Peer& peer) -> kj::Promise<absl::StatusOr<bool>> {
    return peer.node.adminRequest().send().then([&peer](auto&& response) -> absl::StatusOr<bool> {
      RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
      peer.admin = response.getAdmin();
      return true;
    });
  };
  RETURN_IF_ERROR(control->thread().Call<bool>("admin", limits, ask_admin).status());
  return std::unique_ptr<AdminClient>(
      new AdminClient(std::make_unique<Impl>(std::move(control), options.timeout)));
}

absl::StatusOr<NodeStatus> AdminClient::Status() {
  return impl_->control().thread().Call<NodeStatus>(
      "status", impl_->Limits(), [](Peer& peer) -> kj::Promise<absl::StatusOr<NodeStatus>> {
        return AdminOf(peer).statusRequest().send().then(
            [](auto&& response) -> absl::StatusOr<NodeStatus> {
              return internal::Clone(response.getStatus());
            });
      });
}

absl::StatusOr<Trace> AdminClient::Trace(const std::string& job) {
  using Events = client::Trace;
  return impl_->control().thread().Call<Events>(
      "trace", impl_->Limits(), [job](Peer& peer) -> kj::Promise<absl::StatusOr<Events>> {
        auto request = AdminOf(peer).traceRequest();
        request.setJob(kj::StringPtr(job.c_str(), job.size()));
        return request.send().then([](auto&& response) -> absl::StatusOr<Events> {
          RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
          return internal::Clone<schema::Admin::TraceResults::Reader>(response);
        });
      });
}

absl::StatusOr<ScrubReport> AdminClient::Scrub(uint64_t bytes_per_s) {
  using Report = client::ScrubReport;
  const WaitLimits limits{.deadline = Deadline::After(std::chrono::hours(24 * 365))};
  return impl_->control().thread().Call<Report>(
      "scrub", limits, [bytes_per_s](Peer& peer) -> kj::Promise<absl::StatusOr<Report>> {
        auto request = AdminOf(peer).scrubRequest();
        request.setBytesPerSecond(bytes_per_s);
        return request.send().then([](auto&& response) -> absl::StatusOr<Report> {
          RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
          return internal::Clone(response.getReport());
        });
      });
}

absl::StatusOr<JobPlan> AdminClient::Plan(const AttachOptions& options,
                                          const std::optional<NodeSize>& node) {
  ASSIGN_OR_RETURN(const protocol::Layout layout, protocol::Layout::Create(options.layout));
  ASSIGN_OR_RETURN(const std::vector<std::byte> encoded, protocol::EncodeLayout(layout.spec()));
  const internal::AttachRequest attach = internal::MakeAttachRequest(options, layout);
  ASSIGN_OR_RETURN(protocol::UniqueFd fd, internal::Control::MakeLayoutFd(encoded));
  auto shared_fd = std::make_shared<protocol::UniqueFd>(std::move(fd));
  return impl_->control().thread().Call<JobPlan>(
      "plan", impl_->Limits(),
      [attach, layout_bytes = encoded.size(), shared_fd,
       node](Peer& peer) -> kj::Promise<absl::StatusOr<JobPlan>> {
        auto request = AdminOf(peer).planRequest();
        request.setRequest(*attach);
        request.getRequest().setLayoutBytes(layout_bytes);
        if (node) {
          request.setLimitBytes(node->dram_bytes);
          request.setSwapBytes(node->swap_bytes);
        }
        request.setLayout(protocol::MakeDescriptor(std::move(*shared_fd)));
        return request.send().then([](auto&& response) -> absl::StatusOr<JobPlan> {
          RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
          return internal::Clone(response.getPlan());
        });
      });
}

absl::StatusOr<JobPlan> AdminClient::PlanJob(const std::string& job,
                                             const std::optional<NodeSize>& node) {
  return impl_->control().thread().Call<JobPlan>(
      "planJob", impl_->Limits(), [job, node](Peer& peer) -> kj::Promise<absl::StatusOr<JobPlan>> {
        auto request = AdminOf(peer).planJobRequest();
        request.setJob(kj::StringPtr(job.c_str(), job.size()));
        if (node) {
          request.setLimitBytes(node->dram_bytes);
          request.setSwapBytes(node->swap_bytes);
        }
        return request.send().then([](auto&& response) -> absl::StatusOr<JobPlan> {
          RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
          return internal::Clone(response.getPlan());
        });
      });
}

absl::Status AdminClient::DeleteJob(const std::string& job) {
  return impl_->control().CallForOutcome("deleteJob", impl_->Limits(), [job](Peer& peer) {
    auto request = AdminOf(peer).deleteJobRequest();
    request.setJob(kj::StringPtr(job.c_str(), job.size()));
    return request;
  });
}

}  // namespace forebay::client
