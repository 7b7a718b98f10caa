// SPDX-License-Identifier: Apache-2.0
#include "daemon/daemon.h"

#include <grp.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cpu_adam/targets.h"
#include "daemon/control/control_plane.h"
#include "daemon/core/node/killed_jobs.h"
#include "daemon/exec/block_tasks.h"
#include "daemon/exec/executor.h"
#include "daemon/exec/offline_scrub.h"
#include "daemon/exec/path_rates.h"
#include "daemon/exec/path_wear.h"
#include "daemon/exec/reactor.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"
#include "daemon/instance_lock.h"
#include "daemon/swap_settings.h"
#include "nvme/find_volume.h"
#include "nvme/io/engine_factory.h"
#include "nvme/io/rate_limited_engine.h"
#include "pinned_mem/memory_limit.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/mutex.h"
#include "protocol/os/pidfd.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// Time limit of a probe of all swap paths. A request that takes much longer than those before it ends after the limit.
constexpr std::chrono::seconds kProbeLimit(8);
// Time limit of the ledger by which the next daemon finds the volume of jobs that have stopped.
constexpr std::chrono::seconds kLedgerLimit(5);

// Raises soft limits to the hard ones, which are the service manager's to set. Returns how many
// descriptors the daemon may have.
uint64_t RaiseLimits() {
  uint64_t descriptors = 0;
  for (const auto resource : {RLIMIT_NOFILE, RLIMIT_MEMLOCK}) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) != 0) continue;
    const rlim_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
    if (::setrlimit(resource, &limit) != 0) limit.rlim_cur = before;
    if (resource == RLIMIT_NOFILE) descriptors = limit.rlim_cur;
  }
  return descriptors;
}

// Warns if locked memory is optional and this process may lock fewer bytes than the limit.
void SayWhatIsNotPinned(const Config& config, uint64_t dram_limit_bytes) {
  if (config.lock == pinned_mem::LockPolicy::kRequired || pinned_mem::MayLock(dram_limit_bytes)) {
    return;
  }
  rlimit limit{};
  (void)::getrlimit(RLIMIT_MEMLOCK, &limit);
  spdlog::warn(
      "memory is not pinned: RLIMIT_MEMLOCK (ulimit -l) is {}, below the {} that jobs may take. "
      "Results are the same; where the machine runs short of memory its kernel may move what "
      "Forebay holds to its own swap, and steps wait for it. To pin it add the line "
      "\"* - memlock unlimited\" to /etc/security/limits.conf and log in again",
      protocol::FormatBytes(limit.rlim_cur), protocol::FormatBytes(dram_limit_bytes));
}

// Returns the configured limit, or half of the memory that the control group or the machine has.
//
// Errors  E_CONFIG  above either: the kernel would end the daemon.
absl::StatusOr<uint64_t> DramLimit(uint64_t configured_bytes,
                                   const pinned_mem::CgroupMemory& cgroup) {
  const uint64_t machine_bytes = pinned_mem::MachineBytes();
  if (configured_bytes == 0) return std::min(machine_bytes, cgroup.limit_bytes) / 2;
  if (configured_bytes > machine_bytes) {
    return MakeError(ErrorId::kConfig,
                     absl::StrCat("dram.limit is ", protocol::FormatBytes(configured_bytes),
                                  ", but this machine has ", protocol::FormatBytes(machine_bytes)),
                     "lower dram.limit, or leave it out for half of the memory");
  }
  if (configured_bytes <= cgroup.limit_bytes) return configured_bytes;
  return MakeError(
      ErrorId::kConfig,
      absl::StrCat("dram.limit is ", protocol::FormatBytes(configured_bytes),
                   ", but the control group of the daemon allows ",
                   protocol::FormatBytes(cgroup.limit_bytes), " (", cgroup.limit_file, ")"),
      "lower dram.limit, or raise the limit of the control group (MemoryMax= in the unit)");
}

// Returns the number of a group from its name or number; nullopt for "".
absl::StatusOr<std::optional<gid_t>> GroupOf(const std::string& name) {
  uint32_t number = 0;
  if (name.empty()) return std::nullopt;
  if (absl::SimpleAtoi(name, &number)) return number;
  std::vector<char> room(64 << 10);
  group entry{};
  group* found = nullptr;
  (void)::getgrnam_r(name.c_str(), &entry, room.data(), room.size(), &found);
  if (found != nullptr) return found->gr_gid;
  return MakeError(ErrorId::kConfig, absl::StrCat("socket.operators: there is no group ", name),
                   "name an existing group, or leave the key out");
}

