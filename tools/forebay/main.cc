// SPDX-License-Identifier: Apache-2.0
// forebay: the command line tool. Exit codes: 0 good, 1 error, 2 usage, 3 no daemon, 4 not permitted. `run` and `launch`
// return the exit code of their command.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/admin.h"
#include "protocol/error.h"
#include "protocol/json.h"
#include "protocol/os/status_macros.h"
#include "protocol/standard_output.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/doctor.h"
#include "tools/forebay/explain.h"
#include "tools/forebay/keep.h"
#include "tools/forebay/launch.h"
#include "tools/forebay/launch_node.h"
#include "tools/forebay/node_view.h"
#include "tools/forebay/plan.h"
#include "tools/forebay/plan_options.h"
#include "tools/forebay/run.h"
#include "tools/forebay/scrub.h"
#include "tools/forebay/status_all.h"

namespace forebay::tools {
namespace {

using protocol::JsonOf;
using protocol::WriteOutput;

constexpr int kGood = 0;
constexpr int kError = 1;
constexpr int kUsage = 2;
constexpr int kNoDaemon = 3;
constexpr int kNotPermitted = 4;

struct Arguments {
  bool json = false;
  bool perfetto = false;
  bool all_hosts = false;
  std::string socket;
  std::string job;
  std::optional<std::string> delete_job;
  std::vector<std::string> folders = {"."};
  RunOptions run;
  bool kept = false;   // --kept
  std::string forget;  // --forget
  LaunchOptions launch;
  StatusAllOptions status_all;
  PlanOptions plan;
  ScrubOptions scrub;
  ExplainOptions explain;
  BenchOptions bench;
};

int ExitCodeOf(const absl::Status& status) {
  switch (protocol::IdOf(status)) {
    case protocol::ErrorId::kNone:
      return kGood;
    case protocol::ErrorId::kNoDaemon:
    case protocol::ErrorId::kDaemonGone:
      return kNoDaemon;
    case protocol::ErrorId::kPermission:
      return kNotPermitted;
    default:
      return kError;
  }
}

// Prints the error, unless it only says that the reader of the output has closed the pipe. Returns the exit code.
int Exit(const absl::Status& status) {
  if (!status.ok() && !absl::IsCancelled(status)) {
    protocol::PrintError(status);
  }
  return ExitCodeOf(status);
}

absl::Status Show(bool as_json, const std::string& json, const std::string& text) {
  return WriteOutput(as_json ? json + "\n" : text);
}

// Returns `exit_code` if the output was written, otherwise the exit code of the error.
int ExitShown(const absl::Status& shown, int exit_code) {
  return shown.ok() ? exit_code : Exit(shown);
}

using View = std::function<absl::Status(client::AdminClient&)>;

int WithDaemon(const Arguments& arguments, const View& view) {
  const auto admin = client::AdminClient::Connect({.socket = arguments.socket});
  return Exit(admin.ok() ? view(**admin) : admin.status());
}

// Asks the daemon for its status and shows it with `show`. Returns the exit code.
int WithStatus(const Arguments& arguments,
               const std::function<absl::Status(schema::NodeStatus::Reader)>& show) {
  return WithDaemon(arguments, [&](client::AdminClient& admin) -> absl::Status {
    ASSIGN_OR_RETURN(const client::NodeStatus status, admin.Status());
    return show(*status);
  });
}

// Shows the status of all hosts. Returns exit code 3 if a host does not answer.
int ShowAllHosts(const Arguments& arguments) {
  StatusAllOptions options = arguments.status_all;
  options.socket = arguments.socket;
  const auto hosts = AskAllHosts(options);
  if (!hosts.ok()) return Exit(hosts.status());
  const bool all_answer =
      std::ranges::all_of(*hosts, [](const HostStatus& host) { return host.error.empty(); });
  return ExitShown(Show(arguments.json, StatusAllJson(*hosts).dump(2), StatusAllText(*hosts)),
                   all_answer ? kGood : kNoDaemon);
}

int ShowStatus(const Arguments& arguments) {
  if (arguments.all_hosts) return ShowAllHosts(arguments);
  return WithStatus(arguments, [&](schema::NodeStatus::Reader status) {
    return Show(arguments.json, JsonOf(status), StatusText(status));
  });
}

int ShowMemory(const Arguments& arguments) {
  return WithStatus(arguments, [&](schema::NodeStatus::Reader status) {
    return Show(arguments.json, JsonOf(status.getMemory()), MemoryText(status.getMemory()));
  });
}

int ShowSwap(const Arguments& arguments) {
  return WithStatus(arguments, [&](schema::NodeStatus::Reader status) {
    return Show(arguments.json, JsonOf(status.getSwap()), SwapText(status));
  });
}

int ShowJobs(const Arguments& arguments) {
  if (!arguments.delete_job.has_value()) {
    return WithStatus(arguments, [&](schema::NodeStatus::Reader status) {
      return Show(arguments.json, JsonOf(status.getJobs()), JobsText(status));
    });
  }
  return WithDaemon(arguments, [&](client::AdminClient& admin) -> absl::Status {
    RETURN_IF_ERROR(admin.DeleteJob(*arguments.delete_job));
    return Show(arguments.json, nlohmann::json{{"deleted", *arguments.delete_job}}.dump(2), "");
  });
}

int ShowTrace(const Arguments& arguments) {
  return WithDaemon(arguments, [&](client::AdminClient& admin) -> absl::Status {
    ASSIGN_OR_RETURN(const client::Trace trace, admin.Trace(arguments.job));
    if (arguments.perfetto) {
      return WriteOutput(TraceForPerfetto(trace->getEvents()).dump() + "\n");
    }
    return Show(arguments.json, JsonOf(trace->getEvents()), TraceText(trace->getEvents()));
  });
}

int ShowDoctor(const Arguments& arguments) {
  const std::vector<Finding> findings = Examine(arguments.folders);
  const bool failed = std::ranges::any_of(
      findings, [](const Finding& finding) { return finding.result == CheckResult::kFail; });
  return ExitShown(Show(arguments.json, FindingsJson(findings).dump(2), FindingsText(findings)),
                   failed ? kError : kGood);
}

int ShowPlan(const Arguments& arguments) {
  PlanOptions options = arguments.plan;
  options.socket = arguments.socket;
  options.as_json = arguments.json;
  return Exit(Plan(options));
}

int ShowScrub(const Arguments& arguments) {
  ScrubOptions options = arguments.scrub;
  options.socket = arguments.socket;
  const auto report = Scrub(options);
  if (!report.ok()) return Exit(report.status());
  if (!report->has_value()) return kError;
  return ExitShown(Show(arguments.json, (*report)->dump(2), ScrubText(**report)),
                   (**report)["clean"] == true ? kGood : kError);
}

int ShowExplain(const Arguments& arguments) {
  ExplainOptions options = arguments.explain;
  options.as_json = arguments.json;
  const auto text = Explain(options);
  return Exit(text.ok() ? WriteOutput(*text) : text.status());
}

int ShowKept(const Arguments& arguments) {
  const auto runs = ListKept(arguments.run.keep.state_folder);
  if (!runs.ok()) return Exit(runs.status());
  return Exit(Show(arguments.json, runs->dump(2), KeptText(*runs)));
}

int Forget(const Arguments& arguments) {
  const auto text = ForgetKept(arguments.run.keep.state_folder, arguments.forget);
  return Exit(text.ok() ? WriteOutput(*text) : text.status());
}

CLI::App* AddView(CLI::App& app, const char* name, const char* help, Arguments& arguments) {
  CLI::App* view = app.add_subcommand(name, help);
  view->add_flag("--json", arguments.json, "JSON instead of a table");
  return view;
}

CLI::App* AddPlan(CLI::App& app, Arguments& arguments) {
  PlanOptions& plan = arguments.plan;
  CLI::App* command =
      AddView(app, "plan", "what a job takes, or would take, of DRAM and swap", arguments);
  CLI::Option* job = command->add_option("--job", plan.job, "a job of the daemon's, as it is");
  command->add_option("--params", plan.params, "the model: so many parameters in equal layers")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 50));
  AddModelOptions(command, plan);
  command->add_option("--swap-size", plan.swap_size, "and so much swap")
      ->needs(command->get_option("--dram"));
  CLI::Option* ranks =
      command->add_option("--ranks", plan.ranks, "on this node")->check(CLI::Range(1, 1024));
  CLI::Option* shared =
      command->add_flag("--shared", plan.is_shared, "one copy of the weights, without FSDP2");
  CLI::Option* gpu = command->add_flag("--gpu", plan.is_on_gpu, "each rank on a GPU");
  gpu->excludes(shared);
  CLI::Option* accumulate =
      command->add_flag("--accumulate", plan.accumulate, "several backward passes a step");
  CLI::Option* buffers = command->add_option(
      "--buffers", plan.buffers, "so many bytes of persistent buffers: each rank's own copy");
  job->excludes(buffers);
  CLI::Option* durability = command->add_option(
      "--durability", plan.durability, "memory, epoch=N or step; else the daemon's default");
  CLI::Option* compute =
      command
          ->add_option("--compute", plan.compute_s,
                       "seconds of forward and backward a step: the step's time is shown")
          ->check(CLI::Range(0.0, 1e6));
  CLI::Option* nodes = AddClusterOptions(command, plan.cluster);
  for (CLI::Option* other : {job, ranks, shared, gpu, accumulate, buffers, durability, compute}) {
    nodes->excludes(other);
  }
  return command;
}

