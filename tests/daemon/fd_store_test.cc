// SPDX-License-Identifier: Apache-2.0
// Goal    When Flush() returns, the service manager's store holds the stored descriptors, by name. The next process finds those
//         and ignores all other descriptors. A forgotten descriptor is removed from the store. An absent store or a service
//         manager that does not answer is an error.
// Method  The service manager's end of NOTIFY_SOCKET, a thread that records each message. A child is
//         started as it would start a service, with descriptors from number 3 on.

#include "daemon/fd_store.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/mutex.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::IdOf;
using protocol::UniqueFd;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience{30};
constexpr unsigned kDeadlineSeconds = 30;

ino_t InodeOf(int fd) {
  struct stat info = {};
  return ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}

UniqueFd Memfd(const char* name) { return UniqueFd(::memfd_create(name, MFD_CLOEXEC)); }

// A message to the service manager: its text, and the inode of the descriptor sent with it (0 if it has none).
struct Message {
  std::string text;
  ino_t inode = 0;
  bool operator==(const Message&) const = default;
};

enum class Barriers { kAnswered, kIgnored };

class ServiceManager {
 public:
  ServiceManager(const std::string& path, Barriers barriers) : barriers_(barriers) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    socket_.Reset(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              0);
    EXPECT_EQ(::pipe2(end_, O_CLOEXEC), 0);
    thread_ = std::thread([this] {
      is_running_.count_down();
      Run();
    });
    // A sanitizer registers a new thread under locks. A child forked at that moment would wait forever for those locks, so wait
    // until the thread runs.
    is_running_.wait();
  }
  ServiceManager(const ServiceManager&) = delete;
  ServiceManager& operator=(const ServiceManager&) = delete;
  ~ServiceManager() {
    ::close(end_[1]);
    thread_.join();
    ::close(end_[0]);
  }

  std::vector<Message> messages() {
    const protocol::MutexLock lock(mutex_);
    return messages_;
  }

 private:
  void Run() {
    std::vector<UniqueFd> ignored;
    while (true) {
      std::array<pollfd, 2> fds = {pollfd{.fd = socket_.get(), .events = POLLIN, .revents = 0},
                                   pollfd{.fd = end_[0], .events = POLLIN, .revents = 0}};
      if (::poll(fds.data(), fds.size(), -1) < 0) return;
      if (fds[0].revents == 0) return;
      std::array<char, 512> text{};
      alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
      iovec data{.iov_base = text.data(), .iov_len = text.size()};
      msghdr header{};
      header.msg_iov = &data;
      header.msg_iovlen = 1;
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      const ssize_t size = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
      if (size < 0) return;
      UniqueFd fd;
      if (const cmsghdr* const rights = CMSG_FIRSTHDR(&header)) {
        int number = -1;
        std::memcpy(&number, CMSG_DATA(rights), sizeof(number));
        fd.Reset(number);
      }
      Message message{.text = {text.data(), static_cast<size_t>(size)}};
      const bool is_barrier = message.text == "BARRIER=1";
      if (fd.valid() && !is_barrier) message.inode = InodeOf(fd.get());
      {
        const protocol::MutexLock lock(mutex_);
        messages_.push_back(std::move(message));
      }
      if (is_barrier && barriers_ == Barriers::kIgnored) ignored.push_back(std::move(fd));
    }
  }

  const Barriers barriers_;
  UniqueFd socket_;
  int end_[2] = {};
  std::latch is_running_{1};
  protocol::Mutex mutex_;
  std::vector<Message> messages_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

class FdStoreTest : public ::testing::Test {
 protected:
  const testing::TempDir dir_;
  const std::string socket_ = dir_.path() + "/notify";
  const FdStoreEnvironment keeps_two_ = {.notify_socket = socket_.c_str(), .fdstore = "2"};
};