absl::StatusOr<std::unique_ptr<TaskRunner>> MakeRunner(const Config& config) {
  auto runner = TaskRunner::Create({.update = {.threads = static_cast<int>(config.workers),
                                               .numa_node = config.update_numa_node,
                                               .cpus = config.update_cpus,
                                               .nice = config.update_nice}});
  if (runner.ok() || protocol::IdOf(runner.status()) != ErrorId::kOption) return runner;
  // The number of workers and the nice value were checked before.
  const char* key = config.update_cpus.empty() ? "update.numa_node" : "update.cpus";
  return MakeError(ErrorId::kConfig,
                   absl::StrCat(key, ": ", std::string(runner.status().message())),
                   "name CPUs that the daemon may run on, or leave the key out");
}

// Parts of a daemon that are created before the socket and the swap paths are touched.
struct Prepared {
  std::optional<gid_t> operators;
  uint32_t connections_per_uid_max;
  std::unique_ptr<nvme::IoEngine> engine;
  std::unique_ptr<TaskRunner> runner;
  ExecutorOptions executor;
  std::optional<SwapSpaceOptions> swap;
};

// A job that becomes durable when the daemon stops gets the swap of a job that is durable now and then.
protocol::Durability LeastDurability(const Config& config) {
  if (!config.durable_at_stop) return {};
  return {.level = protocol::DurabilityLevel::kEpoch, .steps = protocol::Durability::kStepsMax};
}

absl::Status PrepareSwap(const Config& config, Prepared& prepared) {
  NodeOptions& node = prepared.executor.state;
  const bool is_memory = config.durability.level == protocol::DurabilityLevel::kMemory;
  node.durability = is_memory ? LeastDurability(config) : config.durability;
  node.not_durable = WhyNotDurable(config);
  if (node.durability.level != protocol::DurabilityLevel::kMemory) {
    RETURN_IF_ERROR(node.not_durable);
  }
  if (config.swap_paths.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(prepared.swap, SwapOptions(config, prepared.executor.arenas, node.workers));
  node.staging_slots = prepared.swap->staging_slots;
  node.staging_slot_bytes = prepared.swap->staging_slot_bytes;
  node.node_bytes += SwapSpace::StagingBytes(*prepared.swap);
  return absl::OkStatus();
}

std::vector<uint64_t> WrittenBefore(const SwapSpaceOptions& options) {
  std::vector<uint64_t> bytes;
  for (size_t i = 0; i < options.paths.size(); ++i) {
    bytes.push_back(LoadWrittenBytes(options.paths[i].path, options.state_folder));
  }
  return bytes;
}

// Errors  E_DRAM_LIMIT  what the daemon takes without any job is above the limit.
absl::Status CheckNodeBytes(const NodeOptions& node, uint64_t private_bytes) {
  if (node.node_bytes <= node.dram_limit_bytes) return absl::OkStatus();
  const uint64_t staging_bytes = node.node_bytes - private_bytes;
  const std::string staging =
      staging_bytes == 0
          ? ""
          : absl::StrCat(" and staging for swap ", protocol::FormatBytes(staging_bytes));
  return MakeError(
      ErrorId::kDramLimit,
      absl::StrCat("the daemon's private memory takes ", protocol::FormatBytes(private_bytes),
                   staging, " of a limit of ", protocol::FormatBytes(node.dram_limit_bytes)),
      staging.empty() ? "raise dram.limit"
                      : "raise dram.limit, or lower swap.staging or update.block_elems");
}

absl::StatusOr<std::string> MakeIdentity() {
  std::string bytes(16, '\0');
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return MakeError(ErrorId::kInternal, protocol::ErrnoText("getrandom", errno));
  }
  return absl::BytesToHexString(bytes);
}

absl::Status CheckHasSwap(const Config& config) {
  if (!config.swap_paths.empty()) return absl::OkStatus();
  return MakeError(ErrorId::kConfig, "there are no swap paths to scrub",
                   "name them with swap.paths, or the configuration with --config");
}

absl::Status CheckPidfds(PidfdPolicy policy) {
  if (protocol::OpenPidfd(::getpid()).valid() || errno != ENOSYS) return absl::OkStatus();
  const std::string what = protocol::ErrnoText("pidfd_open", ENOSYS);
  if (policy == PidfdPolicy::kBestEffort) {
    spdlog::warn("{}: a client that ends is noticed when its socket is closed", what);
    return absl::OkStatus();
  }
  return MakeError(ErrorId::kUnsupported,
                   absl::StrCat("this kernel does not tell when a client's process ends: ", what),
                   "use Linux 5.3 or newer without a filter of system calls");
}

