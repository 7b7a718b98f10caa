// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/keep.h"

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/admin.h"
#include "client/environment.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tools/forebay/scrub.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;
using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::MakeError;

// Attempts to end a daemon durably. An attempt fails if the daemon is killed meanwhile.
constexpr int kStopsMax = 3;

client::AdminOptions AdminOf(const PrivateDaemon& daemon) {
  return {.socket = daemon.socket(), .timeout = std::chrono::minutes(1)};
}

// Formats a size with its exact number of bytes, which --dram and --swap-size accept.
std::string Exactly(uint64_t bytes) {
  return absl::StrCat(FormatBytes(bytes), " (", bytes, " bytes)");
}

absl::StatusOr<uint64_t> SizeOf(const char* option, const std::string& text) {
  const absl::StatusOr<uint64_t> bytes = protocol::ParseBytes(text);
  if (bytes.ok()) return bytes;
  return MakeError(ErrorId::kOption,
                   absl::StrCat(option, ": ", std::string(bytes.status().message())),
                   "give a number with a unit, as 2GiB");
}

absl::StatusOr<std::vector<std::string>> AbsolutePlaces(const std::vector<std::string>& swap) {
  std::vector<std::string> places;
  for (const std::string& place : swap) {
    std::error_code error;
    const fs::path absolute = fs::canonical(place, error);
    if (error) {
      return MakeError(ErrorId::kSwapPath, absl::StrCat("swap path ", place, ": ", error.message()),
                       "name a directory that exists and is writable, on a disk with O_DIRECT");
    }
    places.push_back(absolute.string());
  }
  return places;
}

// Returns E_OPTION for settings that --swap and --keep determine.
absl::Status CheckSettings(const std::vector<std::string>& settings) {
  constexpr std::array<std::string_view, 4> kOwn = {"swap.paths", "swap.capacity", "swap.life",
                                                    "jobs.at_stop"};
  for (const std::string& setting : settings) {
    const std::string key = setting.substr(0, setting.find('='));
    if (std::ranges::find(kOwn, key) == kOwn.end()) continue;
    return MakeError(ErrorId::kOption,
                     absl::StrCat("--set ", setting, ": ", key, " of a kept run is not free"),
                     "name the paths with --swap and their size with --swap-size, and leave "
                     "the setting out");
  }
  return absl::OkStatus();
}

absl::Status LessDramError(const KeptRun& run, uint64_t dram_bytes) {
  return MakeError(
      ErrorId::kOption,
      absl::StrCat("--resume ", run.name, ": the run was kept with ", Exactly(run.dram_bytes),
                   " of DRAM; now it would have ", Exactly(dram_bytes)),
      absl::StrCat("give --dram ", run.dram_bytes, " or more, or leave it out"));
}

// Checks that the options given with --resume agree with the saved run.
absl::Status CheckSame(const KeptRun& run, const KeepOptions& options,
                       const PrivateDaemonOptions& daemon) {
  if (!daemon.swap.empty()) {
    ASSIGN_OR_RETURN(const std::vector<std::string> places, AbsolutePlaces(daemon.swap));
    if (places != run.places) {
      return MakeError(ErrorId::kOption,
                       absl::StrCat("--resume ", run.name, ": the run's swap is on ",
                                    absl::StrJoin(run.places, ", "), "; --swap names ",
                                    absl::StrJoin(places, ", ")),
                       "leave --swap out");
    }
  }
  if (!daemon.swap_size.empty()) {
    ASSIGN_OR_RETURN(const uint64_t bytes, SizeOf("--swap-size", daemon.swap_size));
    if (bytes != run.swap_bytes) {
      return MakeError(
          ErrorId::kOption,
          absl::StrCat("--resume ", run.name, ": the run has ", Exactly(run.swap_bytes),
                       " on each swap path; --swap-size is ", Exactly(bytes)),
          "leave --swap-size out");
    }
  }
  if (!daemon.dram.empty()) {
    ASSIGN_OR_RETURN(const uint64_t bytes, SizeOf("--dram", daemon.dram));
    if (bytes < run.dram_bytes) return LessDramError(run, bytes);
  }
  if (!options.run_variable.empty() && options.run_variable != run.run) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("--resume ", run.name, ": its trainings are of run ", run.run,
                                  "; FOREBAY_RUN is ", options.run_variable),
                     "unset FOREBAY_RUN: --resume sets it");
  }
  return absl::OkStatus();
}

void SetDaemon(const KeptRun& run, PrivateDaemonOptions& daemon) {
  daemon.swap = run.paths;
  daemon.is_kept = true;
  daemon.swap_size = absl::StrCat(run.swap_bytes);
  daemon.dram = run.dram;
  daemon.config = run.config;
  daemon.settings = run.settings;
}

