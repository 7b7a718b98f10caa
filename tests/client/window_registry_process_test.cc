// SPDX-License-Identifier: Apache-2.0
// Goal    A write into the weights ends the process as without the client, but first names the parameter, its group, and what
//         to do. A fault at another address is not handled.
// Method  A layout with padding over a read-only mapping. Child processes write.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <string>

#include "client/internal/mapping.h"
#include "client/window_registry.h"
#include "gtest/gtest.h"
#include "tests/support/status_test.h"

namespace forebay::client::window_registry_process_test {
namespace {

class WindowRegistry : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(
        protocol::Layout layout,
        protocol::Layout::Create({.params = {{.name = "embed.weight", .shape = {10}},
                                             {.name = "embed.bias", .shape = {3}},
                                             {.name = "h.0.w", .shape = {5}, .group = 1}},
                                  .group_names = {"embed", "h.0"},
                                  .partitions = {}}));
    layout_ = std::make_unique<protocol::Layout>(std::move(layout));
    ASSERT_OK_AND_ASSIGN(window_, internal::Mapping::MapPrivate(layout_->weights_bytes()));
    ASSERT_EQ(::mprotect(window_->bytes().data(), window_->bytes().size(), PROT_READ), 0);
    registration_ = RegisterWindow(window_->bytes(), "gpt", WindowParts(*layout_));
  }

  std::string Explained(const void* address) {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe(ends.data()), 0);
    const bool found = ExplainWrite(address, ends[1]);
    ::close(ends[1]);
    std::string text(4096, '\0');
    const ssize_t got = ::read(ends[0], text.data(), text.size());
    ::close(ends[0]);
    text.resize(got > 0 ? static_cast<size_t>(got) : 0);
    EXPECT_EQ(found, !text.empty());
    return text;
  }

  std::unique_ptr<protocol::Layout> layout_;
  std::shared_ptr<internal::Mapping> window_;
  std::unique_ptr<WindowRegistration> registration_;
};

TEST_F(WindowRegistry, NamesParameterElementAndGroup) {
  const std::byte* begin = window_->bytes().data();
  EXPECT_THAT(Explained(begin), ::testing::HasSubstr("embed.weight, element 0 (group 0, embed)"));
  EXPECT_THAT(Explained(begin + 4 * 9 + 3), ::testing::HasSubstr("embed.weight, element 9 "));
  EXPECT_THAT(Explained(begin + 4 * 12), ::testing::HasSubstr("embed.bias, element 2 "));
  EXPECT_THAT(Explained(begin + 4 * 13), ::testing::HasSubstr("padding at byte 52"));
  const uint64_t second = layout_->groups()[1].weights_offset_bytes;
  EXPECT_THAT(Explained(begin + second + 8),
              ::testing::AllOf(::testing::HasSubstr("job gpt: parameter h.0.w, element 2 (group 1"),
                               ::testing::HasSubstr("hint: ")));
}

TEST_F(WindowRegistry, KnowsNothingOutsideAWindowOrAfterItsEnd) {
  const std::byte* begin = window_->bytes().data();
  EXPECT_EQ(Explained(begin - 1), "");
  EXPECT_EQ(Explained(begin + window_->bytes().size()), "");
  registration_.reset();
  EXPECT_EQ(Explained(begin), "");
}

TEST_F(WindowRegistry, MoreWindowsThanTheTableHoldsAreNotExplained) {
  std::vector<std::unique_ptr<WindowRegistration>> more;
  for (int i = 0; i < kWindowsMax; ++i) {
    more.push_back(RegisterWindow(window_->bytes(), "more", {}));
  }
  more.clear();
  EXPECT_THAT(Explained(window_->bytes().data()), ::testing::HasSubstr("job gpt"));
}

using WindowRegistryDeathTest = WindowRegistry;

TEST_F(WindowRegistryDeathTest, AWriteIsExplainedBeforeTheProcessDies) {
  auto* first = reinterpret_cast<volatile char*>(window_->bytes().data());
  EXPECT_DEATH(
      {
        InstallSegvHandler();
        InstallSegvHandler();
        *first = 1;
      },
      "parameter embed.weight, element 0 .group 0, embed.*");
}

TEST_F(WindowRegistryDeathTest, TheHandlerThatWasThereTakesOver) {
  auto* first = reinterpret_cast<volatile char*>(window_->bytes().data());
  EXPECT_EXIT(
      {
        struct sigaction before {};
        before.sa_handler = [](int) { ::_exit(7); };
        ::sigaction(SIGSEGV, &before, nullptr);
        InstallSegvHandler();
        *first = 1;
      },
      ::testing::ExitedWithCode(7), "embed.weight");
}

TEST_F(WindowRegistryDeathTest, AFaultElsewhereSaysNothingOfOurs) {
  void* elsewhere = ::mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(elsewhere, MAP_FAILED);
  EXPECT_EXIT(
      {
        struct sigaction before {};
        before.sa_handler = [](int) { ::_exit(7); };
        ::sigaction(SIGSEGV, &before, nullptr);
        InstallSegvHandler();
        *static_cast<volatile char*>(elsewhere) = 1;
      },
      ::testing::ExitedWithCode(7), "^$");
  ::munmap(elsewhere, 4096);
}

}  // namespace
}  // namespace forebay::client::window_registry_process_test