absl::StatusOr<nvme::ChosenEngine> MakeEngine(const Config& config) {
  ASSIGN_OR_RETURN(nvme::ChosenEngine chosen, nvme::CreateIoEngine({.choice = config.io_engine}));
  if (!config.swap_limit_rate.empty()) {
    chosen.engine =
        std::make_unique<nvme::RateLimitedEngine>(std::move(chosen.engine), config.swap_limit_rate);
  }
  return chosen;
}

absl::StatusOr<Prepared> Prepare(const Config& config) {
  RETURN_IF_ERROR(CheckConfig(config));
  RETURN_IF_ERROR(CheckPidfds(config.pidfd));
  RETURN_IF_ERROR(cpu_adam::ForceTarget(config.update_target));
  Prepared prepared;
  prepared.connections_per_uid_max = ConnectionsPerUidMax(RaiseLimits());
  ASSIGN_OR_RETURN(const uint64_t dram_limit_bytes,
                   DramLimit(config.dram_limit_bytes, pinned_mem::ReadCgroupMemory()));
  ASSIGN_OR_RETURN(prepared.operators, GroupOf(config.socket_operators));
  ASSIGN_OR_RETURN(nvme::ChosenEngine chosen, MakeEngine(config));
  prepared.engine = std::move(chosen.engine);
  ASSIGN_OR_RETURN(prepared.runner, MakeRunner(config));
  ASSIGN_OR_RETURN(pinned_mem::NumaTopology topology, pinned_mem::LoadNumaTopology());
  prepared.executor = {.state = {.dram_limit_bytes = dram_limit_bytes,
                                 .block_elems = config.block_elems,
                                 .workers = prepared.runner->workers(),
                                 .job_percent = config.dram_job_percent,
                                 .uid_dram_bytes = config.dram_uid_bytes,
                                 .uid_swap_bytes = config.swap_uid_bytes},
                       .arenas = {.lock = config.lock,
                                  .topology = std::move(topology),
                                  .workers = prepared.runner->worker_groups()},
                       .reader_lease_max = config.reader_lease_max,
                       .io_engine_reason = chosen.reason};
  NodeOptions& node = prepared.executor.state;
  const uint64_t private_bytes = PrivateBytes(node.workers);
  node.node_bytes = private_bytes;
  RETURN_IF_ERROR(PrepareSwap(config, prepared));
  RETURN_IF_ERROR(CheckNodeBytes(node, private_bytes));
  return prepared;
}

// The kernel may still read and write the memory of requests in flight, so the memory is retained until the process ends.
void AbandonSwap(std::unique_ptr<SwapSpace> swap, std::unique_ptr<nvme::IoEngine> engine) {
  struct Abandoned {
    std::unique_ptr<SwapSpace> swap;
    std::unique_ptr<nvme::IoEngine> engine;
  };
  // The vector is never destroyed.
  static auto* const abandoned = std::make_unique<std::vector<Abandoned>>().release();
  abandoned->push_back({.swap = std::move(swap), .engine = std::move(engine)});
}

}  // namespace

// Numbers of the newest probe that MadeProgress() sent and that each thread took.
struct Probe {
  uint64_t sent = 0;
  std::atomic<uint64_t> loop = 0;
  std::atomic<uint64_t> control = 0;
};