absl::StatusOr<KeptRunFile> Resume(const KeepOptions& options, PrivateDaemonOptions& daemon) {
  ASSIGN_OR_RETURN(KeptRunFile file, KeptRunFile::Open(options.state_folder, options.resume));
  KeptRun run = file.run();
  RETURN_IF_ERROR(CheckSame(run, options, daemon));
  if (!daemon.dram.empty()) {
    run.dram = daemon.dram;
    std::erase_if(run.settings,
                  [](const std::string& one) { return one.starts_with("dram.limit="); });
  }
  if (!daemon.config.empty()) run.config = fs::absolute(daemon.config).string();
  run.settings.insert(run.settings.end(), daemon.settings.begin(), daemon.settings.end());
  SetDaemon(run, daemon);
  RETURN_IF_ERROR(file.Save(std::move(run)));
  return file;
}

// Returns the newest committed step of each job, by the job's name.
absl::StatusOr<std::map<std::string, uint64_t>> CommittedSteps(const PrivateDaemon& daemon) {
  ASSIGN_OR_RETURN(const auto admin, client::AdminClient::Connect(AdminOf(daemon)));
  ASSIGN_OR_RETURN(const client::NodeStatus status, admin->Status());
  std::map<std::string, uint64_t> steps;
  for (const auto job : status->getJobs()) steps[job.getName().cStr()] = job.getCommittedStep();
  return steps;
}

// Reads the durable step of each training from the swap volume. nullopt: the volume could not be read, and forebayd has
// printed why.
absl::StatusOr<std::optional<std::vector<KeptTraining>>> DurableTrainings(const KeptRun& run) {
  ASSIGN_OR_RETURN(const std::optional<json> report, Scrub({.swap = run.paths,
                                                            .config = {},
                                                            .rate = {},
                                                            .socket = {},
                                                            .extent = ScrubExtent::kLedger}));
  if (!report.has_value()) return std::nullopt;
  std::vector<KeptTraining> trainings;
  for (const json& job : (*report)["jobs"]) {
    trainings.push_back({.job = job["name"], .step = job["durable_step"]});
  }
  return trainings;
}

// Restarts the daemon if it has ended, and waits until it is ready. Jobs in memory may outlive a daemon that has ended; its
// successor takes them over.
absl::Status MakeReady(PrivateDaemon& daemon, int signal_fd) {
  daemon.HandleMessages();
  if (daemon.process().WaitFor(std::chrono::milliseconds(0)).has_value()) {
    RETURN_IF_ERROR(daemon.StartAgain());
  }
  return daemon.AwaitReady(std::array{signal_fd});
}

// Asks the daemon to end after each job's newest step is durable. Tries again with a restarted daemon if the daemon is
// killed meanwhile. `committed` receives the committed step of each job.
absl::Status StopDurably(PrivateDaemon& daemon, int signal_fd,
                         std::map<std::string, uint64_t>& committed) {
  absl::Status status;
  for (int attempt = 0; attempt < kStopsMax; ++attempt) {
    RETURN_IF_ERROR(MakeReady(daemon, signal_fd));
    auto steps = CommittedSteps(daemon);
    status = steps.status();
    if (steps.ok()) committed = *std::move(steps);
    if (WIFEXITED(daemon.StopDurably(signal_fd)) && status.ok()) return status;
  }
  return status;
}

// Prints the durable step of each training. Returns an error for the first training whose committed step is not durable.
absl::Status ReportSteps(const KeptRun& run, const std::map<std::string, uint64_t>& committed) {
  std::map<std::string, uint64_t> durable;
  for (const KeptTraining& training : run.trainings) durable[training.job] = training.step;
  const std::string places = absl::StrJoin(run.places, ", ");
  absl::Status status;
  for (const auto& [job, step] : durable) {
    std::fprintf(stderr, "training %s stands at step %s, durable on %s\n", job.c_str(),
                 absl::StrCat(step).c_str(), places.c_str());
  }
  for (const auto& [job, step] : committed) {
    const auto found = durable.find(job);
    const bool is_lost = found == durable.end() ? step > 0 : found->second < step;
    if (!is_lost || !status.ok()) continue;
    status = MakeError(
        ErrorId::kSwapIo,
        absl::StrCat("training ", job, " was at step ", step, "; durable on ", places, " is ",
                     found == durable.end() ? "nothing" : absl::StrCat("step ", found->second)),
        "forebayd's message above says why; --resume goes on from what is durable");
  }
  return status;
}

json JsonOfListed(const KeptRun& run, bool is_in_use) {
  json trainings = json::array();
  for (const KeptTraining& training : run.trainings) {
    trainings.push_back({{"job", training.job}, {"step", training.step}});
  }
  return {{"name", run.name},       {"in_use", is_in_use},
          {"trainings", trainings}, {"dram_bytes", run.dram_bytes},
          {"swap", run.places},     {"swap_bytes", run.swap_bytes},
          {"swap_paths", run.paths}};
}

}  // namespace

