// SPDX-License-Identifier: Apache-2.0
// Goal    Kills of trainers, of the daemon and of both, at any moment, lose no step that the job's level of durability
//         protects. The job always holds the bytes of one step of a run without kills.
// Method  A short campaign for each kind of job and level, from a printed seed; FOREBAY_SEED sets another seed. `kill_campaign`
//         runs the long campaign.

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::kills_process_test {
namespace {

using testing::KillCampaignOptions;
using testing::KillCampaignResult;

constexpr uint32_t kKills = 8;

class KillsProcess : public ::testing::TestWithParam<size_t> {
 protected:
  const testing::TempDir dir_;
};

TEST_P(KillsProcess, LoseNoStepThatTheLevelKeeps) {
  const char* seed = std::getenv("FOREBAY_SEED");
  KillCampaignOptions options = testing::AllKillCampaigns(
      dir_.path(), kKills, seed == nullptr ? 1 : std::stoull(seed))[GetParam()];
  std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(options.seed));
  std::filesystem::create_directory(options.folder);
  ASSERT_OK_AND_ASSIGN(const KillCampaignResult result, testing::RunKillCampaign(options));
  EXPECT_EQ(result.kills, kKills);
  EXPECT_GT(result.comparisons, 0U);
  EXPECT_GT(result.committed_step, 0U);
}

std::string ParamName(const ::testing::TestParamInfo<size_t>& info) {
  std::string name = testing::NameOf(testing::AllKillCampaigns("", 0, 0)[info.param]);
  std::ranges::replace_if(
      name, [](unsigned char letter) { return !std::isalnum(letter); }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(AllLevels, KillsProcess,
                         ::testing::Range(size_t{0}, testing::AllKillCampaigns("", 0, 0).size()),
                         ParamName);

}  // namespace
}  // namespace forebay::daemon::kills_process_test