TEST_F(FdStoreTest, IsThereWhereTheServiceManagerSaysHowMuchItKeeps) {
  const auto fds_max = [](const char* notify_socket, const char* fdstore) {
    return FdStore::Take({.notify_socket = notify_socket, .fdstore = fdstore}).fds_max();
  };
  EXPECT_EQ(fds_max("/run/systemd/notify", "9232"), 9232u);
  EXPECT_EQ(fds_max("@abstract", "1"), 1u);
  EXPECT_EQ(fds_max("/run/systemd/notify", nullptr), 0u) << "nobody knows";
  EXPECT_EQ(fds_max("/run/systemd/notify", "0"), 0u);
  EXPECT_EQ(fds_max("/run/systemd/notify", ""), 0u);
  EXPECT_EQ(fds_max("/run/systemd/notify", "-1"), 0u);
  EXPECT_EQ(fds_max("/run/systemd/notify", "many"), 0u);
  EXPECT_EQ(fds_max(nullptr, "9232"), 0u) << "nobody listens";
  EXPECT_EQ(fds_max("", "9232"), 0u);
  EXPECT_TRUE(FdStore::Take(keeps_two_).is_available());
  EXPECT_FALSE(FdStore::Take({}).is_available());
}

TEST_F(FdStoreTest, SendsEachDescriptorWithItsNameAndThenABarrier) {
  ServiceManager manager(socket_, Barriers::kAnswered);
  FdStore store = FdStore::Take(keeps_two_);
  UniqueFd one = Memfd("one");
  const UniqueFd two = Memfd("two");
  const ino_t inode = InodeOf(one.get());
  ASSERT_OK(store.Keep("weights.0", one.get()));
  one.Reset();
  ASSERT_OK(store.Keep("State-1", two.get()));
  ASSERT_OK(store.Flush(kPatience));
  EXPECT_THAT(
      manager.messages(),
      ElementsAre(Message{.text = "FDSTOREREMOVE=1\nFDNAME=forebay.weights.0"},
                  Message{"FDSTORE=1\nFDNAME=forebay.weights.0\nFDPOLL=0", inode},
                  Message{.text = "FDSTOREREMOVE=1\nFDNAME=forebay.State-1"},
                  Message{"FDSTORE=1\nFDNAME=forebay.State-1\nFDPOLL=0", InodeOf(two.get())},
                  Message{.text = "BARRIER=1"}));
}

TEST_F(FdStoreTest, KeepsNoMoreThanTheServiceManagerDoes) {
  ServiceManager manager(socket_, Barriers::kAnswered);
  FdStore store = FdStore::Take(keeps_two_);
  const UniqueFd fd = Memfd("one");
  ASSERT_OK(store.Keep("a", fd.get()));
  ASSERT_OK(store.Keep("b", fd.get()));
  ASSERT_OK(store.Keep("a", fd.get())) << "in place of the first";
  const absl::Status status = store.Keep("c", fd.get());
  EXPECT_EQ(IdOf(status), ErrorId::kLimit);
  EXPECT_THAT(std::string(status.message()), HasSubstr("keeps 2 descriptors"));
}

TEST_F(FdStoreTest, RefusesNamesThatWouldChangeTheMessage) {
  ServiceManager manager(socket_, Barriers::kAnswered);
  FdStore store = FdStore::Take(keeps_two_);
  const UniqueFd fd = Memfd("one");
  for (const std::string& name :
       {std::string(), std::string("a:b"), std::string("a\nFDSTOREREMOVE=1"), std::string("a_b"),
        std::string("a b"), std::string("a\0b", 3), std::string("\xc3\xa4"),
        std::string(FdStore::kNameBytesMax + 1, 'x')}) {
    EXPECT_EQ(IdOf(store.Keep(name, fd.get())), ErrorId::kInternal) << name;
  }
  EXPECT_OK(store.Keep(std::string(FdStore::kNameBytesMax, 'x'), fd.get()));
  ASSERT_OK(store.Flush(kPatience));
  EXPECT_EQ(manager.messages().size(), 3u) << "remove, store, barrier";
}

