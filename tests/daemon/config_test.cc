// SPDX-License-Identifier: Apache-2.0
// Goal    Every key is read, from a file and from the command line. An error names the file, the line and the nearest valid
//         key. The program reports the same errors, and its exit status says which kind of failure it was.
// Method  Small files in a temporary directory, and real runs of forebayd that end before they serve.

#include "daemon/config.h"

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinned_mem/memory_limit.h"
#include "protocol/error.h"
#include "protocol/units.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::config_test {
namespace {

using protocol::ErrorId;
using ::testing::ElementsAre;
using testing::HasError;
using ::testing::HasSubstr;
using testing::RunProgram;
using testing::TempDir;

TEST(Config, ReadsEveryKeyOfAFile) {
  const TempDir dir;
  Config config;
  ASSERT_OK(LoadConfigFile(dir.Write("c.toml", R"(
memlock = "best_effort"
pidfd = "best_effort"
[socket]
path = "/tmp/f.sock"
mode = "0600"
[dram]
limit = "2GiB"
job_percent = 60
uid_quota = "1GiB"
[swap]
uid_quota = "3GiB"
paths = ["/a", "/b"]
capacity = ["1GiB", 4096]
deadline = 5000
staging = "64MiB"
ledger = "2MiB"
life = "unlinked"
[jobs]
durability = "epoch=10"
[io]
engine = "threads"
[update]
workers = 3
cpus = ["0-2", 5]
nice = 0
target = "scalar"
block_elems = 4096
[log]
level = "debug"
)"),
                           config));
  EXPECT_EQ(config.pidfd, PidfdPolicy::kBestEffort);
  EXPECT_EQ(config.socket_path, "/tmp/f.sock");
  EXPECT_EQ(config.socket_mode, 0600U);
  EXPECT_EQ(config.dram_limit_bytes, uint64_t{2} << 30);
  EXPECT_EQ(config.dram_job_percent, 60U);
  EXPECT_EQ(config.dram_uid_bytes, uint64_t{1} << 30);
  EXPECT_EQ(config.swap_uid_bytes, uint64_t{3} << 30);
  EXPECT_THAT(config.swap_paths, ElementsAre("/a", "/b"));
  EXPECT_THAT(config.swap_capacity_bytes, ElementsAre(uint64_t{1} << 30, 4096U));
  EXPECT_EQ(config.swap_staging_bytes, uint64_t{64} << 20);
  EXPECT_EQ(config.swap_deadline, std::chrono::seconds(5));
  EXPECT_EQ(config.swap_ledger_bytes, uint64_t{2} << 20);
  EXPECT_EQ(config.swap_life, nvme::FileLife::kUnlinked);
  EXPECT_EQ(config.durability, (protocol::Durability{protocol::DurabilityLevel::kEpoch, 10}));
  EXPECT_EQ(config.io_engine, nvme::EngineChoice::kThreads);
  EXPECT_EQ(config.workers, 3U);
  EXPECT_THAT(config.update_cpus, ElementsAre(0, 1, 2, 5));
  EXPECT_EQ(config.update_nice, 0);
  EXPECT_EQ(config.update_target, "scalar");
  EXPECT_EQ(config.block_elems, 4096U);
  EXPECT_EQ(config.log_level, LogLevel::kDebug);
  EXPECT_EQ(config.lock, pinned_mem::LockPolicy::kBestEffort);
  EXPECT_OK(CheckConfig(config));
}

TEST(Config, NamesFileLineAndTheNearestKey) {
  const TempDir dir;
  Config config;
  const std::string path = dir.Write("c.toml", "[dram]\nlimit = 4096\n[swap]\npathes = \"/a\"\n");
  const absl::Status status = LoadConfigFile(path, config);
  EXPECT_THAT(status, HasError(ErrorId::kConfig));
  EXPECT_THAT(status.message().data(), HasSubstr(path + ":4: unknown key swap.pathes"));
  EXPECT_THAT(protocol::HintOf(status), HasSubstr("swap.paths"));

  const absl::Status broken = LoadConfigFile(dir.Write("b.toml", "\n[dram\n"), config);
  EXPECT_THAT(broken, HasError(ErrorId::kConfig));
  EXPECT_THAT(broken.message().data(), HasSubstr("b.toml:2"));
  EXPECT_THAT(LoadConfigFile(dir.path() + "/none.toml", config), HasError(ErrorId::kConfig));

  EXPECT_THAT(protocol::HintOf(ApplySetting("memory=1", config)), HasSubstr("lists every key"))
      << "no key is near";
}

TEST(Config, SaysAllOfWhatIsWrongWithAZeroByte) {
  const TempDir dir;
  Config config;
  for (const auto& [line, message] : {
           std::pair("swap.paths = \"/a\\u0000b\"", "c.toml:1: swap.paths: has a zero byte in it"),
           std::pair("dram.limit = \"1\\u0000b\"", "c.toml:1: dram.limit: has a zero byte in it"),
           std::pair("\"a\\u0000b\" = 1", "c.toml:1: unknown key a\\000b"),
       }) {
    const absl::Status status = LoadConfigFile(dir.Write("c.toml", line), config);
    EXPECT_THAT(status, HasError(ErrorId::kConfig)) << line;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

TEST(Config, TakesSettingsOverTheFile) {
  Config config;
  for (const char* setting :
       {"dram.limit=1.5GiB", "swap.paths=/a,/b", "swap.capacity=4GiB", "update.workers=2",
        "socket.mode=0600", "io.engine=io_uring", "log.level=warning", "memlock=best_effort"}) {
    EXPECT_OK(ApplySetting(setting, config)) << setting;
  }
  EXPECT_EQ(config.dram_limit_bytes, uint64_t{3} << 29);
  EXPECT_THAT(config.swap_paths, ElementsAre("/a", "/b"));
  EXPECT_EQ(config.workers, 2U);
  EXPECT_EQ(config.io_engine, nvme::EngineChoice::kUring);
  EXPECT_OK(ApplySetting("swap.paths=[\"/with,comma\"]", config));
  EXPECT_THAT(config.swap_paths, ElementsAre("/with,comma"));
  EXPECT_OK(CheckConfig(config));
}

TEST(Config, PlacesTheWorkersOnCpusOrOnANode) {
  Config config;
  EXPECT_EQ(config.update_nice, 5) << "less than a training process gets";
  EXPECT_THAT(config.update_cpus, ElementsAre());
  for (const char* setting : {"update.cpus=0-1,3", "update.cpus=\"0-1,3\"", "update.cpus=[0, 1, 3]",
                              "update.cpus=0,1,3", "update.cpus=[\"0,1\", 3]"}) {
    EXPECT_OK(ApplySetting(setting, config)) << setting;
    EXPECT_THAT(config.update_cpus, ElementsAre(0, 1, 3)) << setting;
  }
  EXPECT_OK(ApplySetting("update.nice=19", config));
  EXPECT_EQ(config.update_nice, 19);
  EXPECT_OK(CheckConfig(config));
  EXPECT_OK(ApplySetting("update.numa_node=0", config));
  EXPECT_THAT(CheckConfig(config), HasError(ErrorId::kConfig)) << "two places at once";
  EXPECT_OK(ApplySetting("update.cpus=[]", config));
  EXPECT_OK(CheckConfig(config));
}

TEST(Config, NamesKeyValueAndRuleOfABadPlacement) {
  const struct {
    const char* setting;
    const char* message;
  } cases[] = {
      {"update.nice=20", "--set: update.nice: 20 is not in 0 to 19"},
      {"update.nice=-1", "--set: update.nice: -1 is not in 0 to 19"},
      {"update.cpus=-1", "--set: update.cpus: \"-1\" is neither a CPU (0 to 65535) nor"},
      {"update.cpus=3-1", "update.cpus: \"3-1\" is neither"},
      {"update.cpus=two", "update.cpus: \"two\" is neither"},
      {"update.cpus=0-99999999", "update.cpus: \"0-99999999\" is neither"},
      {"update.cpus=1.5", "update.cpus: is not a string"},
      {"update.numa_node=-1", "--set: update.numa_node: -1 is not in 0 to 65535"},
  };
  for (const auto& test : cases) {
    Config config;
    const absl::Status status = ApplySetting(test.setting, config);
    EXPECT_THAT(status, HasError(ErrorId::kConfig)) << test.setting;
    EXPECT_THAT(std::string(status.message()), HasSubstr(test.message));
  }
}

TEST(Config, RefusesValuesThatAKeyCannotHave) {
  for (const char* setting : {"nothing",
                              "=1",
                              "dram.limit=much",
                              "dram.limit=-1",
                              "update.workers=many",
                              "update.workers=100000",
                              "update.block_elems=100",
                              "update.block_elems=0",
                              "io.engine=aio",
                              "log.level=loud",
                              "memlock=maybe",
                              "pidfd=no",
                              "socket.mode=0999",
                              "swap.capacity=0",
                              "swap.life=short",
                              "update=1",
                              "dram.limit=[1]",
                              "swap.ledger=0",
                              "swap.ledger=2GiB",
                              "jobs.durability=often",
                              "jobs.durability=epoch=0",
                              "jobs.durability=1"}) {
    Config config;
    EXPECT_THAT(ApplySetting(setting, config), HasError(ErrorId::kConfig)) << setting;
  }
  Config config;
  EXPECT_OK(ApplySetting("swap.capacity=4096", config));
  EXPECT_THAT(CheckConfig(config), HasError(ErrorId::kConfig));
  EXPECT_OK(ApplySetting("swap.paths=/a,/b,/c", config));
  EXPECT_OK(CheckConfig(config));
  EXPECT_OK(ApplySetting("swap.capacity=[4096, 4096]", config));
  EXPECT_EQ(CheckConfig(config).message(), "sizes in swap.capacity: 2; paths in swap.paths: 3");
  EXPECT_OK(ApplySetting("swap.capacity=4096", config));
  EXPECT_OK(ApplySetting("swap.limit_rate=[4096, 4096]", config));
  EXPECT_EQ(CheckConfig(config).message(), "sizes in swap.limit_rate: 2; paths in swap.paths: 3");
  EXPECT_OK(ApplySetting("swap.limit_rate=1GiB", config));
  EXPECT_OK(CheckConfig(config));
  EXPECT_OK(ApplySetting("swap.limit_rate=[]", config));
  EXPECT_OK(CheckConfig(config));
  EXPECT_OK(ApplySetting("swap.capacity=[]", config));
  EXPECT_EQ(CheckConfig(config).message(), "swap.paths is set, swap.capacity is not");
}

TEST(Config, ReadsAndNamesLevelsOfDurability) {
  Config config;
  EXPECT_EQ(config.durability, protocol::Durability{});
  EXPECT_OK(ApplySetting("jobs.durability=step", config));
  EXPECT_EQ(config.durability, (protocol::Durability{protocol::DurabilityLevel::kStep, 1}));
  EXPECT_OK(ApplySetting("jobs.durability=epoch=20", config));
  EXPECT_EQ(config.durability, (protocol::Durability{protocol::DurabilityLevel::kEpoch, 20}));
  const absl::Status status = ApplySetting("jobs.durability=always", config);
  EXPECT_EQ(status.message(), "--set: jobs.durability: \"always\" is no level of durability");
  EXPECT_THAT(protocol::HintOf(status), HasSubstr("use memory, step, or epoch=N"));
}

TEST(Config, ReadsWhatIsLeftOfAJobAtStop) {
  Config config;
  EXPECT_FALSE(config.durable_at_stop);
  EXPECT_OK(ApplySetting("jobs.at_stop=durable", config));
  EXPECT_TRUE(config.durable_at_stop);
  EXPECT_OK(ApplySetting("jobs.at_stop=free", config));
  EXPECT_FALSE(config.durable_at_stop);
  EXPECT_EQ(ApplySetting("jobs.at_stop=kept", config).message(),
            "--set: jobs.at_stop: \"kept\" is none of free, durable");
}

TEST(Config, SaysHowASizeIsWritten) {
  for (const char* setting :
       {"dram.limit=true", "dram.limit=much", "swap.staging=1.5", "swap.capacity=[[1]]"}) {
    Config config;
    const absl::Status status = ApplySetting(setting, config);
    EXPECT_THAT(std::string(status.message()), HasSubstr("is not a size")) << setting;
    EXPECT_EQ(protocol::HintOf(status), "write 4096, \"64MiB\" or \"2GiB\"") << setting;
  }
}

TEST(Config, RefusesWhatWouldMeanSomethingElse) {
  Config config;
  for (const char* setting :
       {"dram.limit=0", "dram.uid_quota=0", "dram.job_percent=0", "dram.job_percent=101",
        "swap.uid_quota=0", "swap.staging=0", "swap.deadline=999", "swap.limit_rate=0",
        "socket.path=\"\"", "dram.limit=1.5"}) {
    EXPECT_THAT(ApplySetting(setting, config), HasError(ErrorId::kConfig)) << setting;
  }
  const TempDir dir;  // a directory reads as an empty file
  EXPECT_THAT(LoadConfigFile(dir.path(), config), HasError(ErrorId::kConfig));
}

TEST(Config, AcceptsTheOldKeyOfEnduranceWithAnyValue) {
  const TempDir dir;
  for (const char* line :
       {"endurance = \"600TiB\"", "endurance = [4096, 4096]", "endurance = -1"}) {
    Config config;
    EXPECT_FALSE(config.sets_endurance);
    EXPECT_OK(LoadConfigFile(dir.Write("c.toml", std::string("[swap]\n") + line + "\n"), config));
    EXPECT_TRUE(config.sets_endurance) << line;
    EXPECT_OK(CheckConfig(config));
  }
  Config config;
  EXPECT_OK(ApplySetting("swap.endurance=often", config));
  EXPECT_TRUE(config.sets_endurance);
  EXPECT_THAT(ApplySetting("swap.endurances=1TiB", config), HasError(ErrorId::kConfig));
}

TEST(Forebayd, WarnsOnceThatTheOldKeyOfEnduranceHasNoEffect) {
  const TempDir dir;
  const std::string config = dir.Write("c.toml", "[swap]\nendurance = \"600TiB\"\n");
  const testing::Ended ended = RunProgram({FOREBAYD_PATH, "--check", "--config", config, "--set",
                                           "swap.endurance=1TiB", "--set", "memlock=best_effort"});
  EXPECT_EQ(ended.exit_code, 0) << ended.errors;
  const std::string warning = "swap.endurance has no effect and is removed in the next release";
  const size_t first = ended.errors.find(warning);
  ASSERT_NE(first, std::string::npos) << ended.errors;
  EXPECT_THAT(ended.errors, HasSubstr("forebay swap shows the bytes written to each path"));
  EXPECT_EQ(ended.errors.find(warning, first + 1), std::string::npos) << ended.errors;
}

TEST(Forebayd, EndsWithTheErrorOfABadStart) {
  const TempDir dir;
  const auto run = [&](std::vector<std::string> arguments) {
    std::vector<std::string> all = {FOREBAYD_PATH, "--set", "socket.path=" + dir.path() + "/s",
                                    "--set", "memlock=best_effort"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return RunProgram(all);
  };
  const auto expect = [&](const std::vector<std::string>& arguments, const std::string& error) {
    const testing::Ended ended = run(arguments);
    EXPECT_EQ(ended.exit_code, 1) << ended.errors;
    EXPECT_THAT(ended.errors, HasSubstr(error));
    EXPECT_THAT(ended.errors, HasSubstr("hint: "));
  };
  // The error must also come with --check.
  const auto expect_both = [&](std::vector<std::string> arguments, const std::string& error) {
    expect(arguments, error);
    arguments.push_back("--check");
    expect(arguments, error);
  };
  expect_both({"--set", "dram.limt=1GiB"}, "error[E_CONFIG]");
  expect_both({"--config", dir.Write("c.toml", "drum = 1\n")}, "error[E_CONFIG]");
  expect_both({"--set", "update.target=abacus"}, "error[E_OPTION]");
  expect_both({"--set", "update.cpus=60000"},
              "error[E_CONFIG]: update.cpus: CPU 60000 is not one that this process may use: ");
  expect_both({"--set", "update.numa_node=60000"},
              "error[E_CONFIG]: update.numa_node: NUMA node 60000 does not exist");
  expect_both({"--set", "socket.operators=no such group"},
              "error[E_CONFIG]: socket.operators: there is no group no such group");
  expect_both({"--set", "dram.limit=1000000TiB"},
              "error[E_CONFIG]: dram.limit is 1000000.0 TiB, but this machine has " +
                  protocol::FormatBytes(pinned_mem::MachineBytes()));
  const std::string missing = "swap.paths=" + dir.path() + "/none";
  expect({"--set", missing, "--set", "swap.capacity=16MiB"}, "error[E_SWAP_PATH]");
  const std::string swap = "swap.paths=" + dir.Make("empty");
  expect({"--set", swap, "--set", "swap.capacity=900TiB"}, "error[E_SWAP_NOSPC]");
  expect_both({"--set", swap, "--set", "swap.capacity=16MiB", "--set", "dram.limit=1MiB"},
              "error[E_DRAM_LIMIT]");
  expect_both({"--set", "dram.limit=1MiB"}, "error[E_DRAM_LIMIT]");
  expect_both({"--set", swap, "--set", "swap.capacity=16MiB", "--set", "swap.staging=1MiB"},
              "error[E_CONFIG]");
  expect({"--set", "socket.path=" + dir.path() + "/none/s"}, "error[E_CONFIG]");
  expect({"--set", "socket.path=" + dir.path() + "/" + std::string(200, 's')}, "error[E_CONFIG]");

  EXPECT_EQ(run({"--check", "--set", swap, "--set", "swap.capacity=16MiB"}).exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path() + "/empty")) << "--check leaves nothing";
  EXPECT_EQ(run({"--sett", "a=b"}).exit_code, 2);
  EXPECT_EQ(run({"--set"}).exit_code, 2);
  EXPECT_EQ(run({"--version"}).exit_code, 0);
  EXPECT_EQ(run({"--help"}).exit_code, 0);
}

}  // namespace
}  // namespace forebay::daemon::config_test