CLI::App* AddScrub(CLI::App& app, Arguments& arguments) {
  CLI::App* command = AddView(
      app, "scrub",
      "read and verify what durable jobs have on swap: of a daemon that runs, or of a stopped one",
      arguments);
  CLI::Option* swap =
      command
          ->add_option(
              "--swap", arguments.scrub.swap,
              "of a stopped daemon: directories or block devices, in their order: DIR[,DIR...]")
          ->delimiter(',');
  CLI::Option* config = command->add_option("--config", arguments.scrub.config,
                                            "or a stopped daemon's TOML file, which names them");
  swap->excludes(config);
  command->add_option(
      "--rate", arguments.scrub.rate,
      "bytes a second at most, \"500MiB\", of a stopped daemon of each path; else a tenth of what "
      "the paths were measured with, stopped as fast as they are");
  return command;
}

void AddDaemonOptions(CLI::App* app, PrivateDaemonOptions& daemon) {
  app->add_option("--dram", daemon.dram,
                  "memory for everything (2GiB where neither this nor --config is given)");
  CLI::Option* swap = app->add_option("--swap", daemon.swap,
                                      "a directory or block device for swap; may be repeated")
                          ->expected(1)
                          ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app->add_option("--swap-size", daemon.swap_size, "reserved in each (4GiB)")->needs(swap);
}

