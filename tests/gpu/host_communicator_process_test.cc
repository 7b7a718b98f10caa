// SPDX-License-Identifier: Apache-2.0
// Goal    Ranks in separate processes share the memory of their collectives. If a rank is killed, the other ranks fail within
//         the time limit, and no resource remains.
// Method  fork(2); ranks exchange messages through a shared page.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gpu/host_communicator.h"
#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "protocol/error.h"

namespace forebay::gpu {
namespace {

constexpr uint32_t kRanks = 3;
constexpr int kPassed = 0;

struct Page {
  std::atomic<uint32_t> arrived{0};
  std::array<std::array<std::array<char, 256>, kRanks>, 2> bytes{};
};

absl::StatusOr<std::vector<std::string>> ExchangeOver(Page& page, uint32_t& round, uint32_t rank,
                                                      const std::string& bytes) {
  std::memcpy(page.bytes[round][rank].data(), bytes.c_str(), bytes.size() + 1);
  ++page.arrived;
  ++round;
  while (page.arrived < round * kRanks) std::this_thread::yield();
  std::vector<std::string> all;
  for (const auto& one : page.bytes[round - 1]) all.emplace_back(one.data());
  return all;
}

class HostCommunicatorProcess : public ::testing::Test {
 protected:
  HostCommunicatorProcess() {
    page_ = std::construct_at(static_cast<Page*>(
        ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)));
  }
  ~HostCommunicatorProcess() override { ::munmap(page_, sizeof(Page)); }

  // Starts a process that creates a communicator, calls `run` and exits with its result.
  template <typename Run>
  void Start(uint32_t rank, const Run& run) {
    pids_[rank] = ::fork();
    if (pids_[rank] != 0) return;
    uint32_t round = 0;
    auto made = HostCommunicator::Create(
        {.rank = rank, .size = kRanks, .time_limit = std::chrono::seconds(2)},
        [&](const std::string& bytes) { return ExchangeOver(*page_, round, rank, bytes); });
    ::_exit(made.ok() ? run(**made) : 100);
  }
  int Wait(uint32_t rank) const {
    int status = 0;
    ::waitpid(pids_[rank], &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 200;
  }

  Page* page_;
  std::array<pid_t, kRanks> pids_{};
};

int Sum(HostCommunicator& ranks, int rounds) {
  const auto stream = HostDevice().MakeStream().value();
  for (int round = 0; round < rounds; ++round) {
    auto value = static_cast<float>(ranks.rank() + static_cast<uint32_t>(round));
    const absl::Status status =
        ranks.AllReduce(*stream, std::as_writable_bytes(std::span(&value, 1)),
                        protocol::DType::kFloat32, Reduction::kSum);
    if (protocol::IdOf(status) == protocol::ErrorId::kRankLost) return 2;
    if (!status.ok() || value != static_cast<float>(3 + 3 * round)) return 1;
  }
  return kPassed;
}

TEST_F(HostCommunicatorProcess, RanksInProcessesReduce) {
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    Start(rank, [](HostCommunicator& ranks) { return Sum(ranks, 1000); });
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(Wait(rank), kPassed) << rank;
}

TEST_F(HostCommunicatorProcess, ARankThatIsKilledIsAnErrorOfTheOthers) {
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    Start(rank, [](HostCommunicator& ranks) {
      const int first = Sum(ranks, 10);
      if (first != kPassed) return first;
      if (ranks.rank() == 1) ::raise(SIGKILL);
      return Sum(ranks, 10);
    });
  }
  EXPECT_EQ(Wait(1), 200);
  EXPECT_EQ(Wait(0), 2) << "E_RANK_LOST";
  EXPECT_EQ(Wait(2), 2) << "E_RANK_LOST";
}

}  // namespace
}  // namespace forebay::gpu
