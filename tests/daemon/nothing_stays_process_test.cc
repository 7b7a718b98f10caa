// SPDX-License-Identifier: Apache-2.0
// Goal    Ended sessions, jobs and connections leave nothing behind in a daemon that runs for months: no heap, no other private
//         memory (which counts against dram.limit), and no descriptor in the daemon or in its service manager.
// Method  A real daemon, with and without a store of descriptors. A library loaded into the daemon counts its live heap. Each
//         kind of session begins and ends 100 times (or FOREBAY_TEST_TURNS times), then as often again. No client asks for the
//         status meanwhile.

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/admin.h"
#include "client/client.h"
#include "client/flat_shards.h"
#include "daemon/exec/executor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "tests/support/daemon_process.h"
#include "tests/support/live_heap.h"
#include "tests/support/raw_session.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"
#include "tools/forebay/descriptor_store.h"

namespace forebay::daemon {
namespace {

using client::Attachment;
using protocol::ErrorId;
using testing::DaemonProcess;
using testing::Eventually;
using testing::HasError;
using testing::LiveHeap;
using testing::RawSession;
using testing::TempDir;

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr int kTurns = 100;
// A leak of one piece of heap a turn would add kTurns pieces. Fewer pieces may appear without a leak, because containers grow.
constexpr int64_t kPiecesMost = kTurns / 4;
// A leak that enlarges a piece by 64 bytes a turn would add this many bytes.
constexpr int64_t kHeapBytesMost = 64 * kTurns;
// Bytes of freed memory that the heap retains at the end of the process's arena and of a thread's arena (M_TRIM_THRESHOLD).
constexpr int64_t kPrivateBytesMost = 2 * (128 << 10);
// Stacks of ended threads are retained for later threads.
constexpr int kMappingsMost = kTurns / 4;
constexpr int kLooks = 40;  // 5 ms apart
constexpr uint32_t kStoreCapacity = 256;
constexpr uint32_t kWorld = 2;
constexpr uint64_t kArenaBytes = 64 << 10;

// Acts as the service manager, and stores the daemon's descriptors.
class ServiceManager {
 public:
  explicit ServiceManager(const std::string& socket)
      : store_(*tools::DescriptorStore::Create(socket, kStoreCapacity)),
        stop_(*protocol::MakeDoorbell()),
        thread_([this] { Serve(); }) {}
  ~ServiceManager() {
    protocol::RingDoorbell(stop_.get());
    thread_.join();
  }

  std::vector<std::string> environment() const { return store_.environment(); }
  size_t kept() const { return kept_; }

 private:
  void Serve() {
    std::array<pollfd, 2> watched = {{{.fd = store_.socket_fd(), .events = POLLIN, .revents = 0},
                                      {.fd = stop_.get(), .events = POLLIN, .revents = 0}}};
    while (watched[1].revents == 0) {
      ::poll(watched.data(), watched.size(), -1);
      store_.Drain();
      kept_ = store_.kept().size();
    }
  }

  tools::DescriptorStore store_;
  protocol::UniqueFd stop_;
  std::atomic<size_t> kept_ = 0;
  std::thread thread_;
};

struct Held {
  int64_t pieces = 0;
  int64_t heap_bytes = 0;
  int64_t private_bytes = 0;
  int mappings = 0;
  int descriptors = 0;
  size_t stored = 0;

  // Returns true if this holds no more than `before`, apart from the growth that kPiecesMost and the other limits allow.
  bool HasNoMoreThan(const Held& before) const {
    return pieces <= before.pieces + kPiecesMost &&
           heap_bytes <= before.heap_bytes + kHeapBytesMost &&
           private_bytes <= before.private_bytes + kPrivateBytesMost &&
           mappings <= before.mappings + kMappingsMost && descriptors <= before.descriptors &&
           stored <= before.stored;
  }
  friend std::ostream& operator<<(std::ostream& out, const Held& held) {
    return out << held.pieces << " pieces of heap, " << held.heap_bytes << " bytes in them, "
               << held.private_bytes << " private bytes, " << held.mappings << " mappings, "
               << held.descriptors << " descriptors, " << held.stored << " stored";
  }
};

class NothingStays : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    MapCounts();
    if (GetParam()) manager_ = std::make_unique<ServiceManager>(dir_.path() + "/notify");
    const std::vector<std::string> environment =
        manager_ == nullptr ? std::vector<std::string>() : manager_->environment();
    const std::string swap = dir_.Make("swap");
    ASSERT_OK_AND_ASSIGN(
        daemon_,
        DaemonProcess::Start(
            socket_, {"swap.paths=" + swap, "swap.capacity=128MiB", "log.level=error"}, [&] {
              ::setenv("LD_PRELOAD", LIVE_HEAP_PATH, 1);
              ::setenv("FOREBAY_TEST_HEAP", heap_path_.c_str(), 1);
              for (const std::string& variable : environment) {
                const size_t equal = variable.find('=');
                ::setenv(variable.substr(0, equal).c_str(), variable.c_str() + equal + 1, 1);
              }
            }));
    ASSERT_OK_AND_ASSIGN(admin_, client::AdminClient::Connect({.socket = socket_}));
    ASSERT_OK(Train("job"));
    FillReasons();
  }
  void TearDown() override {
    if (heap_ != nullptr) ::munmap(heap_, sizeof(LiveHeap));
  }