struct HostOptions {
  std::string& hostfile;
  HostSelection& selection;
  SshOptions& ssh;
};

// Adds the options that name hosts. Returns the option of the hostfile.
CLI::Option* AddHostOptions(CLI::App* app, const HostOptions& options) {
  CLI::Option* hostfile = app->add_option(
      "--hostfile", options.hostfile, "a DeepSpeed hostfile: a line \"worker-1 slots=4\" a host");
  CLI::Option* include = app->add_option("--include", options.selection.include,
                                         "only these hosts and slots: worker-0@worker-1:0,2");
  CLI::Option* exclude =
      app->add_option("--exclude", options.selection.exclude, "all but these hosts and slots");
  include->excludes(exclude);
  std::vector<CLI::Option*> others = {include, exclude};
  others.push_back(app->add_option("--ssh", options.ssh.command,
                                   "ssh with options of its own, \"ssh -F FILE\" (ssh)"));
  others.push_back(app->add_option("--ssh-port", options.ssh.port, "of the hosts' ssh")
                       ->check(CLI::Range(1, 65535)));
  others.push_back(app->add_option("--forebay", options.ssh.program,
                                   "path of forebay on the hosts (the path of this one)"));
  others.push_back(app->add_option_function<int>(
                          "--timeout",
                          [&ssh = options.ssh](int s) { ssh.limit = std::chrono::seconds(s); },
                          "seconds until a host must answer (10)")
                       ->check(CLI::Range(1, 3600)));
  for (CLI::Option* other : others) other->needs(hostfile);
  return hostfile;
}

