// A training process to be killed: attaches, says what it is told to, and waits.
//
//   held_client SOCKET RANK WORLD hold       attaches (writes the parameters as first rank), takes
//   a lease, "held" held_client SOCKET RANK WORLD fork       the same; a forked child lives on:
//   "held PID" held_client SOCKET RANK WORLD step       the same, then delivers all groups and
//   waits in step 1: "held" before

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "client/client.h"
#include "protocol/error.h"
#include "protocol/status_macros.h"
#include "tests/support/training.h"

namespace {

using forebay::client::Attachment;
constexpr auto kTimeout = std::chrono::seconds(60);

absl::Status Run(const std::string& socket, uint32_t rank, uint32_t world,
                 const std::string& what) {
  namespace testing = forebay::testing;
  ASSIGN_OR_RETURN(auto session,
                   Attachment::Attach({.socket = socket,
                                       .job = "job",
                                       .rank = rank,
                                       .layout = testing::MakeLayoutSpec({.world_size = world}),
                                       .timeout = kTimeout}));
  const auto groups = static_cast<uint32_t>(session->layout().groups().size());
  if (session->writes_initial()) {
    for (uint32_t g = 0; g < groups; ++g) {
      RETURN_IF_ERROR(
          session->WriteInitial(g, testing::MakeValues(session->layout(), g, 7), kTimeout));
    }
    RETURN_IF_ERROR(session->InitialDone(kTimeout));
  }
  RETURN_IF_ERROR(session->Fetch(0, kTimeout).status());
  if (what == "step") {
    for (uint32_t g = 0; g < groups; ++g) {
      ASSIGN_OR_RETURN(const auto slot,
                       session->GradSlot(g, forebay::client::GradFill::kZero, kTimeout));
      const auto gradient = testing::MakeGradient(session->layout(), g, rank, 1);
      std::memcpy(slot.data(), gradient.data(), gradient.size());
      RETURN_IF_ERROR(session->GradReady(g));
    }
  }
  const pid_t child = what == "fork" ? ::fork() : -1;
  if (child == 0) {
    while (true) ::pause();
  }
  std::fprintf(stderr, "held %d\n", static_cast<int>(child));
  if (what == "step") {
    return session->Step(1, testing::MakeHyperParams(), 0, {}, kTimeout).status();
  }
  while (true) ::pause();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const absl::Status status = Run(argv[1], static_cast<uint32_t>(std::stoul(argv[2])),
                                  static_cast<uint32_t>(std::stoul(argv[3])), argv[4]);
  std::fprintf(stderr, "%s\n", forebay::protocol::FormatError(status).c_str());
  return status.ok() ? 0 : 1;
}
