// SPDX-License-Identifier: Apache-2.0
// Goal    Hostfiles and host selections have the same meaning as in DeepSpeed. Invalid ones are refused with an error that
//         names the file, the line and a remedy.
// Method  Parses texts. Each rule of a line is broken once.

#include "tools/forebay/hostfile.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/status_test.h"

namespace forebay::tools {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr char kFile[] = "worker-0 slots=2\nworker-1 slots=4\nworker-2 slots=1\n";

std::string Refusal(const std::string& text) {
  return protocol::FormatError(ParseHostfile(text, "hosts").status());
}

// Returns the selected hosts and slots, "worker-0:0,1 worker-1:2", or the text of the error.
std::string Selection(const HostSelection& selection) {
  const auto hosts = SelectHosts(*ParseHostfile(kFile, "hosts"), selection);
  if (!hosts.ok()) return protocol::FormatError(hosts.status());
  std::string text;
  for (const HostSlots& host : *hosts) {
    absl::StrAppend(&text, text.empty() ? "" : " ", host.host);
    for (size_t i = 0; i < host.slots.size(); ++i) {
      absl::StrAppend(&text, i == 0 ? ":" : ",", host.slots[i]);
    }
  }
  return text;
}

TEST(Hostfile, HasAHostALineAndLeavesOutCommentsAndBlankLines) {
  ASSERT_OK_AND_ASSIGN(
      const auto hosts,
      ParseHostfile("# two nodes\n\nworker-1   slots=3\n \t \n\tworker-0\tslots=1 # small\r\n"
                    "#worker-2 slots=8\n10.0.0.3 slots=1",
                    "hosts"));
  EXPECT_THAT(hosts, ElementsAre(HostSlots{"worker-1", {0, 1, 2}, 3}, HostSlots{"worker-0", {0}, 1},
                                 HostSlots{"10.0.0.3", {0}, 1}));
}

TEST(Hostfile, RefusesEachLineThatIsNoneWithFileAndLine) {
  EXPECT_THAT(Refusal("worker-0 slots=1\nworker-1\n"),
              AllOf(StartsWith("error[E_CONFIG]: hosts:2: host worker-1 has no slots"),
                    HasSubstr("\nhint: a line is: worker-1 slots=4")));
  for (const char* line : {"worker-0 slot=4", "worker-0 slots=", "worker-0 slots=-1",
                           "worker-0 slots=+1", "worker-0 slots=4x", "worker-0 slots = 4",
                           "worker-0 4", "slots=4", "worker-0 slots=4 max_slots=8"}) {
    EXPECT_THAT(Refusal(line), AllOf(StartsWith("error[E_CONFIG]: hosts:1: \""), HasSubstr(line),
                                     HasSubstr("is no \"HOST slots=N\"")));
  }
  EXPECT_THAT(Refusal("worker-0 slots=0"), HasSubstr("host worker-0 has 0 slots, not 1 to 1024"));
  EXPECT_THAT(Refusal("worker-0 slots=1025"), HasSubstr("has 1025 slots"));
  EXPECT_THAT(Refusal("-oProxyCommand=x slots=1"), HasSubstr("begins with \"-\""));
  EXPECT_THAT(Refusal("a slots=1\n# a\na slots=2"),
              HasSubstr("hosts:3: host a stands in line 1 already"));
  for (const char* none : {"", "\n\n", "# worker-0 slots=1\n"}) {
    EXPECT_THAT(Refusal(none), StartsWith("error[E_CONFIG]: hosts: there is no host in it"));
  }
}

TEST(Hostfile, HasAtMostSoManyHosts) {
  std::string text;
  for (size_t i = 0; i < kHostsMax; ++i) absl::StrAppend(&text, "h", i, " slots=1\n");
  ASSERT_OK_AND_ASSIGN(const auto hosts, ParseHostfile(text, "hosts"));
  EXPECT_THAT(hosts, SizeIs(kHostsMax));
  EXPECT_THAT(Refusal(text + "one-more slots=1\n"), StartsWith("error[E_LIMIT]: hosts:1025: "));
}

TEST(Hostfile, IncludeSelectsHostsAndSlotsInTheFilesOrder) {
  EXPECT_EQ(Selection({}), "worker-0:0,1 worker-1:0,1,2,3 worker-2:0");
  EXPECT_EQ(Selection({.include = "worker-1:2,0@worker-0"}), "worker-0:0,1 worker-1:0,2");
  EXPECT_EQ(Selection({.include = "worker-1:3,3"}), "worker-1:3");
  EXPECT_EQ(Selection({.include = "worker-1:3@worker-1:1"}), "worker-1:1,3");
  EXPECT_EQ(Selection({.include = " worker-2 @ worker-1: 1, 2 "}), "worker-1:1,2 worker-2:0");
}

TEST(Hostfile, ExcludeLeavesTheRest) {
  EXPECT_EQ(Selection({.exclude = "worker-1"}), "worker-0:0,1 worker-2:0");
  EXPECT_EQ(Selection({.exclude = "worker-1:0,3@worker-2:0"}), "worker-0:0,1 worker-1:1,2");
  EXPECT_THAT(Selection({.exclude = "worker-0@worker-1@worker-2"}),
              HasSubstr("error[E_OPTION]: --exclude worker-0@worker-1@worker-2 leaves no slot"));
}

TEST(Hostfile, RefusesAHostOrASlotThatItDoesNotHave) {
  EXPECT_THAT(Selection({.include = "worker-0@worker-9"}),
              AllOf(StartsWith("error[E_OPTION]: --include: host \"worker-9\" is not in"),
                    HasSubstr("\nhint: ")));
  EXPECT_THAT(Selection({.exclude = "worker-9"}), HasSubstr("--exclude: host \"worker-9\""));
  EXPECT_THAT(Selection({.include = "worker-0@"}), HasSubstr("host \"\" is not in"));
  for (const char* slot : {"4", "-1", "", "1-2", "x"}) {
    EXPECT_THAT(Selection({.include = absl::StrCat("worker-1:", slot)}),
                AllOf(HasSubstr(absl::StrCat("host worker-1 has no slot \"", slot, "\"")),
                      HasSubstr("hint: its slots are 0 to 3")));
  }
}

TEST(Hostfile, ThatCannotBeReadIsRefusedByName) {
  EXPECT_THAT(protocol::FormatError(ReadHostfile("/does/not/exist", {}).status()),
              HasSubstr("error[E_CONFIG]: hostfile /does/not/exist: No such file or directory"));
}

}  // namespace
}  // namespace forebay::tools