  // Calls `turn` kTurns times, then kTurns times again, and expects that the second half adds no memory and no descriptors.
  // FOREBAY_TEST_TURNS replaces kTurns.
  void ExpectNothingStays(const std::function<absl::Status(int turn)>& turn) {
    if (HasFatalFailure()) return;
    const char* const asked = std::getenv("FOREBAY_TEST_TURNS");
    const int count = asked == nullptr ? kTurns : std::atoi(asked);
    for (int i = 0; i < count; ++i) ASSERT_OK(turn(i));
    const Held first = Baseline();
    for (int i = 0; i < count; ++i) ASSERT_OK(turn(count + i));
    EXPECT_TRUE(Eventually([&] { return Now().HasNoMoreThan(first); }));
    std::cerr << "after " << count << " turns: " << first << "\nafter twice as many: " << Now()
              << "\n";
  }

  absl::StatusOr<std::unique_ptr<RawSession>> Connect() {
    ASSIGN_OR_RETURN(auto session, RawSession::Connect(socket_));
    RETURN_IF_ERROR(session->Hello());
    return session;
  }
  absl::StatusOr<std::unique_ptr<RawSession>> AttachRaw() {
    ASSIGN_OR_RETURN(auto session, Connect());
    RETURN_IF_ERROR(session->Attach({.grad_arena_bytes = kArenaBytes}, layout_));
    RETURN_IF_ERROR(session->Map());
    return session;
  }
  // The daemon retains the reasons of the last sessions that it has ended or refused. A session that attaches before the daemon
  // has noticed the end of its predecessor ends that one, which can happen in any turn. So the daemon has as many reasons as it
  // retains from the start.
  void FillReasons() {
    client::AttachOptions options = Options("missing");
    options.reader = true;
    for (size_t i = 0; i < SessionTable::kEvictedKeptMax; ++i) {
      EXPECT_THAT(Attachment::Attach(options), HasError(ErrorId::kJobName));
    }
  }
  static absl::Status FetchFirst(RawSession& session) {
    protocol::Command fetch{};
    fetch.op = static_cast<uint16_t>(protocol::Op::kFetch);
    return session.Ask(fetch);
  }