absl::StatusOr<KeptRunFile> BeginKept(const KeepOptions& options, PrivateDaemonOptions& daemon) {
  RETURN_IF_ERROR(CheckSettings(daemon.settings));
  if (!options.resume.empty()) return Resume(options, daemon);
  ASSIGN_OR_RETURN(std::vector<std::string> places, AbsolutePlaces(daemon.swap));
  ASSIGN_OR_RETURN(const uint64_t swap_bytes, SizeOf("--swap-size", daemon.swap_size));
  const bool has_config = !daemon.config.empty();
  ASSIGN_OR_RETURN(
      KeptRunFile file,
      KeptRunFile::Create(options.state_folder,
                          {.name = options.keep,
                           .places = std::move(places),
                           .paths = {},
                           .swap_bytes = swap_bytes,
                           .dram = daemon.dram,
                           .config = has_config ? fs::absolute(daemon.config).string() : "",
                           .settings = daemon.settings,
                           .run = client::RunToken(options.run_variable)}));
  SetDaemon(file.run(), daemon);
  return file;
}

absl::Status CheckKeptDaemon(KeptRunFile& file, PrivateDaemon& daemon) {
  ASSIGN_OR_RETURN(const auto admin, client::AdminClient::Connect(AdminOf(daemon)));
  ASSIGN_OR_RETURN(const client::NodeStatus status, admin->Status());
  KeptRun run = file.run();
  const uint64_t dram_bytes = status->getMemory().getLimitBytes();
  if (dram_bytes < run.dram_bytes) return LessDramError(run, dram_bytes);
  run.dram_bytes = dram_bytes;
  return file.Save(std::move(run));
}

absl::Status EndKept(KeptRunFile& file, PrivateDaemon& daemon, int signal_fd) {
  std::map<std::string, uint64_t> committed;
  absl::Status status = StopDurably(daemon, signal_fd, committed);
  ASSIGN_OR_RETURN(std::optional<std::vector<KeptTraining>> trainings,
                   DurableTrainings(file.run()));
  if (!trainings.has_value()) {
    return MakeError(ErrorId::kCorrupt,
                     absl::StrCat("kept run ", file.run().name, ": its swap cannot be read"),
                     "forebayd's message is above");
  }
  KeptRun run = file.run();
  run.trainings = *std::move(trainings);
  const absl::Status reported = ReportSteps(run, committed);
  if (status.ok()) status = reported;
  const bool is_empty = run.trainings.empty() && status.ok();
  const std::string name = run.name;
  if (is_empty) {
    std::fprintf(stderr, "no training has begun: nothing is kept as %s\n", name.c_str());
    return file.Remove();
  }
  const absl::Status saved = file.Save(std::move(run));
  std::fprintf(stderr,
               "go on: forebay run --resume %s -- COMMAND; give it up: forebay run --forget %s\n",
               name.c_str(), name.c_str());
  return status.ok() ? saved : status;
}

absl::StatusOr<json> ListKept(const fs::path& state_folder) {
  json runs = json::array();
  for (const std::string& name : KeptRunNames(state_folder)) {
    ASSIGN_OR_RETURN(KeptRun run, ReadKeptRun(state_folder, name));
    const bool is_in_use =
        protocol::IdOf(KeptRunFile::Open(state_folder, name).status()) == ErrorId::kBusy;
    if (!is_in_use) {
      ASSIGN_OR_RETURN(auto trainings, DurableTrainings(run));
      if (trainings.has_value()) run.trainings = *std::move(trainings);
    }
    runs.push_back(JsonOfListed(run, is_in_use));
  }
  return runs;
}

std::string KeptText(const json& runs) {
  if (runs.empty()) return "no runs are kept\n";
  Table table({"NAME", "STATE", "TRAININGS", "DRAM", "SWAP", "PATHS"});
  for (const json& run : runs) {
    std::vector<KeptTraining> trainings;
    for (const json& one : run["trainings"]) {
      trainings.push_back({.job = one["job"], .step = one["step"]});
    }
    const std::vector<std::string> swap = run["swap"];
    table.Add({run["name"], run["in_use"] == true ? "running" : "ended", Describe(trainings),
               FormatBytes(run["dram_bytes"].get<uint64_t>()),
               FormatBytes(swap.size() * run["swap_bytes"].get<uint64_t>()),
               absl::StrJoin(swap, ", ")});
  }
  return table.Text();
}

absl::StatusOr<std::string> ForgetKept(const fs::path& state_folder, const std::string& name) {
  ASSIGN_OR_RETURN(KeptRunFile file, KeptRunFile::Open(state_folder, name));
  const KeptRun run = file.run();
  RETURN_IF_ERROR(file.Remove());
  uint64_t folders = 0;
  std::vector<std::string> devices;
  for (size_t i = 0; i < run.paths.size(); ++i) {
    if (run.paths[i] == run.places[i]) {
      devices.push_back(run.paths[i]);
    } else {
      ++folders;
    }
  }
  std::string text = absl::StrCat(name, " is forgotten: ", Describe(run.trainings), "; ",
                                  FormatBytes(folders * run.swap_bytes), " are free\n");
  if (!devices.empty()) {
    absl::StrAppend(&text, "its trainings stay on ", absl::StrJoin(devices, ", "),
                    " until another daemon takes that with --reclaim\n");
  }
  return text;
}

}  // namespace forebay::tools
