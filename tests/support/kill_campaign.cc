// SPDX-License-Identifier: Apache-2.0
#include "tests/support/kill_campaign.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <regex>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Limit of the wait for the next step and for the end of a process. A flush of a busy disk takes seconds, and a step waits for
// several flushes.
constexpr auto kDeadline = std::chrono::seconds(180);
constexpr auto kLookPeriod = microseconds(50);
constexpr uint32_t kStepsOfARoundMax = 4;
constexpr size_t kLogBytesShown = 4000;
constexpr uint64_t kAmpleBytes = uint64_t{64} << 20;
constexpr uint64_t kTooFewBytes = uint64_t{6400} << 10;  // the daemon starts, but refuses the job

void Pause(microseconds time) {
  const timespec wait{.tv_sec = 0, .tv_nsec = static_cast<long>(time.count()) * 1000};
  ::ppoll(nullptr, 0, &wait, nullptr);
}

// A child process that is killed when its owner is destroyed.
class Child {
 public:
  Child() = default;
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { Kill(); }

  // Calls `run` in a new process. The process exits with the status that `run` returns.
  void Start(const std::function<int()>& run) {
    pid_ = ::fork();
    FOREBAY_CHECK(pid_ >= 0);
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::_exit(run());
  }
  bool is_running() const { return pid_ > 0; }
  // Exit status of the ended process, or -1 if a signal killed it. Returns nullopt while the process runs.
  std::optional<int> LookForEnd() {
    int status = 0;
    if (!is_running() || ::waitpid(pid_, &status, WNOHANG) == 0) return std::nullopt;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void SendKill() const {
    if (is_running()) ::kill(pid_, SIGKILL);
  }
  void Kill() {
    SendKill();
    if (is_running()) ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
};

// Memory that forked children share.
class SharedMemory {
 public:
  explicit SharedMemory(uint64_t size_bytes) : size_bytes_(size_bytes) {
    bytes_ = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    FOREBAY_CHECK(bytes_ != MAP_FAILED);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { ::munmap(bytes_, size_bytes_); }
  void* bytes() const { return bytes_; }

 private:
  void* bytes_;
  uint64_t size_bytes_;
};

enum class Target : uint8_t { kOneRank, kAllRanks, kDaemon, kDaemonAndRanks };

class Campaign {
 public:
  explicit Campaign(const KillCampaignOptions& options)
      : options_(options),
        job_({.socket = options.folder + "/s",
              .kind = options.kind,
              .durability = options.durability}),
        uninterrupted_(job_),
        memory_bytes_(sizeof(KilledJobMemory)),
        snapshot_bytes_(job_.snapshot_bytes()),
        random_(options.seed) {}

  absl::StatusOr<KillCampaignResult> Run() {
    RETURN_IF_ERROR(FindDramLimit());
    const auto began = Clock::now();
    // The last round only compares; it kills no process.
    for (round_ = 0; round_ <= options_.kills; ++round_) {
      if (const absl::Status status = Round(); !status.ok()) {
        return absl::Status(status.code(),
                            absl::StrCat(NameOf(options_), ", seed ", options_.seed, ", round ",
                                         round_, ": ", status.message(), "\n", Log()));
      }
    }
    result_.seconds = std::chrono::duration<double>(Clock::now() - began).count();
    return result_;
  }

 private:
  uint64_t Random(uint64_t end) {
    return std::uniform_int_distribution<uint64_t>(0, end - 1)(random_);
  }
  bool IsLastRound() const { return round_ == options_.kills; }
  std::span<std::byte> snapshot() const {
    return {static_cast<std::byte*>(snapshot_bytes_.bytes()), job_.snapshot_bytes()};
  }

  std::string Log() const {
    std::ostringstream text;
    text << std::ifstream(options_.folder + "/log").rdbuf();
    const std::string all = text.str();
    return all.substr(all.size() - std::min(all.size(), kLogBytesShown));
  }

  int RunDaemon() const {
    const std::string log = options_.folder + "/log";
    const int fd = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(fd, STDOUT_FILENO);
    ::dup2(fd, STDERR_FILENO);
    std::vector<std::string> words = {FOREBAYD_PATH};
    for (const std::string& setting :
         {"socket.path=" + options_.folder + "/s", "swap.paths=" + options_.folder,
          std::string("memlock=best_effort"), std::string("update.workers=2"),
          std::string("update.block_elems=4096"), std::string("swap.capacity=32MiB"),
          std::string("swap.staging=1MiB"), std::string("swap.probe=never"),
          absl::StrCat("dram.limit=", dram_bytes_)}) {
      words.insert(words.end(), {"--set", setting});
    }
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    ::execv(arguments[0], arguments.data());
    return 127;
  }

  // Finds the DRAM limit that puts the job where its kind says. Reads the minimum from the daemon's refusal of a smaller limit.
  absl::Status FindDramLimit() {
    if (options_.kind == JobKind::kSharedInDram || options_.kind == JobKind::kShardedInDram) {
      dram_bytes_ = kAmpleBytes;
      return absl::OkStatus();
    }
    dram_bytes_ = kTooFewBytes;
    memory_ = std::construct_at(static_cast<KilledJobMemory*>(memory_bytes_.bytes()));
    daemon_.Start([this] { return RunDaemon(); });
    ranks_[0].Start([this] { return job_.RunRank(0, *memory_, snapshot()); });
    const absl::Status refused = WaitForEnd(0);
    daemon_.Kill();
    const std::string hint(refused.message());
    std::smatch least;
    if (!std::regex_search(hint, least, std::regex("at least ([0-9]+) bytes"))) return refused;
    dram_bytes_ = std::stoull(least[1]);
    if (options_.kind == JobKind::kSharedOnSwap) dram_bytes_ += job_.state_bytes() / 2;
    return absl::OkStatus();
  }

  absl::Status Round() {
    memory_ = std::construct_at(static_cast<KilledJobMemory*>(memory_bytes_.bytes()));
    if (!daemon_.is_running()) daemon_.Start([this] { return RunDaemon(); });
    for (uint32_t rank = 0; rank < kKilledRanks; ++rank) {
      ranks_[rank].Start([this, rank] { return job_.RunRank(rank, *memory_, snapshot()); });
    }
    RETURN_IF_ERROR(WaitForTheMoment());
    const absl::Status killed = Kill();
    for (Child& rank : ranks_) rank.Kill();
    RETURN_IF_ERROR(killed);
    return Judge();
  }

  uint64_t Answered() const {
    return std::max(memory_->ranks[0].answered.load(), memory_->ranks[1].answered.load());
  }
  uint64_t AnsweredInThisRound() const {
    const uint64_t attached = memory_->ranks[0].attached;
    return attached == 0 ? 0 : Answered() - std::min(Answered(), attached - 1);
  }

  absl::Status WaitForTheMoment() {
    const auto began = Clock::now();
    const bool is_early = !IsLastRound() && Random(3) == 0;
    if (is_early) {
      const auto kill_at = began + microseconds(Random(static_cast<uint64_t>(first_step_.count())));
      while (Clock::now() < kill_at) {
        RETURN_IF_ERROR(NobodyHasEnded());
        Pause(std::min(kLookPeriod,
                       std::chrono::duration_cast<microseconds>(kill_at - Clock::now())));
      }
      return absl::OkStatus();
    }
    const uint64_t steps = 1 + Random(kStepsOfARoundMax);
    auto first = Clock::time_point::max();
    auto deadline = began + kDeadline;
    uint64_t answered = 0;
    while (AnsweredInThisRound() < steps || memory_->snapshot_step == 0) {
      RETURN_IF_ERROR(NobodyHasEnded());
      if (AnsweredInThisRound() > answered) deadline = Clock::now() + kDeadline;
      answered = AnsweredInThisRound();
      if (Clock::now() > deadline) return absl::InternalError("the ranks do not go on");
      if (AnsweredInThisRound() > 0 && first == Clock::time_point::max()) first = Clock::now();
      Pause(kLookPeriod);
    }
    const auto now = Clock::now();
    const auto since = [now](Clock::time_point then) {
      return std::chrono::duration_cast<microseconds>(now - then);
    };
    if (steps == 1) {
      first_step_ = (7 * first_step_ + since(began)) / 8;
    } else {
      step_ = (7 * step_ + since(std::min(first, now)) / (steps - 1)) / 8;
    }
    Pause(microseconds(Random(static_cast<uint64_t>(step_.count()) + 1)));
    return absl::OkStatus();
  }

  absl::Status NobodyHasEnded() {
    for (uint32_t rank = 0; rank < kKilledRanks; ++rank) {
      const std::optional<int> status = ranks_[rank].LookForEnd();
      if (status) return Ended(absl::StrCat("rank ", rank), rank, *status);
    }
    const std::optional<int> status = daemon_.LookForEnd();
    if (!status) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("the daemon ended with ", *status));
  }
  absl::Status Ended(const std::string& who, uint32_t rank, int status) const {
    return absl::InternalError(
        absl::StrCat(who, " ended with ", status, ": ", memory_->ranks[rank].error.data()));
  }

  Target PickTarget() {
    if (options_.durability.level == protocol::DurabilityLevel::kMemory) {
      return Random(2) == 0 ? Target::kOneRank : Target::kAllRanks;
    }
    constexpr std::array kTargets = {Target::kOneRank, Target::kAllRanks, Target::kDaemon,
                                     Target::kDaemon, Target::kDaemonAndRanks};
    return kTargets[Random(kTargets.size())];
  }

  // Kills the target of this round. Waits in most rounds for the processes that end because of the kill.
  absl::Status Kill() {
    if (IsLastRound()) return absl::OkStatus();
    ++result_.kills;
    result_.early_kills += AnsweredInThisRound() == 0 ? 1 : 0;
    const Target target = PickTarget();
    const uint64_t one = Random(kKilledRanks);
    // A rank with a session notices another's death by itself. A rank without one would wait for the next process.
    const bool all_attached = memory_->ranks[0].attached != 0 && memory_->ranks[1].attached != 0;
    const bool waits = all_attached && Random(4) != 0;
    switch (target) {
      case Target::kOneRank:
        ++result_.trainer_kills;
        ranks_[one].Kill();
        return waits ? WaitForEnd(static_cast<uint32_t>(1 - one)) : absl::OkStatus();
      case Target::kAllRanks:
        ++result_.trainer_kills;
        ranks_[one].SendKill();
        ranks_[1 - one].SendKill();
        return absl::OkStatus();
      case Target::kDaemon:
        ++result_.daemon_kills;
        KillDaemon();
        for (uint32_t rank = 0; rank < kKilledRanks && waits; ++rank) {
          RETURN_IF_ERROR(WaitForEnd(rank));
        }
        return absl::OkStatus();
      case Target::kDaemonAndRanks:
        ++result_.both_kills;
        ranks_[one].SendKill();
        KillDaemon();
        return absl::OkStatus();
    }
    FOREBAY_CHECK(false);
  }
  void KillDaemon() {
    daemon_.Kill();
    daemon_died_ = true;
  }
  absl::Status WaitForEnd(uint32_t rank) {
    const auto deadline = Clock::now() + kDeadline;
    std::optional<int> status;
    while (!(status = ranks_[rank].LookForEnd())) {
      if (Clock::now() > deadline) return absl::InternalError("a rank outlives another's death");
      Pause(kLookPeriod);
    }
    if (*status == kEndedByAnothersDeath) return absl::OkStatus();
    return Ended(absl::StrCat("after a kill rank ", rank), rank, *status);
  }

  // Checks the steps and the bytes that the ranks found when they attached, then counts the steps of the round.
  absl::Status Judge() {
    for (const RankProgress& rank : memory_->ranks) {
      if (rank.attached != 0) RETURN_IF_ERROR(JudgeStep(rank.attached - 1));
    }
    if (memory_->snapshot_step != 0) {
      RETURN_IF_ERROR(JudgeTiers());
      RETURN_IF_ERROR(Compare(memory_->snapshot_step - 1));
    }
    result_.committed_step = answered_;
    result_.steps_answered += AnsweredInThisRound();
    answered_ = std::max(answered_, Answered());
    const uint64_t by_all =
        std::min(memory_->ranks[0].called.load(), memory_->ranks[1].called.load());
    called_ = std::max(called_, by_all);
    daemon_died_before_ |= std::exchange(daemon_died_, false);
    return absl::OkStatus();
  }

  absl::Status JudgeStep(uint64_t found) {
    const uint64_t undone_max = daemon_died_before_ ? UndoneMax() : 0;
    if (found + undone_max < answered_ || found > called_) {
      return absl::DataLossError(absl::StrCat("the job is at step ", found, ", but step ",
                                              answered_, " was answered and ", called_, " called"));
    }
    const uint64_t undone = answered_ - std::min(found, answered_);
    result_.steps_undone += undone;
    result_.steps_undone_max = std::max(result_.steps_undone_max, undone);
    answered_ = called_ = found;
    daemon_died_before_ = false;
    return absl::OkStatus();
  }
  // Checks that the blocks and the weights are in the tier of the job's kind.
  absl::Status JudgeTiers() const {
    const uint64_t resident = memory_->resident_blocks;
    const uint64_t blocks = memory_->blocks;
    const bool on_swap = memory_->weights_on_swap;
    const bool in_dram = resident == blocks && !on_swap;
    const bool is_as_its_kind =
        options_.kind == JobKind::kSharedOnSwap    ? 0 < resident && resident < blocks && !on_swap
        : options_.kind == JobKind::kShardedOnSwap ? resident < blocks && on_swap
                                                   : in_dram;
    if (is_as_its_kind) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(resident, " of ", blocks,
                                            " blocks are resident, weights are ",
                                            on_swap ? "on swap" : "in DRAM"));
  }
  uint64_t UndoneMax() const {
    return options_.durability.level == protocol::DurabilityLevel::kEpoch
               ? options_.durability.steps
               : 0;
  }

  absl::Status Compare(uint64_t step) {
    const ReferenceTrainer* reference = uninterrupted_.At(step);
    if (reference == nullptr) return absl::InternalError("the step is older than what is kept");
    const std::vector<std::byte> expected = job_.SnapshotOf(*reference);
    ++result_.comparisons;
    if (std::ranges::equal(expected, snapshot())) return absl::OkStatus();
    std::string equals = "none";
    for (uint64_t other = step > 3 ? step - 3 : 0; other < step + 3; ++other) {
      if (const ReferenceTrainer* at = uninterrupted_.At(other);
          at != nullptr && std::ranges::equal(job_.SnapshotOf(*at), snapshot())) {
        equals = std::to_string(other);
      }
    }
    uint64_t different = 0;
    for (size_t i = 0; i < expected.size(); ++i) different += expected[i] != snapshot()[i] ? 1 : 0;
    const auto first = std::ranges::mismatch(expected, snapshot()).in1 - expected.begin();
    return absl::DataLossError(
        absl::StrCat(different, " of ", expected.size(), " bytes, the first at ", first,
                     ", are not those of step ", step, "; equal is step ", equals));
  }

  const KillCampaignOptions options_;
  const KilledJob job_;
  UninterruptedRun uninterrupted_;
  const SharedMemory memory_bytes_;
  const SharedMemory snapshot_bytes_;
  KilledJobMemory* memory_ = nullptr;
  std::mt19937_64 random_;
  Child daemon_;
  std::array<Child, kKilledRanks> ranks_;

  uint64_t dram_bytes_ = 0;
  uint32_t round_ = 0;
  // Moving averages of the time to the first step of a round and of a step's duration.
  microseconds first_step_{100'000};  // from a round's beginning
  microseconds step_{5'000};
  // Newest answered step, as of the last attach.
  uint64_t answered_ = 0;
  uint64_t called_ = 0;  // newest step that all ranks have called
  bool daemon_died_ = false;
  bool daemon_died_before_ = false;
  KillCampaignResult result_;
};

}  // namespace

std::vector<KillCampaignOptions> AllKillCampaigns(const std::string& folder, uint32_t kills,
                                                  uint64_t seed) {
  using protocol::DurabilityLevel;
  std::vector<KillCampaignOptions> all;
  for (const protocol::Durability& durability :
       {protocol::Durability{}, protocol::Durability{DurabilityLevel::kEpoch, 3},
        protocol::Durability{DurabilityLevel::kStep, 1}}) {
    for (const JobKind kind : {JobKind::kSharedInDram, JobKind::kSharedOnSwap,
                               JobKind::kShardedInDram, JobKind::kShardedOnSwap}) {
      all.push_back({.folder = absl::StrCat(folder, "/", all.size()),
                     .kind = kind,
                     .durability = durability,
                     .kills = kills,
                     .seed = seed});
    }
  }
  return all;
}

std::string NameOf(const KillCampaignOptions& options) {
  constexpr std::array kKinds = {"shared-dram", "shared-swap", "sharded-dram", "sharded-swap"};
  return absl::StrCat(kKinds[static_cast<size_t>(options.kind)], "/",
                      protocol::FormatDurability(options.durability));
}

absl::StatusOr<KillCampaignResult> RunKillCampaign(const KillCampaignOptions& options) {
  return Campaign(options).Run();
}

}  // namespace forebay::testing