// State of the daemon. Members are declared in the order in which they are created.
struct Daemon::State {
  Config config;
  std::unique_ptr<InstanceLock> lock;
  std::unique_ptr<ListeningSocket> socket;
  protocol::UniqueFd failure;
  std::unique_ptr<nvme::IoEngine> engine;
  std::unique_ptr<SwapSpace> swap;
  std::unique_ptr<LoopInbox> inbox;
  std::unique_ptr<ControlQueue> replies;
  std::unique_ptr<TaskRunner> runner;
  std::unique_ptr<Executor> executor;
  const std::shared_ptr<Probe> probe = std::make_shared<Probe>();
  bool stopping = false;  // used by the loop thread
  std::thread loop;
  std::unique_ptr<ControlPlane> control;
};

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const Config& config, DescriptorsByName left,
                                                      Forget forget, DescriptorStore store) {
  ASSIGN_OR_RETURN(Prepared prepared, Prepare(config));
  ExecutorOptions& options = prepared.executor;
  ASSIGN_OR_RETURN(std::vector<RecordedJob> recorded, ReadRecords(left));
  LeftStaging staging;
  const bool has_slots = std::ranges::any_of(
      recorded, [](const RecordedJob& one) { return !one.job.AllSlots().empty(); });
  auto state = std::make_unique<State>();
  state->config = config;
  state->config.dram_limit_bytes = options.state.dram_limit_bytes;
  state->config.workers = options.state.workers;
  SayWhatIsNotPinned(config, options.state.dram_limit_bytes);
  ASSIGN_OR_RETURN(state->lock, InstanceLock::Acquire(config.socket_path));
  ASSIGN_OR_RETURN(std::string identity, MakeIdentity());
  ASSIGN_OR_RETURN(state->failure, protocol::MakeDoorbell());
  state->engine = std::move(prepared.engine);
  state->runner = std::move(prepared.runner);
  if (prepared.swap.has_value()) {
    const bool may_probe = config.swap_probe && config.swap_life == nvme::FileLife::kKept;
    prepared.swap->rates = RatesOf(*prepared.swap, {.choice = config.io_engine},
                                   may_probe ? kProbeLimit : std::chrono::seconds(0));
    if (config.swap_life == nvme::FileLife::kKept) {
      prepared.swap->written_before = WrittenBefore(*prepared.swap);
    }
    prepared.swap->keeps_slots = has_slots;
    ASSIGN_OR_RETURN(state->swap, SwapSpace::Open(*prepared.swap, *state->engine));
    staging = FindStaging(prepared.swap->staging_slot_bytes, left);
    options.state.swap = state->swap->free_slots();
    options.state.swap_rates = prepared.swap->rates;
    options.state.ledger_bytes_max = state->swap->ledger_bytes_max();
    options.state.recovered = state->swap->recovered();
    ReserveBefore(options.state);
    if (const std::string jobs = DescribeJobs(options.state.recovered); !jobs.empty()) {
      spdlog::info("swap: recovered {}", jobs);
    }
    if (const std::string& adopted = state->swap->adopted(); !adopted.empty()) {
      spdlog::warn("swap: adopted: {}; from now on the volume belongs here", adopted);
    }
  }
  options.state.loses_swap = config.swap_life == nvme::FileLife::kUnlinked;
  if (config.swap_mode != nvme::OpenMode::kReclaim) {
    RETURN_IF_ERROR(CheckVolume(recorded, state->swap.get()));
  }
  std::vector<AdoptedJob> adopted = AdoptJobs(std::move(recorded), state->swap.get(), staging,
                                              options.arenas, left, options.state);
  options.state.keeps_jobs = store.keep != nullptr;
  ASSIGN_OR_RETURN(state->inbox, LoopInbox::Create(kInboxCapacity));
  ASSIGN_OR_RETURN(state->replies, ControlQueue::Create(kControlQueueCapacity));
  state->executor = std::make_unique<Executor>(
      options, *state->engine, *state->runner, state->swap.get(),
      LeftBefore{.store = std::move(store), .jobs = std::move(adopted), .staging = staging.name});
  ASSIGN_OR_RETURN(state->socket, ListeningSocket::Create(config.socket_path, config.socket_mode));
  if (forget) RETURN_IF_ERROR(forget(state->executor->StoredNames()));
  // The loop thread resumes updates because that may start I/O. No client can have asked for anything before.
  FOREBAY_CHECK(state->inbox->Push([](Executor& executor) { executor.Start(); }));
  std::unique_ptr<Daemon> daemon(new Daemon(std::move(state)));  // after this line Stop() cleans up
  State& made = *daemon->state_;
  made.loop = std::thread([&made] {
    (void)::pthread_setname_np(::pthread_self(), "forebay-loop");
    const absl::Status status =
        Reactor(*made.engine, *made.executor, *made.runner, *made.inbox).Run(made.stopping);
    if (status.ok()) return;
    spdlog::critical("{}", protocol::FormatError(status));
    protocol::RingDoorbell(made.failure.get());
  });
  ASSIGN_OR_RETURN(
      made.control,
      ControlPlane::Create(
          {.listener = std::move(made.socket->fd()),
           .served_at = {.socket_path = config.socket_path, .identity = std::move(identity)},
           .operators = prepared.operators,
           .connections_per_uid_max = prepared.connections_per_uid_max,
           .serves_without_pidfds = config.pidfd == PidfdPolicy::kBestEffort,
           .least_durability = LeastDurability(config)},
          *made.inbox, *made.replies));
  return daemon;
}

