// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/cluster_daemon.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "protocol/units.h"
#include "tools/forebay/cluster_model.h"

namespace forebay::tools {
namespace {

constexpr uint64_t kPlenty = uint64_t{1} << 56;  // bytes
constexpr uint64_t kDaemonBytes = 4 * protocol::kMiB;
constexpr uint64_t kStagingSlotsMin = 3;

Transfer TransferOf(const daemon::Action& action) {
  if (const auto* read = std::get_if<daemon::ReadBlock>(&action)) {
    return {.read = read->place.slot ? read->bytes : 0};
  }
  if (const auto* write = std::get_if<daemon::WriteBlock>(&action))
    return {.written = write->bytes};
  if (const auto* load = std::get_if<daemon::LoadWeights>(&action)) return {.read = load->bytes};
  if (const auto* load = std::get_if<daemon::LoadSums>(&action)) return {.read = load->bytes};
  if (const auto* spill = std::get_if<daemon::SpillSums>(&action)) return {.written = spill->bytes};
  if (const auto* evict = std::get_if<daemon::EvictBlock>(&action))
    return {.written = evict->bytes};
  if (const auto* promote = std::get_if<daemon::PromoteBlock>(&action)) {
    return {.read = promote->place.slot ? promote->bytes : 0};
  }
  return {};
}

daemon::NodeOptions OptionsOf(const VirtualNodeOptions& options) {
  daemon::NodeOptions node{.dram_limit_bytes = kPlenty,
                           .node_bytes = kDaemonBytes,
                           .block_elems = options.block_elems,
                           .workers = options.workers};
  if (options.dram_bytes == 0) return node;
  // Staging slots like the daemon's default: two for each worker plus four. A slot has room for a block of any usual format.
  const uint64_t slot_bytes = 12 * options.block_elems;
  const uint64_t slots =
      options.staging_bytes == 0 ? 2 * options.workers + 4 : options.staging_bytes / slot_bytes;
  node.dram_limit_bytes = options.dram_bytes;
  node.staging_slots = static_cast<uint32_t>(std::max(slots, kStagingSlotsMin));
  node.staging_slot_bytes = slot_bytes;
  node.node_bytes += node.staging_slots * slot_bytes;
  const std::vector<nvme::PathSpace> paths = {{.begin_bytes = 0, .end_bytes = kPlenty}};
  node.swap = nvme::SlotMap(paths);
  return node;
}

}  // namespace

VirtualDaemon::VirtualDaemon(const VirtualNodeOptions& options, VirtualClock& clock)
    : options_(options), clock_(clock), state_(OptionsOf(options)), workers_(options.workers) {}

void VirtualDaemon::Send(daemon::Event event) {
  events_.push_back(std::move(event));
  if (is_handling_) return;
  is_handling_ = true;
  while (!events_.empty()) {
    const daemon::Event next = std::move(events_.front());
    events_.pop_front();
    ++handled_;
    std::vector<daemon::Action> actions;
    state_.Handle(next, actions);
    for (const daemon::Action& action : actions) Execute(action);
  }
  is_handling_ = false;
}

void VirtualDaemon::Call(uint64_t session, protocol::Command command, OnAnswer on_answer) {
  command.tag = ++last_tag_;
  answers_.emplace(command.tag, std::move(on_answer));
  Send(daemon::CommandArrived{.session = session, .command = command});
}

void VirtualDaemon::CallStep(uint64_t session, protocol::Command command,
                             daemon::StepRequestCopied copied, OnAnswer on_answer) {
  copied.session = session;
  copied.tag = last_tag_ + 1;
  step_requests_.emplace(copied.tag, std::move(copied));
  Call(session, command, std::move(on_answer));
}

const daemon::AnswerAttach* VirtualDaemon::attached(uint64_t session) const {
  const auto found = attached_.find(session);
  return found == attached_.end() ? nullptr : &found->second;
}

void VirtualDaemon::Execute(const daemon::Action& action) {
  if (const auto* copy = std::get_if<daemon::CopyStepRequest>(&action)) {
    auto request = step_requests_.extract(copy->tag);
    events_.push_front(std::move(request.mapped()));
  } else if (const auto* attach = std::get_if<daemon::AnswerAttach>(&action)) {
    attached_.insert_or_assign(attach->session, *attach);
  } else if (const auto* answer = std::get_if<daemon::AnswerCommand>(&action)) {
    if (status_.ok()) status_ = answer->status;
    auto called = answers_.extract(answer->completion.tag);
    called.mapped()(answer->completion);
  } else {
    std::visit(
        [&](const auto& a) {
          if constexpr (requires { a.task; }) Begin(action, a.task);
        },
        static_cast<const daemon::Action::variant&>(action));
  }
}

void VirtualDaemon::Begin(const daemon::Action& action, daemon::TaskId task) {
  daemon::TaskDone done{.task = task, .status = absl::OkStatus()};
  done.weights_digests = digests_;
  double end = clock_.now();
  const Transfer transfer = TransferOf(action);
  if (!takes_time_) {
  } else if (transfer.read + transfer.written > 0) {
    const double seconds =
        TransferSeconds(static_cast<double>(transfer.read), options_.read_rate) +
        TransferSeconds(static_cast<double>(transfer.written), options_.write_rate);
    moved_.read += transfer.read;
    moved_.written += transfer.written;
    end = disk_.Serve(clock_.now(), seconds);
    done.begin_ns = static_cast<uint64_t>((end - seconds) * 1e9) + 1;
    done.end_ns = std::max(static_cast<uint64_t>(end * 1e9), done.begin_ns) + 1;
  } else {
    Server& worker = *std::ranges::min_element(workers_, {}, &Server::free_at);
    end = worker.Serve(clock_.now(), WorkSeconds(action));
  }
  clock_.At(end, [this, done] { Send(done); });
}

// Seconds that one worker takes for an action. Each worker has an equal share of the DRAM's rate.
double VirtualDaemon::WorkSeconds(const daemon::Action& action) const {
  uint64_t bytes = 0;
  double update_bytes = 0;
  if (const auto* update = std::get_if<daemon::UpdateBlock>(&action)) {
    for (const auto& segment : update->segments) {
      update_bytes += static_cast<double>(segment.elems) * options_.update_bytes_per_param;
    }
  } else if (const auto* add = std::get_if<daemon::AddGradients>(&action)) {
    bytes = add->elems * (add->sources.size() * protocol::SizeBytes(add->dtype) +
                          (add->assign ? 1 : 2) * protocol::SizeBytes(add->sum_dtype));
  } else if (const auto* install = std::get_if<daemon::InstallWeights>(&action)) {
    for (const daemon::BytesCopy& copy : install->copies) bytes += 2 * copy.size_bytes;
  }
  return TransferSeconds((static_cast<double>(bytes) + update_bytes) * options_.workers,
                         options_.update_rate);
}

}  // namespace forebay::tools
