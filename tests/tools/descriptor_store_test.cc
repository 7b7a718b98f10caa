// SPDX-License-Identifier: Apache-2.0
// Goal    Descriptors that a service stores with the daemon's FdStore reach the service's next process by name. Removed
//         descriptors do not. A message that breaks the protocol changes nothing and leaks no descriptor.
// Method  Real processes with a real socket: fd_store_client is the service, this process its manager. Messages that
//         FdStore does not send are sent from here.

#include "tools/forebay/descriptor_store.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"

namespace forebay::tools {
namespace {

using ::forebay::testing::HasError;
using protocol::ErrorId;
using protocol::UniqueFd;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::chrono::seconds kPatience(30);
constexpr uint32_t kCapacity = 400;

size_t OpenDescriptors() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    count += entry.path().empty() ? 0 : 1;
  }
  return count;
}

UniqueFd Memfd(const std::string& content) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(::write(fd.get(), content.data(), content.size()),
            static_cast<ssize_t>(content.size()));
  return fd;
}

class DescriptorStoreTest : public ::testing::Test {
 protected:
  DescriptorStoreTest() : descriptors_before_(OpenDescriptors()) {}
  ~DescriptorStoreTest() override {
    store_.reset();
    EXPECT_EQ(OpenDescriptors(), descriptors_before_);
  }

  void MakeStore(uint32_t capacity = kCapacity) {
    auto store = DescriptorStore::Create(path_, capacity);
    ASSERT_OK(store.status());
    store_.emplace(*std::move(store));
  }

  struct Ended {
    int exit_status = -1;
    std::string output;
    bool operator==(const Ended&) const = default;
  };

  // Runs one process of the service until it ends, with the descriptors that the store retains.
  Ended Run(const std::vector<std::string>& arguments) { return Run(arguments, store_->kept()); }

  Ended Run(const std::vector<std::string>& arguments, std::vector<PassedDescriptor> passed) {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    const UniqueFd output(ends[0]);
    UniqueFd child_output(ends[1]);
    store_->NextProcess();
    ProcessOptions options{.arguments = {FD_STORE_CLIENT},
                           .environment = store_->environment(),
                           .stdout_fd = child_output.get(),
                           .passed = std::move(passed),
                           .signal_mask = {}};
    options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
    auto process = Process::Start(options);
    child_output.Reset();
    EXPECT_OK(process.status());
    if (!process.ok()) return {};
    std::array<pollfd, 2> watched = {
        {{store_->socket_fd(), POLLIN, 0}, {process->pidfd(), POLLIN, 0}}};
    const int limit_ms = static_cast<int>(std::chrono::milliseconds(kPatience).count());
    while (watched[1].revents == 0 && ::poll(watched.data(), watched.size(), limit_ms) > 0) {
      store_->Drain();
    }
    store_->Drain();
    Ended ended;
    ended.exit_status = WEXITSTATUS(process->WaitFor(kPatience).value_or(-1));
    std::array<char, 1 << 16> text{};
    for (ssize_t size; (size = ::read(output.get(), text.data(), text.size())) > 0;) {
      ended.output.append(text.data(), static_cast<size_t>(size));
    }
    return ended;
  }

  void Send(const std::string& text, const std::vector<int>& fds) const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> control{};
    std::string data = text;
    iovec part{.iov_base = data.data(), .iov_len = data.size()};
    msghdr header{};
    header.msg_name = &address;
    header.msg_namelen = sizeof(address);
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (!fds.empty()) {
      header.msg_control = control.data();
      header.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
      cmsghdr* const rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
    }
    const UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::sendmsg(socket.get(), &header, 0), static_cast<ssize_t>(text.size()));
  }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const PassedDescriptor& one : store_->kept()) names.push_back(one.name);
    return names;
  }

  const testing::TempDir dir_;
  const std::string path_ = dir_.path() + "/notify";
  std::optional<DescriptorStore> store_;

 private:
  const size_t descriptors_before_;
};

TEST_F(DescriptorStoreTest, GivesTheNextProcessWhatTheLastOneKept) {
  MakeStore();
  EXPECT_EQ(Run({"keep", "a", "one", "keep", "b", "two", "flush"}), (Ended{0, ""}));
  EXPECT_THAT(Names(), ElementsAre("forebay.b", "forebay.a")) << "newest first";
  EXPECT_EQ(Run({}), (Ended{0, "a=one\nb=two\n"}));
  EXPECT_EQ(Run({}), (Ended{0, "a=one\nb=two\n"})) << "they are there still";
}

