// SPDX-License-Identifier: Apache-2.0
// Kills a daemon and its trainers at random moments, at each level of durability. Prints how many answered steps the kills
// undid. Fails if they undid a step that the level guarantees.
//
// usage: kill_campaign KILLS [SEED [NAME]]     KILLS over all kinds of jobs and levels, in the working directory,
//                                              which is on a disk. NAME: one kind and level, as the program prints it

#include "tests/support/kill_campaign.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/daemon_process.h"

namespace {

void Print(const std::string& name, const forebay::testing::KillCampaignResult& result) {
  std::printf(
      "%-20s %5u kills: %u of trainers, %u of the daemon, %u of both; %u before the first step; "
      "%.1f a second\n"
      "%-20s %llu steps answered, %llu undone, at most %llu at once; %u comparisons of all bytes, "
      "all equal\n",
      name.c_str(), result.kills, result.trainer_kills, result.daemon_kills, result.both_kills,
      result.early_kills, result.kills / result.seconds, "",
      static_cast<unsigned long long>(result.steps_answered),
      static_cast<unsigned long long>(result.steps_undone),
      static_cast<unsigned long long>(result.steps_undone_max), result.comparisons);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  namespace testing = forebay::testing;
  if (argc < 2 || argc > 4) {
    std::fprintf(stderr, "usage: kill_campaign KILLS [SEED [NAME]]\n");
    return 2;
  }
  const testing::TempDir folder;
  const auto kills = static_cast<uint32_t>(std::stoul(argv[1]));
  const uint64_t seed = argc > 2 ? std::stoull(argv[2]) : 1;
  auto campaigns = testing::AllKillCampaigns(folder.path(), kills, seed);
  if (argc > 3) {
    std::erase_if(campaigns, [&](const auto& options) { return NameOf(options) != argv[3]; });
  }
  const auto count = static_cast<uint32_t>(campaigns.size());
  uint32_t done = 0;
  double seconds = 0;
  for (uint32_t i = 0; i < count; ++i) {
    campaigns[i].kills = kills / count + (i < kills % count ? 1 : 0);
    std::filesystem::create_directory(campaigns[i].folder);
    const auto result = testing::RunKillCampaign(campaigns[i]);
    if (!result.ok()) {
      std::fprintf(stderr, "FAILED after %u kills: %s\n", done, result.status().ToString().c_str());
      return 1;
    }
    Print(NameOf(campaigns[i]), *result);
    done += result->kills;
    seconds += result->seconds;
  }
  std::printf("%u kills in %.0f s, seed %llu: nothing lost\n", done, seconds,
              static_cast<unsigned long long>(seed));
  return 0;
}
