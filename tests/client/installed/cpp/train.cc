// SPDX-License-Identifier: Apache-2.0
// Trains two parameters for three steps through the C++ API: the gradient of each is its value, so
// they shrink. Prints the values; any error ends it with 1.

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "protocol/error.h"

namespace {

using forebay::client::Attachment;

constexpr auto kTimeout = std::chrono::seconds(30);

absl::Status Train(const std::string& job) {
  auto attached = Attachment::Attach(
      {.job = job, .layout = {.params = {{.name = "w", .shape = {2}}}, .group_names = {"all"}}});
  if (!attached.ok()) return attached.status();
  Attachment& session = **attached;
  if (session.writes_initial()) {
    const std::vector<float> initial{1.0F, -2.0F};
    absl::Status status = session.WriteInitial(0, std::as_bytes(std::span(initial)), kTimeout);
    if (status.ok()) status = session.InitialDone(kTimeout);
    if (!status.ok()) return status;
  }
  const std::vector<forebay::protocol::HyperParams> hyper{
      {.lr = 0.25, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}};
  for (int i = 0; i < 3; ++i) {
    const auto lease = session.Fetch(0, kTimeout);
    if (!lease.ok()) return lease.status();
    const auto slot = session.GradSlot(0, forebay::client::GradFill::kZero, kTimeout);
    if (!slot.ok()) return slot.status();
    std::memcpy(slot->data(), lease->bytes.data(), 2 * sizeof(float));
    absl::Status status = session.Release(*lease);
    if (status.ok()) status = session.GradReady(0);
    if (!status.ok()) return status;
    const auto step = session.Step(session.committed_step() + 1, hyper, 0, {}, kTimeout);
    if (!step.ok()) return step.status();
  }
  float values[2];
  std::memcpy(values, session.weights(0).data(), sizeof(values));
  std::printf("step %llu: %.4f %.4f\n", static_cast<unsigned long long>(session.committed_step()),
              static_cast<double>(values[0]), static_cast<double>(values[1]));
  return session.Detach();
}

}  // namespace

int main() {
  const absl::Status status = Train("installed-cpp");
  if (status.ok()) return 0;
  forebay::protocol::PrintError(status);
  return 1;
}