TEST_F(DescriptorStoreTest, KeepsTheNewestOfOneName) {
  MakeStore();
  EXPECT_EQ(Run({"keep", "a", "one", "keep", "b", "two", "keep", "a", "three"}), (Ended{0, ""}));
  EXPECT_EQ(Run({}), (Ended{0, "a=three\nb=two\n"}));
}

TEST_F(DescriptorStoreTest, ClosesWhatTheServiceForgets) {
  MakeStore();
  EXPECT_EQ(Run({"keep", "a", "one", "keep", "b", "two"}), (Ended{0, ""}));
  EXPECT_EQ(Run({"forget", "keep", "c", "three"}), (Ended{0, "a=one\nb=two\n"}));
  EXPECT_EQ(Run({}), (Ended{0, "c=three\n"}));
}

TEST_F(DescriptorStoreTest, HearsThatAProcessIsReady) {
  MakeStore();
  EXPECT_FALSE(store_->is_ready());
  EXPECT_EQ(Run({"ready"}), (Ended{0, ""}));
  EXPECT_TRUE(store_->is_ready());
  EXPECT_EQ(Run({}), (Ended{0, ""}));
  EXPECT_FALSE(store_->is_ready()) << "the next process has not said so";
}

TEST_F(DescriptorStoreTest, WithoutCapacityTheServiceKnowsThatNothingIsKept) {
  MakeStore(/*capacity=*/0);
  const Ended ended = Run({"keep", "a", "one"});
  EXPECT_EQ(ended.exit_status, 1);
  EXPECT_THAT(ended.output, HasSubstr("E_UNSUPPORTED"));
}

TEST_F(DescriptorStoreTest, PassesManyDescriptorsWhateverTheirNumbers) {
  MakeStore();
  std::vector<UniqueFd> fds;
  std::vector<PassedDescriptor> passed;
  std::string expected;
  for (uint32_t i = 0; i < 200; ++i) fds.push_back(Memfd(absl::StrFormat("%03d", i)));
  for (uint32_t i = 0; i < 200; ++i) {
    absl::StrAppendFormat(&expected, "n%03d=%03d\n", i, i);
    // The descriptors are passed in reverse. Each number is then the target number of another descriptor.
    passed.insert(passed.begin(), {absl::StrFormat("forebay.n%03d", i), fds[i].get()});
  }
  EXPECT_EQ(Run({}, passed), (Ended{0, expected}));
}

TEST_F(DescriptorStoreTest, ClosesWhatIsBeyondItsCapacity) {
  MakeStore(/*capacity=*/2);
  const UniqueFd one = Memfd("1"), two = Memfd("2"), three = Memfd("3");
  const size_t before = OpenDescriptors();
  Send("FDSTORE=1\nFDNAME=x", {one.get(), two.get(), three.get()});
  Send("FDSTORE=1", {three.get()});
  store_->Drain();
  EXPECT_THAT(Names(), ElementsAre("x", "x"));
  EXPECT_EQ(OpenDescriptors(), before + 2);
  Send("FDSTOREREMOVE=1\nFDNAME=x", {});
  Send("FDSTORE=1", {three.get()});
  store_->Drain();
  EXPECT_THAT(Names(), ElementsAre("stored")) << "all of one name are removed";
}

TEST_F(DescriptorStoreTest, IgnoresWhatBreaksTheProtocol) {
  MakeStore();
  const UniqueFd fd = Memfd("1");
  const size_t before = OpenDescriptors();
  Send("FDSTORE=1\nFDNAME=a:b", {fd.get()});
  Send(absl::StrCat("FDSTORE=1\nFDNAME=", std::string(256, 'x')), {fd.get()});
  Send("FDSTORE=1\nFDNAME=\x01", {fd.get()});
  Send(absl::StrCat("FDSTORE=1\nX=", std::string(5000, 'x')), {fd.get()});
  Send("FDSTORE=1\nFDNAME=a", {});
  Send("FDNAME=a", {fd.get()});
  Send("FDSTORE=10\nREADY=10\nxREADY=1", {fd.get()});
  Send("BARRIER=1", {fd.get()});
  Send("FDSTOREREMOVE=1\nFDNAME=a", {fd.get()});
  store_->Drain();
  EXPECT_THAT(Names(), IsEmpty());
  EXPECT_FALSE(store_->is_ready());
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(DescriptorStoreTest, APathThatCannotBeASocketIsRefused) {
  const std::string long_path = dir_.path() + "/" + std::string(120, 'x');
  EXPECT_THAT(DescriptorStore::Create(long_path, kCapacity), HasError(ErrorId::kOption));
  const std::string no_folder = dir_.path() + "/none/notify";
  EXPECT_THAT(DescriptorStore::Create(no_folder, kCapacity), HasError(ErrorId::kOption));
}

}  // namespace
}  // namespace forebay::tools
