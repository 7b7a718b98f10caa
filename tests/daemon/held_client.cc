// SPDX-License-Identifier: Apache-2.0
// A training process to be killed: attaches, prints what its arguments ask for, and waits.
//
// usage: held_client SOCKET RANK WORLD WHAT [UID [JOB]]     UID: becomes that user first
//   begin      says "attaching", attaches and says "held"; as rank 0 writes no parameters
//   hold       the same, but writes them, and takes a lease
//   step       the same without the lease, then delivers all groups, says "held" and waits in the
//              next step
//   read       attaches as a reader, takes a lease and says "held"
//   fork       as hold; a forked child lives on: "held PID"
//   fork,step  both

#include <grp.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "client/client.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "tests/support/healthy_job.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace {

using forebay::client::Attachment;
constexpr auto kTimeout = std::chrono::seconds(60);

absl::Status Run(const std::string& socket, uint32_t rank, uint32_t world, const std::string& what,
                 const std::string& job) {
  namespace testing = forebay::testing;
  const bool forks = what.starts_with("fork");
  const bool steps = what.ends_with("step");
  const bool reads = what == "read";
  std::fprintf(stderr, "attaching\n");
  ASSIGN_OR_RETURN(auto session, Attachment::Attach({.socket = socket,
                                                     .job = job,
                                                     .reader = reads,
                                                     .rank = rank,
                                                     .world_size = world,
                                                     .layout = testing::MakeLayoutSpec({}),
                                                     .timeout = kTimeout}));
  const auto groups = static_cast<uint32_t>(session->layout().groups().size());
  const uint64_t t = session->committed_step() + 1;
  if (session->writes_initial() && what != "begin") {
    RETURN_IF_ERROR(testing::WriteInitial(*session, testing::HealthyJob::kSeed));
  }
  if (what != "begin" && !steps) RETURN_IF_ERROR(session->Fetch(0, kTimeout).status());
  if (steps) {
    for (uint32_t g = 0; g < groups; ++g) {
      RETURN_IF_ERROR(testing::DeliverGradient(*session, g, rank, t));
    }
  }
  const pid_t child = forks ? ::fork() : -1;
  if (child == 0) {
    while (true) ::pause();
  }
  std::fprintf(stderr, "held %d\n", static_cast<int>(child));
  if (steps) {
    return session->Step(t, testing::MakeHyperParams(), 0, {}, kTimeout).status();
  }
  while (true) ::pause();
}

// Retains the socket's folder as working directory, because another user could not enter it.
bool Become(uid_t uid, std::string& socket) {
  const size_t slash = socket.rfind('/');
  if (::chdir(socket.substr(0, slash).c_str()) != 0) return false;
  socket = socket.substr(slash + 1);
  if (uid == ::geteuid()) return true;
  return ::setgroups(0, nullptr) == 0 && ::setgid(uid) == 0 && ::setuid(uid) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5 || argc > 7) return 2;
  std::string socket = argv[1];
  if (argc > 5 && !Become(static_cast<uid_t>(std::stoul(argv[5])), socket)) return 3;
  const absl::Status status =
      Run(socket, static_cast<uint32_t>(std::stoul(argv[2])),
          static_cast<uint32_t>(std::stoul(argv[3])), argv[4], argc > 6 ? argv[6] : "job");
  forebay::protocol::PrintError(status);
  return status.ok() ? 0 : 1;
}
