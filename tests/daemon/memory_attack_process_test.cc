// SPDX-License-Identifier: Apache-2.0
// Goal    No client holds more of the node's memory than the limit allows: not through arenas of ended sessions, not through
//         weights of deleted jobs, and not through descriptors that cannot even read. A rank that dies between its step call
//         and the update changes no bit.
// Method  A real daemon with a limit of 256 MiB. A client (of another user if the test runs as root) repeats one attack many
//         times and retains every descriptor and mapping. The kernel's count of the pages (st_blocks) is compared with the
//         limit. If the machine allows it, the daemon runs in a control group with a limit slightly above its own.

#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/raw_session.h"
#include "tests/support/status_test.h"
#include "tests/support/test_cgroup.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon::memory_attack_process_test {
namespace {

using client::AdminClient;
using protocol::ErrorId;
using protocol::UniqueFd;
using testing::DaemonProcess;
using testing::Eventually;
using testing::RawSession;
using testing::TempDir;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kLimitBytes = 256 * kMiB;
constexpr uid_t kAttacker = 65534;
constexpr unsigned kDeadlineSeconds = 120;

// A process that runs `body` as the attacker and then waits until it is killed. Its descriptors and mappings exist until then.
class Attacker {
 public:
  // `body` returns 0 for success.
  Attacker(const std::string& socket, const std::function<int(const std::string&)>& body) {
    int ready[2];
    EXPECT_EQ(::pipe(ready), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::alarm(kDeadlineSeconds);
      const unsigned char code = static_cast<unsigned char>(Become(socket) ? body("s") : 100);
      (void)!::write(ready[1], &code, 1);
      while (true) ::pause();
    }
    ::close(ready[1]);
    unsigned char code = 101;
    (void)!::read(ready[0], &code, 1);
    ::close(ready[0]);
    result_ = code;
  }
  Attacker(const Attacker&) = delete;
  Attacker& operator=(const Attacker&) = delete;
  ~Attacker() { Kill(); }

  int result() const { return result_; }
  void Kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }

 private:
  // Retains the socket's folder as working directory, because another user could not enter it.
  static bool Become(const std::string& socket) {
    if (::chdir(socket.substr(0, socket.rfind('/')).c_str()) != 0) return false;
    if (::geteuid() != 0) return true;
    return ::setgroups(0, nullptr) == 0 && ::setgid(kAttacker) == 0 && ::setuid(kAttacker) == 0;
  }

  pid_t pid_ = -1;
  int result_ = -1;
};

uint64_t AllocatedBytes(const std::vector<UniqueFd>& fds) {
  uint64_t bytes = 0;
  for (const UniqueFd& fd : fds) {
    struct stat info {};
    if (::fstat(fd.get(), &info) == 0) bytes += static_cast<uint64_t>(info.st_blocks) * 512;
  }
  return bytes;
}

// 4 Mi elements: 16 MiB of weights in float32, so that the weights of kJobs pass the limit.
constexpr int kJobs = 18;
protocol::LayoutSpec LargeWeights() {
  return testing::MakeLayoutSpec({.world_size = 1, .groups = 16, .group_elems = uint64_t{1} << 18});
}

class MemoryAttack : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(::chmod(dir_.path().c_str(), 0711), 0);
    auto group = testing::TestCgroup::Create(kLimitBytes + kOwnBytes);
    if (group.ok()) group_ = *std::move(group);
    ASSERT_OK_AND_ASSIGN(
        daemon_, DaemonProcess::Start(socket_, {"dram.limit=256MiB", "socket.mode=\"0666\""}, [&] {
          if (group_ != nullptr) group_->Enter();
        }));
    ASSERT_OK_AND_ASSIGN(admin_, AdminClient::Connect({.socket = socket_}));
    idle_bytes_ = SegmentBytes();
  }
  void TearDown() override {
    EXPECT_TRUE(Eventually([&] { return SegmentBytes() == idle_bytes_; })) << SegmentBytes();
    ASSERT_TRUE(daemon_->IsAlive());
    EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_}));
    EXPECT_EQ(daemon_->Stop().exit_code, 0);
  }

  // Returns the node's status. The reader is valid until the next call.
  schema::MemoryStatus::Reader Memory() {
    auto status = admin_->Status();
    EXPECT_OK(status);
    if (!status.ok()) return {};
    status_ = *std::move(status);
    return status_->getMemory();
  }
  uint64_t SegmentBytes() {
    const schema::MemoryStatus::Reader memory = Memory();
    return memory.getUsedBytes() - memory.getPrivateBytes();
  }

  // Code, page tables and buffers of the daemon itself.
  static constexpr uint64_t kOwnBytes = 64 * kMiB;

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  // Control group of the daemon, so that the kernel ends a daemon that exceeds its limit. Null if no control group can be
  // created.
  std::unique_ptr<testing::TestCgroup> group_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<AdminClient> admin_;
  client::NodeStatus status_;
  uint64_t idle_bytes_ = 0;
};