  client::AttachOptions Options(const std::string& job) {
    return {.socket = socket_,
            .job = job,
            .layout = layout_,
            .memory = {.grad_arena_bytes = kArenaBytes},
            .timeout = kTimeout};
  }
  absl::Status WriteInitial(RawSession& session) {
    ASSIGN_OR_RETURN(const auto layout, protocol::Layout::Create(layout_));
    for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
      protocol::Command write{};
      write.op = static_cast<uint16_t>(protocol::Op::kWriteInitial);
      write.partition = i;
      write.length_bytes = layout.partition_bytes(i);
      RETURN_IF_ERROR(session.Ask(write));
    }
    protocol::Command done{};
    done.op = static_cast<uint16_t>(protocol::Op::kInitialDone);
    return session.Ask(done);
  }
  // Makes the first calls of a rank of a sharded job: writes the initial parameters of its partitions.
  static absl::Status WriteOwn(Attachment& session, uint32_t rank) {
    if (!session.writes_initial()) return absl::OkStatus();
    for (uint32_t i = 0; i < session.layout().partitions().size(); ++i) {
      if (session.layout().partitions()[i].owner != rank) continue;
      const std::vector<std::byte> zeros(session.layout().partition_bytes(i));
      RETURN_IF_ERROR(session.WriteInitial(i, zeros, kTimeout));
    }
    return session.InitialDone(kTimeout);
  }
  // Attaches to a job, writes its initial parameters and trains one step.
  absl::Status Train(const std::string& job, const std::string& durability = "memory") {
    client::AttachOptions options = Options(job);
    ASSIGN_OR_RETURN(options.durability.level, protocol::ParseDurability(durability));
    ASSIGN_OR_RETURN(const auto rank, Attachment::Attach(options));
    RETURN_IF_ERROR(testing::WriteInitial(*rank, /*seed=*/1));
    RETURN_IF_ERROR(testing::TrainStep(*rank, {}).status());
    return rank->Detach();
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const protocol::LayoutSpec layout_ =
      testing::MakeLayoutSpec({.world_size = 1, .groups = 2, .group_elems = 64});
  std::unique_ptr<ServiceManager> manager_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<client::AdminClient> admin_;

 private:
  void MapCounts() {
    heap_path_ = dir_.Write("heap", std::string(sizeof(LiveHeap), '\0'));
    const protocol::UniqueFd fd(::open(heap_path_.c_str(), O_RDWR | O_CLOEXEC));
    void* const at = ::mmap(nullptr, sizeof(LiveHeap), PROT_READ, MAP_SHARED, fd.get(), 0);
    ASSERT_NE(at, MAP_FAILED);
    heap_ = static_cast<LiveHeap*>(at);
  }

  // Returns the smallest counts that the daemon reaches, because some resources are freed only after the last turn. A larger
  // baseline would hide leaks.
  Held Baseline() const {
    Held least = Now();
    int looks = 0;
    EXPECT_TRUE(Eventually([&] {
      const Held now = Now();
      if (now.pieces < least.pieces) least = now;
      return ++looks == kLooks;
    }));
    return least;
  }

  Held Now() const {
    Held held{.pieces = heap_->pieces,
              .heap_bytes = heap_->bytes,
              .descriptors = daemon_->OpenFds(),
              .stored = manager_ == nullptr ? 0 : manager_->kept()};
    std::ifstream status(absl::StrCat("/proc/", daemon_->pid(), "/status"));
    for (std::string line; std::getline(status, line);) {
      int64_t kib = 0;
      if (!line.starts_with("RssAnon:")) continue;
      if (std::istringstream(line.substr(8)) >> kib) held.private_bytes = kib * 1024;
    }
    std::ifstream maps(absl::StrCat("/proc/", daemon_->pid(), "/maps"));
    for (std::string line; std::getline(maps, line);) ++held.mappings;
    return held;
  }

  std::string heap_path_;
  LiveHeap* heap_ = nullptr;
};

TEST_P(NothingStays, OfSessionsThatDetach) {
  ExpectNothingStays([&](int) -> absl::Status {
    ASSIGN_OR_RETURN(const auto session, AttachRaw());
    RETURN_IF_ERROR(FetchFirst(*session));
    return session->Detach();
  });
}

TEST_P(NothingStays, OfSessionsOfOneConnection) {
  ASSERT_OK_AND_ASSIGN(const auto connection, Connect());
  ExpectNothingStays([&](int) -> absl::Status {
    RETURN_IF_ERROR(connection->Attach({.grad_arena_bytes = kArenaBytes}, layout_));
    return connection->Detach();
  });
}

TEST_P(NothingStays, OfSessionsWhoseSocketIsClosed) {
  ExpectNothingStays([&](int) -> absl::Status {
    ASSIGN_OR_RETURN(const auto session, AttachRaw());
    return FetchFirst(*session);
  });
}

TEST_P(NothingStays, OfProcessesThatAreKilled) {
  ExpectNothingStays([&](int) -> absl::Status {
    ASSIGN_OR_RETURN(const protocol::UniqueFd held, protocol::MakeDoorbell());
    const pid_t child = ::fork();
    if (child == 0) {
      const auto session = AttachRaw();
      if (!session.ok() || !FetchFirst(**session).ok()) ::_exit(1);
      protocol::RingDoorbell(held.get());
      while (true) ::pause();
    }
    const protocol::UniqueFd ended(static_cast<int>(::syscall(SYS_pidfd_open, child, 0)));
    std::array<pollfd, 2> either = {{{.fd = held.get(), .events = POLLIN, .revents = 0},
                                     {.fd = ended.get(), .events = POLLIN, .revents = 0}}};
    ::poll(either.data(), either.size(), -1);
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? absl::OkStatus() : absl::InternalError("it did not attach");
  });
}

TEST_P(NothingStays, OfReaders) {
  ExpectNothingStays([&](int turn) -> absl::Status {
    client::AttachOptions options = Options("job");
    options.reader = true;
    ASSIGN_OR_RETURN(const auto reader, Attachment::Attach(options));
    RETURN_IF_ERROR(reader->Fetch(0, kTimeout).status());
    return turn % 2 == 0 ? reader->Detach() : absl::OkStatus();
  });
}