TEST_F(FdStoreTest, WithoutAServiceManagerRefusesAndSaysWhatToSet) {
  FdStore store = FdStore::Take({});
  const UniqueFd fd = Memfd("one");
  const absl::Status status = store.Keep("a", fd.get());
  EXPECT_EQ(IdOf(status), ErrorId::kUnsupported);
  EXPECT_THAT(protocol::HintOf(status), HasSubstr("FileDescriptorStoreMax="));
  EXPECT_EQ(IdOf(store.Flush(kPatience)), ErrorId::kUnsupported);
  EXPECT_OK(store.Forget(kPatience)) << "nothing was taken";
}

TEST_F(FdStoreTest, AServiceManagerThatDoesNotAnswerIsATimeout) {
  ServiceManager manager(socket_, Barriers::kIgnored);
  FdStore store = FdStore::Take(keeps_two_);
  const absl::Status status = store.Flush(std::chrono::milliseconds(20));
  EXPECT_EQ(IdOf(status), ErrorId::kTimeout);
  EXPECT_THAT(std::string(status.message()), HasSubstr("within 20 ms"));
}

TEST_F(FdStoreTest, AServiceManagerThatIsGoneIsAnError) {
  FdStore store = FdStore::Take(keeps_two_);
  const UniqueFd fd = Memfd("one");
  const absl::Status status = store.Keep("a", fd.get());
  EXPECT_EQ(IdOf(status), ErrorId::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("No such file or directory"));
}

// Returns `environment` with the variables that the service manager has set for this process.
FdStoreEnvironment Handed(FdStoreEnvironment environment = {}) {
  environment.listen_pid = std::getenv("LISTEN_PID");
  environment.listen_fds = std::getenv("LISTEN_FDS");
  environment.listen_fdnames = std::getenv("LISTEN_FDNAMES");
  return environment;
}

// Runs `service` with `fds` from number 3 on; returns its exit status.
int RunAsService(const std::vector<int>& fds, const std::string& names,
                 const std::function<int()>& service) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kDeadlineSeconds);
    std::vector<int> high;
    for (const int fd : fds) high.push_back(::fcntl(fd, F_DUPFD, 100));
    for (size_t i = 0; i < high.size(); ++i) ::dup2(high[i], 3 + static_cast<int>(i));
    for (const int fd : high) ::close(fd);
    ::setenv("LISTEN_PID", absl::StrCat(::getpid()).c_str(), 1);
    ::setenv("LISTEN_FDS", absl::StrCat(fds.size()).c_str(), 1);
    ::setenv("LISTEN_FDNAMES", names.c_str(), 1);
    ::_exit(service());
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(WatchdogLimit, IsThatOfThisProcessAlone) {
  using std::chrono::microseconds;
  const std::string self = absl::StrCat(::getpid());
  EXPECT_EQ(WatchdogLimit("30000000", self.c_str()), microseconds(30000000));
  EXPECT_EQ(WatchdogLimit("30000000", nullptr), microseconds(30000000));
  EXPECT_EQ(WatchdogLimit("30000000", "1"), microseconds(0));
  EXPECT_EQ(WatchdogLimit(nullptr, self.c_str()), microseconds(0));
  for (const char* none : {"", "0", "-5", "soon"}) {
    EXPECT_EQ(WatchdogLimit(none, self.c_str()), microseconds(0)) << none;
  }
}

TEST_F(FdStoreTest, TakesWhatIsOursAndLeavesTheRestAlone) {
  const UniqueFd weights = Memfd("weights"), socket = Memfd("socket"), state = Memfd("state");
  const int result = RunAsService(
      {weights.get(), socket.get(), state.get()}, "forebay.weights.0:http.socket:forebay.state.0",
      [&] {
        int taken = -1;
        {
          FdStore store = FdStore::Take(Handed());
          if (store.names() != std::vector<std::string>{"state.0", "weights.0"}) return 10;
          for (const int fd : {3, 4, 5}) {
            if (::fcntl(fd, F_GETFD) != FD_CLOEXEC) return 11;
          }
          for (const char* name : {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}) {
            if (std::getenv(name) != nullptr) return 12;
          }
          if (store.Release("http.socket").valid() || store.Release("forebay.state.0").valid()) {
            return 13;
          }
          const UniqueFd fd = store.Release("state.0");
          if (InodeOf(fd.get()) != InodeOf(state.get())) return 14;
          if (store.Release("state.0").valid()) return 15;
          if (store.names() != std::vector<std::string>{"weights.0"}) return 16;
          taken = fd.get();
        }
        if (::fcntl(taken, F_GETFD) != -1) return 17;
        if (::fcntl(3, F_GETFD) != -1) return 18;           // Closed by the store's destructor.
        return ::fcntl(4, F_GETFD) == FD_CLOEXEC ? 0 : 19;  // Not a descriptor of the store.
      });
  EXPECT_EQ(result, 0);
}