// Each session has 100 MiB. Without the protection the fifth session would exceed the limit of 256 MiB.
TEST_F(MemoryAttack, SessionsThatEndLeaveNoPagesInTheHandsOfTheirClients) {
  Attacker attacker(socket_, [](const std::string& socket) {
    static std::vector<UniqueFd> kept;
    const protocol::LayoutSpec layout = testing::MakeLayoutSpec({.world_size = 1});
    for (int i = 0; i < 12; ++i) {
      auto raw = RawSession::Connect(socket);
      if (!raw.ok() || !(*raw)->Hello().ok()) return 1;
      const absl::Status attached =
          (*raw)->Attach({.job = "leak", .grad_arena_bytes = 100 * kMiB}, layout);
      if (!attached.ok()) return 2;
      if (!(*raw)->Map().ok()) return 3;
      (*raw)->grad()[0] = std::byte{1};
      for (const auto kind : {schema::Session::Kind::GRAD_ARENA, schema::Session::Kind::RING}) {
        auto fd = (*raw)->Descriptor(kind);
        if (!fd.ok()) return 4;
        (void)::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
        kept.push_back(*std::move(fd));
      }
      if (!(*raw)->Detach().ok()) return 5;
    }
    const auto freed = [&] { return AllocatedBytes(kept) < kMiB; };
    return Eventually(freed) ? 0 : 6;
  });
  EXPECT_EQ(attacker.result(), 0);
  EXPECT_LE(Memory().getPeakBytes(), kLimitBytes);
  // A job without initial parameters ends with its last session.
  EXPECT_TRUE(Eventually([&] { return SegmentBytes() == idle_bytes_; })) << SegmentBytes();
}

// Makes and deletes kJobs jobs, one after another. `keep` gets the read-only descriptor of a job's weights before the job is
// deleted. Returns the number of jobs until an attach failed for lack of DRAM, or an error code above 100.
int DeletedJobs(const std::string& socket, const std::function<void(const UniqueFd&)>& keep) {
  for (int i = 0; i < kJobs; ++i) {
    const std::string job = "weights" + std::to_string(i);
    {
      auto raw = RawSession::Connect(socket);
      if (!raw.ok() || !(*raw)->Hello().ok()) return 101;
      const absl::Status attached =
          (*raw)->Attach({.job = job, .grad_arena_bytes = 2 * kMiB}, LargeWeights());
      if (!attached.ok()) return protocol::IdOf(attached) == ErrorId::kDramLimit ? i : 102;
      auto fd = (*raw)->Descriptor(schema::Session::Kind::WEIGHTS);
      if (!fd.ok()) return 103;
      keep(*fd);
      if (!(*raw)->Detach().ok()) return 104;
    }
    auto admin = AdminClient::Connect({.socket = socket});
    if (!admin.ok()) return 105;
    const absl::Status deleted = (*admin)->DeleteJob(job);
    if (!deleted.ok() && protocol::IdOf(deleted) != ErrorId::kJobName) return 106;
  }
  return kJobs;
}

TEST_F(MemoryAttack, WeightsOfDeletedJobsCountWhileAProcessHasThemMapped) {
  uint64_t held_bytes = 0;
  {
    Attacker attacker(socket_, [](const std::string& socket) {
      return DeletedJobs(socket, [](const UniqueFd& fd) {
        // A child process retains only the mapping of the weights; this process closes the descriptor.
        struct stat info {};
        (void)::fstat(fd.get(), &info);
        void* map =
            ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_SHARED, fd.get(), 0);
        const pid_t parent = ::getpid();
        if (::fork() == 0) {
          ::prctl(PR_SET_PDEATHSIG, SIGKILL);
          // The parent was killed before prctl() took effect.
          if (::getppid() != parent) ::_exit(0);
          ::alarm(kDeadlineSeconds);
          while (true) ::pause();
        }
        ::munmap(map, static_cast<size_t>(info.st_size));
      });
    });
    EXPECT_GT(attacker.result(), 0) << "the first job fits";
    EXPECT_LT(attacker.result(), kJobs) << "not all of them: the weights of the others are mapped";
    const schema::MemoryStatus::Reader memory = Memory();
    EXPECT_LE(memory.getUsedBytes(), kLimitBytes);
    for (const auto arena : memory.getArenas()) {
      if (arena.getKind() == "weights of a deleted job") held_bytes += arena.getAllocatedBytes();
    }
    EXPECT_GT(held_bytes, 0U);
  }
  EXPECT_TRUE(Eventually([&] { return SegmentBytes() == idle_bytes_; })) << SegmentBytes();
}