TEST_P(NothingStays, OfJobsThatAreMadeAndDeleted) {
  ExpectNothingStays([&](int turn) -> absl::Status {
    const std::string job = absl::StrCat("job-", turn);
    RETURN_IF_ERROR(Train(job));
    return admin_->DeleteJob(job);
  });
}

TEST_P(NothingStays, OfDurableJobsThatAreMadeAndDeleted) {
  ExpectNothingStays([&](int turn) -> absl::Status {
    const std::string job = absl::StrCat("job-", turn);
    RETURN_IF_ERROR(Train(job, "step"));
    return admin_->DeleteJob(job);
  });
}

TEST_P(NothingStays, OfShardedSessions) {
  const auto of_rank = [&](uint32_t rank, const std::function<absl::Status(Attachment&)>& use) {
    client::AttachOptions options = Options("sharded");
    options.rank = rank;
    options.world_size = kWorld;
    options.layout = client::ShardFlat(layout_, kWorld);
    auto session = Attachment::Attach(options);
    return session.ok() ? use(**session) : session.status();
  };
  const auto turn = [&](int number) -> absl::Status {
    std::array<absl::Status, kWorld> ends;
    {
      std::vector<std::jthread> ranks;
      for (uint32_t rank = 0; rank < kWorld; ++rank) {
        ranks.emplace_back([&, rank] {
          ends[rank] = of_rank(rank, [&](Attachment& session) -> absl::Status {
            RETURN_IF_ERROR(WriteOwn(session, rank));
            RETURN_IF_ERROR(session.Exchange("bytes", kTimeout).status());
            return number % 2 == 0 ? session.Detach() : absl::OkStatus();
          });
        });
      }
    }
    for (const absl::Status& end : ends) RETURN_IF_ERROR(end);
    return absl::OkStatus();
  };
  ExpectNothingStays(turn);
}

// Each connection acts on behalf of a user, as a gateway's does. The session outlives its connections.
TEST_P(NothingStays, OfSessionsThatGoOnWithAnotherConnection) {
  constexpr int64_t kUid = 2001;
  constexpr uint32_t kWaitMs = 60'000;
  ino_t inode = 0;
  ExpectNothingStays([&](int) -> absl::Status {
    ASSIGN_OR_RETURN(const auto session, RawSession::Connect(socket_));
    RETURN_IF_ERROR(session->HelloOnBehalfOf(kUid, kWaitMs));
    RETURN_IF_ERROR(session->Attach({.reattach_to = inode}, layout_));
    RETURN_IF_ERROR(session->Map());
    if (session->reply().getWritesInitial()) RETURN_IF_ERROR(WriteInitial(*session));
    struct stat info {};
    const bool is_known = ::fstat(session->grad_fd(), &info) == 0;
    const ino_t before = std::exchange(inode, info.st_ino);
    return is_known && (before == 0 || before == inode)
               ? absl::OkStatus()
               : absl::InternalError("it goes on with another session");
  });
}

TEST_P(NothingStays, OfAttachesThatAreRefused) {
  ExpectNothingStays([&](int turn) -> absl::Status {
    ASSIGN_OR_RETURN(const auto connection, Connect());
    const auto other = testing::MakeLayoutSpec({.groups = 3, .group_elems = 64});
    EXPECT_THAT(connection->Attach({}, other), HasError(ErrorId::kLayout));
    EXPECT_THAT(connection->Attach({.job = "a b"}, layout_), HasError(ErrorId::kJobName));
    EXPECT_THAT(connection->Attach(
                    {.grad_arena_bytes = kArenaBytes, .run = absl::StrCat("run-", turn)}, layout_),
                HasError(ErrorId::kJobExists));
    return absl::OkStatus();
  });
}

TEST_P(NothingStays, OfQuestions) {
  ExpectNothingStays([&](int turn) -> absl::Status {
    ASSIGN_OR_RETURN(const auto admin, client::AdminClient::Connect({.socket = socket_}));
    RETURN_IF_ERROR(admin->PlanJob("job", {}).status());
    RETURN_IF_ERROR(admin->Trace("job").status());
    EXPECT_THAT(admin->DeleteJob(absl::StrCat("none-", turn)), HasError(ErrorId::kJobName));
    return absl::OkStatus();
  });
}

INSTANTIATE_TEST_SUITE_P(, NothingStays, ::testing::Bool(), [](const auto& store) {
  return store.param ? "WithAStoreOfDescriptors" : "Alone";
});

}  // namespace
}  // namespace forebay::daemon