CLI::App* AddLaunch(CLI::App& app, LaunchOptions& launch) {
  CLI::App* command = app.add_subcommand(
      "launch", "a command on every host of a hostfile: launch --hostfile FILE -- COMMAND");
  AddHostOptions(command, {launch.hostfile, launch.selection, launch.ssh})->required();
  command->add_option("--master-addr", launch.master_addr,
                      "where ranks meet, as torchrun's (the first host's address)");
  command->add_option("--master-port", launch.master_port, "the same (29500)")
      ->check(CLI::Range(1, 65535));
  command->add_option("--chdir", launch.folder, "to work in on each host (this folder)");
  command
      ->add_option("--env", launch.exported,
                   "NAME or NAME=VALUE for each host, beside PATH and what begins with FOREBAY_, "
                   "PYTHON, TORCH_, NCCL_, GLOO_, UCX_, OMP_, MKL_, HF_; may be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  return command;
}

CLI::App* AddRun(CLI::App& app, Arguments& arguments) {
  CLI::App* run =
      app.add_subcommand("run", "a private daemon for one command: run [OPTIONS] -- COMMAND");
  PrivateDaemonOptions& daemon = arguments.run.daemon;
  AddDaemonOptions(run, daemon);
  run->add_option("--config", daemon.config, "a TOML file for the daemon");
  run->add_option("--set", daemon.settings, "KEY=VALUE on top of the file; may be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  run->add_flag("--verbose", daemon.verbose, "show the daemon's log");
  CLI::Option* keep = run->add_option(
      "--keep", arguments.run.keep.keep,
      "a name for the run, whose trainings stay on --swap when it ends, each at its newest step");
  keep->needs(run->get_option("--swap"));
  CLI::Option* resume = run->add_option(
      "--resume", arguments.run.keep.resume,
      "a run that was kept: the command goes on with its trainings; swap, DRAM and settings are "
      "those that it had, --dram may give more");
  CLI::Option* kept = run->add_flag("--kept", arguments.kept, "list the runs that are kept");
  CLI::Option* forget = run->add_option("--forget", arguments.forget,
                                        "a kept run to give up: its swap and its name are free");
  run->add_flag("--json", arguments.json, "of --kept: JSON instead of a table")->needs(kept);
  const std::function<std::string(const std::string&)> refuse_empty = [](const std::string& name) {
    return name.empty() ? "the name is empty" : "";
  };
  for (CLI::Option* named : {keep, resume, forget}) named->check(refuse_empty, "");
  const std::vector<CLI::Option*> exclusive = {keep, resume, kept, forget};
  for (CLI::Option* one : exclusive) {
    for (CLI::Option* other : exclusive) {
      if (one != other) one->excludes(other);
    }
  }
  return run;
}

// The command follows "--"; its own options are not parsed.
std::vector<std::string> ParseRunCommand(std::vector<std::string>& words) {
  const auto dashes = std::find(words.begin(), words.end(), "--");
  if (dashes == words.end()) return {};
  std::vector<std::string> command(dashes + 1, words.end());
  words.erase(dashes, words.end());
  return command;
}

struct Environment {
  std::filesystem::path state_folder;        // the user's; empty: the user has none
  std::string run;                           // FOREBAY_RUN
  std::vector<std::string> runtime_folders;  // XDG_RUNTIME_DIR, TMPDIR
  std::string cpu_target;                    // FOREBAY_CPU_TARGET
  std::vector<std::string> variables;        // the whole environment
};

int Main(std::vector<std::string> words, const Environment& environment) {
  Arguments arguments;
  arguments.run.daemon.runtime_folders = environment.runtime_folders;
  arguments.run.keep.state_folder = environment.state_folder;
  arguments.run.keep.run_variable = environment.run;
  arguments.bench.runtime_folders = environment.runtime_folders;
  arguments.run.command = ParseRunCommand(words);
  arguments.launch.command = arguments.run.command;
  arguments.launch.environment = environment.variables;
  CLI::App app("Forebay: optimizer states of training jobs in DRAM and on NVMe", "forebay");
  app.set_version_flag("--version", absl::StrCat("forebay ", FOREBAY_VERSION));
  app.require_subcommand(1);
  const std::string first = words.empty() ? "" : words.front();
  app.failure_message([&first](const CLI::App* failed, const CLI::Error& error) {
    const bool unknown = failed->get_subcommands().empty() && !first.empty() && first[0] != '-';
    return protocol::FormatError(protocol::MakeError(
               protocol::ErrorId::kOption,
               unknown ? absl::StrCat("there is no command ", first) : error.what(),
               "forebay --help lists the commands, forebay COMMAND --help its options; the "
               "command that run or launch starts follows --")) +
           "\n";
  });

  CLI::App* run = AddRun(app, arguments);
  CLI::App* launch = AddLaunch(app, arguments.launch);
  CLI::App* launch_node = app.add_subcommand(std::string(kNodeCommand))->group("");  // hidden
  CLI::App* status = AddView(app, "status", "the node at a glance", arguments);
  CLI::Option* all = status->add_flag("--all", arguments.all_hosts, "of every host of --hostfile");
  all->needs(AddHostOptions(status, {arguments.status_all.hostfile, arguments.status_all.selection,
                                     arguments.status_all.ssh})
                 ->needs(all));
  CLI::App* memory = AddView(app, "mem", "every arena, as the kernel counts it", arguments);
  CLI::App* swap = AddView(app, "swap", "every swap path and its traffic", arguments);
  CLI::App* jobs = AddView(app, "jobs", "every job", arguments);
  jobs->add_option("--delete", arguments.delete_job, "free the memory and swap of this job");
  CLI::App* trace = AddView(app, "trace", "timed events of a job's newest step", arguments);
  trace->add_option("JOB", arguments.job)->required();
  trace->add_flag("--perfetto", arguments.perfetto, "as JSON for https://ui.perfetto.dev");
  CLI::App* plan = AddPlan(app, arguments);
  CLI::App* scrub = AddScrub(app, arguments);
  for (CLI::App* view : {status, memory, swap, jobs, trace, plan, scrub}) {
    view->add_option("--socket", arguments.socket,
                     "of the daemon; else FOREBAY_SOCKET, else /run/forebay/forebay.sock");
  }
  CLI::App* explain =
      AddView(app, "explain", "what an error means and what to do about it", arguments);
  explain->add_option("ID", arguments.explain.id, "E_..., as the error has it; else all of them");
  CLI::App* doctor = AddView(app, "doctor", "what this machine gives Forebay", arguments);
  doctor->add_option("FOLDER", arguments.folders, "candidates for swap");
  CLI::App* bench =
      AddView(app, "bench", "measure against this machine's limits, in the same run", arguments);
  const std::vector<NamedBench> benches = UserBenches();
  AddBenchOptions(*bench, benches, arguments.bench);

  std::reverse(words.begin(), words.end());  // CLI11 takes words in reverse order
  try {
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0 &&
        IsLabBench(arguments.bench.what)) {  // forebay-bench has other options
      return Exit(LabBenchError(arguments.bench.what));
    }
    std::ostringstream text;
    const int code = app.exit(error, text, std::cerr) == 0 ? kGood : kUsage;
    return ExitShown(WriteOutput(text.str()), code);
  }
  if (const absl::Status forced = ForceCpuTarget(environment.cpu_target); !forced.ok()) {
    return Exit(forced);
  }
  if (run->parsed()) {
    if (arguments.kept) return ShowKept(arguments);
    if (!arguments.forget.empty()) return Forget(arguments);
    if (arguments.run.command.empty()) {
      std::fprintf(stderr, "usage: forebay run [OPTIONS] -- COMMAND [ARGUMENT]...\n");
      return kUsage;
    }
    PrivateDaemonOptions& daemon = arguments.run.daemon;
    const bool is_new = arguments.run.keep.resume.empty();
    if (is_new && daemon.dram.empty() && daemon.config.empty()) daemon.dram = "2GiB";
    if (is_new && daemon.swap_size.empty()) daemon.swap_size = "4GiB";
    return Run(arguments.run);
  }
  if (launch->parsed()) {
    if (!arguments.launch.command.empty()) return Launch(arguments.launch);
    std::fprintf(stderr,
                 "usage: forebay launch --hostfile FILE [OPTIONS] -- COMMAND [ARGUMENT]...\n");
    return kUsage;
  }
  if (launch_node->parsed()) return LaunchNode();
  if (status->parsed()) return ShowStatus(arguments);
  if (memory->parsed()) return ShowMemory(arguments);
  if (swap->parsed()) return ShowSwap(arguments);
  if (jobs->parsed()) return ShowJobs(arguments);
  if (trace->parsed()) return ShowTrace(arguments);
  if (plan->parsed()) return ShowPlan(arguments);
  if (scrub->parsed()) return ShowScrub(arguments);
  if (doctor->parsed()) return ShowDoctor(arguments);
  if (explain->parsed()) return ShowExplain(arguments);
  return Exit(RunBench(benches, arguments.bench, arguments.json));
}

}  // namespace
}  // namespace forebay::tools

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  const std::string state_home = variable("XDG_STATE_HOME");
  const std::string home = variable("HOME");
  std::filesystem::path state_folder;
  if (state_home.starts_with('/')) {
    state_folder = std::filesystem::path(state_home) / "forebay";
  } else if (home.starts_with('/')) {
    state_folder = std::filesystem::path(home) / ".local/state/forebay";
  }
  forebay::tools::Environment environment{
      .state_folder = state_folder,
      .run = variable("FOREBAY_RUN"),
      .runtime_folders = {variable("XDG_RUNTIME_DIR"), variable("TMPDIR")},
      .cpu_target = variable("FOREBAY_CPU_TARGET"),
      .variables = {}};
  for (char** entry = environ; *entry != nullptr; ++entry) environment.variables.push_back(*entry);
  return forebay::tools::Main(std::move(words), environment);
}