// The attacker reopens the descriptor with O_PATH: such a descriptor cannot read the file, but holds a reference to it.
TEST_F(MemoryAttack, ADescriptorThatCannotReadKeepsNoWeights) {
  Attacker attacker(socket_, [](const std::string& socket) {
    static std::vector<UniqueFd> kept;
    const int jobs = DeletedJobs(socket, [](const UniqueFd& fd) {
      const std::string path = "/proc/self/fd/" + std::to_string(fd.get());
      kept.emplace_back(::open(path.c_str(), O_PATH | O_CLOEXEC));
    });
    if (jobs != kJobs) return jobs;
    return Eventually([] { return AllocatedBytes(kept) == 0; }) ? 0 : 107;
  });
  EXPECT_EQ(attacker.result(), 0);
  EXPECT_LE(Memory().getPeakBytes(), kLimitBytes);
}

TEST_F(MemoryAttack, TheDaemonsSumAgreesWithTheKernels) {
  if (group_ == nullptr) GTEST_SKIP() << "no control group can be made here";
  // The kernel folds the counters of its CPUs into memory.stat about every two seconds.
  const auto expect_same = [&] {
    uint64_t used = 0;
    uint64_t kernel = 0;
    EXPECT_TRUE(Eventually([&] {
      used = Memory().getUsedBytes();
      kernel = group_->usage_bytes();
      return kernel >= used && kernel <= used + kOwnBytes / 2;
    })) << "the daemon says "
        << used << ", the kernel " << kernel;
  };
  expect_same();
  ASSERT_OK_AND_ASSIGN(auto raw, RawSession::Connect(socket_));
  ASSERT_OK(raw->Hello());
  ASSERT_OK(raw->Attach({.job = "job", .grad_arena_bytes = 64 * kMiB}, LargeWeights()));
  ASSERT_OK(raw->Map());
  expect_same();
  ASSERT_OK(raw->Detach());  // The job has no initial parameters, and ends with this session.
  EXPECT_GT(group_->usage_bytes(), 16 * kMiB) << "this process has the weights mapped";
  expect_same();
  raw.reset();
  EXPECT_TRUE(Eventually([&] { return SegmentBytes() == idle_bytes_; })) << SegmentBytes();
  expect_same();
}

// Rank 0 is killed at some moment from its step call to the end of the update.
TEST_F(MemoryAttack, ARankThatDiesInTheStepChangesNoBit) {
  constexpr testing::JobShape kShape = {.world_size = 2};
  for (const int delay_us : {0, 50, 100, 200, 400, 800, 1600, 3200, 6400}) {
    SCOPED_TRACE(delay_us);
    const auto dying =
        testing::RunningProgram::Start({HELD_CLIENT_PATH, socket_, "0", "2", "step"}, "held");
    ASSERT_THAT(dying->errors(), ::testing::HasSubstr("held"));
    std::jthread killer;
    {
      ASSERT_OK_AND_ASSIGN(auto rank,
                           client::Attachment::Attach({.socket = socket_,
                                                       .job = "job",
                                                       .rank = 1,
                                                       .world_size = kShape.world_size,
                                                       .layout = testing::MakeLayoutSpec(kShape)}));
      const uint64_t t = rank->committed_step() + 1;
      for (uint32_t g = 0; g < rank->layout().groups().size(); ++g) {
        ASSERT_OK(testing::DeliverGradient(*rank, g, 1, t));
      }
      killer = std::jthread([pid = dying->pid(), delay_us] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(delay_us);
        while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
        ::kill(pid, SIGKILL);
      });
      const auto step = rank->Step(t, testing::MakeHyperParams(), 0, {}, std::chrono::seconds(30));
      EXPECT_TRUE(step.ok() || protocol::IdOf(step.status()) == ErrorId::kRankLost)
          << step.status();
    }
    killer.join();
    // The job trains one more step with the bits of the reference, from the step that it has committed.
    EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_, .job = "job", .shape = kShape}));
  }
  ASSERT_OK(admin_->DeleteJob("job"));
}

}  // namespace
}  // namespace forebay::daemon::memory_attack_process_test