TEST_F(FdStoreTest, OfAnotherProcessAreNotTaken) {
  const UniqueFd fd = Memfd("one");
  const int result = RunAsService({fd.get()}, "forebay.a", [] {
    ::setenv("LISTEN_PID", "1", 1);
    return FdStore::Take(Handed()).names().empty() ? 0 : 10;
  });
  EXPECT_EQ(result, 0);
}

TEST_F(FdStoreTest, ForgetsWhatItTookAndNothingElse) {
  ServiceManager manager(socket_, Barriers::kAnswered);
  const UniqueFd one = Memfd("one"), other = Memfd("other");
  const int result =
      RunAsService({one.get(), other.get(), one.get()}, "forebay.a:other:forebay.b", [&] {
        FdStore store = FdStore::Take(Handed(keeps_two_));
        const UniqueFd released = store.Release("a");
        if (!store.Forget(kPatience).ok()) return 10;
        // Succeeds because the store has no descriptor to forget.
        if (!store.Forget(kPatience).ok()) return 11;
        return store.names() == std::vector<std::string>{"b"} ? 0 : 12;
      });
  EXPECT_EQ(result, 0);
  EXPECT_THAT(manager.messages(), ElementsAre(Message{.text = "FDSTOREREMOVE=1\nFDNAME=forebay.a"},
                                              Message{.text = "FDSTOREREMOVE=1\nFDNAME=forebay.b"},
                                              Message{.text = "BARRIER=1"}));
}

// Descriptors of jobs that continue stay in the store until Drop() removes them.
TEST_F(FdStoreTest, ForgetsAllButWhatIsKeptOnAndDropsThatLater) {
  ServiceManager manager(socket_, Barriers::kAnswered);
  const UniqueFd one = Memfd("one"), other = Memfd("other");
  const int result = RunAsService({one.get(), other.get()}, "forebay.a:forebay.b", [&] {
    FdStore store = FdStore::Take(Handed(keeps_two_));
    if (!store.Forget(kPatience, {"b"}).ok()) return 10;
    if (!store.Drop("a").ok()) return 11;  // Succeeds because "a" was forgotten above.
    if (!store.Drop("b").ok()) return 12;
    if (!store.Drop("b").ok()) return 13;  // Succeeds because "b" was dropped above.
    return store.Flush(kPatience).ok() ? 0 : 14;
  });
  EXPECT_EQ(result, 0);
  EXPECT_THAT(manager.messages(), ElementsAre(Message{.text = "FDSTOREREMOVE=1\nFDNAME=forebay.a"},
                                              Message{.text = "BARRIER=1"},
                                              Message{.text = "FDSTOREREMOVE=1\nFDNAME=forebay.b"},
                                              Message{.text = "BARRIER=1"}));
}

TEST_F(FdStoreTest, TheUnitAsksForAsMuchAsTheDaemonMayKeep) {
  std::ifstream unit(FOREBAYD_SERVICE_PATH);
  ASSERT_TRUE(unit.good());
  const std::string text{std::istreambuf_iterator<char>(unit), {}};
  EXPECT_THAT(text, HasSubstr(absl::StrCat("\nFileDescriptorStoreMax=", kStoredFdsMax, "\n")));
  // systemd closes what it keeps of a service that has failed.
  EXPECT_THAT(text, HasSubstr("\nStartLimitIntervalSec=0\n"));
  EXPECT_THAT(text, HasSubstr(absl::StrCat("\nEnvironment=FDSTORE=", kStoredFdsMax, "\n")));
}

}  // namespace
}  // namespace forebay::daemon