absl::Status Daemon::Check(const Config& config) { return Prepare(config).status(); }

absl::StatusOr<std::string> Daemon::DurableJobs(const Config& config) {
  RETURN_IF_ERROR(CheckConfig(config));
  ASSIGN_OR_RETURN(const DurableNode node, FindDurableJobs(SwapPathsOf(config)));
  return DescribeJobs(node);
}

absl::StatusOr<ScrubReport> Daemon::Scrub(const Config& config) {
  RETURN_IF_ERROR(CheckHasSwap(config));
  ASSIGN_OR_RETURN(const nvme::ChosenEngine chosen, MakeEngine(config));
  return ScrubPaths(SwapPathsOf(config), *chosen.engine);
}

absl::StatusOr<ScrubReport> Daemon::ListJobs(const Config& config) {
  RETURN_IF_ERROR(CheckHasSwap(config));
  ASSIGN_OR_RETURN(const std::vector<nvme::PathOptions> paths,
                   nvme::WithSizes(SwapPathsOf(config)));
  ASSIGN_OR_RETURN(const DurableNode node, FindDurableJobs(paths));
  ScrubReport report;
  for (const auto& job : node.jobs) report.jobs.push_back({.job = job, .damaged = {}});
  return report;
}

Daemon::Daemon(std::unique_ptr<State> state) : state_(std::move(state)) {}

Daemon::~Daemon() { Stop(); }

absl::Status Daemon::StopJobs(FlushStore flush, std::chrono::seconds limit,
                              absl::AnyInvocable<bool()> on_wait) {
  struct Outcome {
    protocol::Mutex mutex;
    std::condition_variable_any arrived;
    std::optional<absl::Status> status;
  };
  const auto outcome = std::make_shared<Outcome>();
  FOREBAY_CHECK(
      state_->inbox->Push([flush = std::move(flush), outcome](Executor& executor) mutable {
        executor.StopJobs(std::move(flush), [outcome](const absl::Status& status) {
          const std::lock_guard<protocol::Mutex> lock(outcome->mutex);
          outcome->status = status;
          outcome->arrived.notify_all();
        });
      }));
  auto end = std::chrono::steady_clock::now() + limit;
  std::unique_lock<protocol::Mutex> lock(outcome->mutex);
  for (bool is_due = false; !outcome->status;) {
    outcome->arrived.wait_for(lock, std::chrono::seconds(1));
    const bool may_wait = on_wait() && std::chrono::steady_clock::now() < end;
    if (outcome->status || may_wait) continue;
    if (is_due) {
      return MakeError(ErrorId::kTimeout, "the ledger on swap is not durable yet");
    }
    is_due = true;
    end = std::chrono::steady_clock::now() + kLedgerLimit;
    FOREBAY_CHECK(state_->inbox->Push([](Executor& executor) { executor.StopDue(); }));
  }
  return *outcome->status;
}

void Daemon::Stop() {
  if (!state_->loop.joinable()) return;
  state_->control.reset();  // accepts no further calls, and ends every session
  state_->socket.reset();
  FOREBAY_CHECK(state_->inbox->Push([&stopping = state_->stopping](Executor& executor) {
    stopping = true;
    executor.EndDisconnected(UINT64_MAX);
  }));
  state_->loop.join();
  // Ends the work in flight before the memory that it uses.
  state_->runner.reset();
  state_->executor.reset();
  if (state_->swap != nullptr && state_->swap->in_flight() > 0) {
    spdlog::error("the disk has not answered {} requests: ending without them",
                  state_->swap->in_flight());
    AbandonSwap(std::move(state_->swap), std::move(state_->engine));
  }
  if (state_->swap != nullptr && state_->swap->keeps_wear()) {
    SaveWear(state_->swap->wear(), state_->swap->state_folder());
  }
  state_->swap.reset();
  state_->engine.reset();
  state_->lock.reset();
}

bool Daemon::MadeProgress() {
  const std::shared_ptr<Probe> probe = state_->probe;
  if (probe->loop != probe->sent || probe->control != probe->sent) return false;
  const uint64_t next = probe->sent + 1;
  if (!state_->inbox->Push([probe, next](Executor&) { probe->loop = next; })) return false;
  FOREBAY_CHECK(state_->replies->Push([probe, next](ControlContext&) { probe->control = next; }));
  probe->sent = next;
  return true;
}

int Daemon::failure_fd() const { return state_->failure.get(); }

const Config& Daemon::config() const { return state_->config; }

}  // namespace forebay::daemon
