// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/cluster_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "protocol/wire.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::MakeError;

constexpr double kSlotsPerBlock = 2;  // the current slot, and the slot that the next step writes
constexpr uint64_t kSampleElems = uint64_t{1} << 20;

double WeightsWidth(const ClusterModel& model) {
  return static_cast<double>(protocol::SizeBytes(model.dtype));
}

double StatesWidth(const ClusterModel& model) {
  return static_cast<double>(
             protocol::StateBytes(model.optimizer, model.format, model.dtype, kSampleElems)) /
         static_cast<double>(kSampleElems);
}

absl::Status CheckCluster(const ClusterModel& model, const ClusterOptions& options) {
  if (options.nodes == 0 || options.gpus == 0 || options.tokens == 0 || model.layers == 0) {
    return MakeError(ErrorId::kOption, "a cluster has nodes, GPUs, layers and tokens",
                     "give numbers of 1 and more");
  }
  if (options.tensor_parallel == 0 || options.gpus % options.tensor_parallel != 0) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat(options.gpus, " GPUs of a node cannot be cut into groups of ",
                                  options.tensor_parallel),
                     "--tensor-parallel divides --gpus");
  }
  const uint64_t ranks = uint64_t{options.nodes} * options.gpus;
  if (model.params < ranks || model.params < model.layers) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat(model.params, " parameters are fewer than the ", ranks,
                                  " GPUs or the ", model.layers, " layers"),
                     "give a larger model, or fewer nodes");
  }
  for (const double rate :
       {options.gpu_tflops, options.gpu_link_rate, options.link_rate, options.host_link_rate,
        options.update_rate, options.read_rate, options.write_rate}) {
    if (!std::isfinite(rate) || rate < 0) {
      return MakeError(ErrorId::kOption, absl::StrFormat("%g is no rate", rate),
                       "write GB/s, as 3.5, or TFLOPS");
    }
  }
  if (StatesWidth(model) == 0) {
    return MakeError(ErrorId::kOption, "this format does not take weights of this type",
                     "fp32 takes all; exact, bf16 and int8 take bfloat16");
  }
  return absl::OkStatus();
}

// Places weights in DRAM first, then states, in the order in which attach places them.
absl::StatusOr<ClusterMemory> PlaceOn(const ClusterModel& model, const ClusterOptions& options) {
  const double weights_width = WeightsWidth(model);
  const double states_width = StatesWidth(model);
  ClusterMemory node;
  node.params = static_cast<double>(model.params) / options.nodes;
  node.weights = node.params * weights_width;
  node.states = node.params * states_width;
  node.gradients = node.params * weights_width;
  if (options.dram_bytes == 0) return node;
  const auto dram = static_cast<double>(options.dram_bytes);
  const double left = dram - node.gradients;
  const double cache = 2 * node.weights / static_cast<double>(model.layers);
  if (left < std::min(cache, node.weights)) {
    const double needed = node.gradients + std::min(cache, node.weights);
    return MakeError(ErrorId::kDramLimit,
                     absl::StrCat("gradients and two layers of weights take ",
                                  FormatBytes(static_cast<uint64_t>(needed)),
                                  " of each node, which has ", FormatBytes(options.dram_bytes)),
                     absl::StrCat("raise --dram, or --nodes to ",
                                  static_cast<uint64_t>(std::ceil(needed / dram * options.nodes))));
  }
  // A block on swap that is updated before the decision has its new weights in DRAM until then, unless its weights
  // are on swap too.
  const double aside = options.early_updates ? weights_width : 0;
  const double per_param = left / node.params;
  double resident = 0;
  if (per_param >= weights_width + states_width) {
    resident = 1;
  } else if (per_param < weights_width + aside) {
    const double share = per_param / (weights_width + aside);
    node.weights_on_swap = (1 - share) * node.weights;
    node.weights *= share;
  } else if (states_width > aside) {
    resident = (per_param - weights_width - aside) / (states_width - aside);
  }
  node.states_on_swap = (1 - resident) * node.states;
  node.states *= resident;
  node.new_weights = (1 - resident) * node.weights * (aside / weights_width);
  node.swap = kSlotsPerBlock * (node.states_on_swap + node.weights_on_swap);
  const auto swap = static_cast<double>(options.swap_bytes);
  if (options.swap_bytes > 0 && node.swap > swap) {
    return MakeError(
        ErrorId::kSwapNospc,
        absl::StrCat("each node has ", FormatBytes(static_cast<uint64_t>(node.swap)),
                     " on swap, which has ", FormatBytes(options.swap_bytes)),
        absl::StrCat("raise --swap-size or --dram, or --nodes to ",
                     static_cast<uint64_t>(std::ceil(node.swap / swap * options.nodes)),
                     ", or choose a smaller --format"));
  }
  return node;
}

ClusterTraffic TrafficOf(const ClusterModel& model, const ClusterOptions& options,
                         const ClusterMemory& node) {
  const double width = WeightsWidth(model);
  const auto params = static_cast<double>(model.params);
  const double nodes = options.nodes;
  const double sharers = nodes * options.gpus / options.tensor_parallel;
  ClusterTraffic traffic;
  traffic.link = kCollectives * params * width * (nodes - 1) / nodes;
  traffic.gpu_link =
      kCollectives * params * width / options.tensor_parallel * (sharers - 1) / sharers;
  traffic.to_gpus = 2 * node.params * width;
  traffic.from_gpus = node.params * width;
  // Forward, backward and the update each read the weights on swap.
  traffic.swap_read = node.states_on_swap + 3 * node.weights_on_swap + node.gradients_on_swap;
  traffic.swap_written = node.states_on_swap + node.weights_on_swap + node.gradients_on_swap;
  traffic.update = node.params * UpdateBytesPerParam(model);
  traffic.additions = 2 * node.gradients;
  return traffic;
}

// A part of a step: its name and its seconds.
using Part = std::pair<std::string_view, double>;
template <size_t kParts>
Part Longest(const std::array<Part, kParts>& parts) {
  return *std::ranges::max_element(parts, {}, &Part::second);
}

// Seconds of one pass over equal layers through stages that work at once on different layers. `stages` are the seconds of
// each stage for all layers.
double Pipelined(const std::array<double, 4>& stages, double layers) {
  const double first = std::accumulate(stages.begin(), stages.end(), 0.0) / layers;
  return first + (1 - 1 / layers) * *std::ranges::max_element(stages);
}

// Transfers of one pass over all groups, and the compute of that pass.
struct Pass {
  double compute = 0;
  double fetched = 0;  // reads of the weights on swap
  Part gather = {};
  Part ahead = {};  // copy and gather of a group, while the group before it computes

  // The longest part and the seconds of the whole pass. waits() is what the longest part takes beyond compute. `hiding` is the
  // compute from which it is the longest part.
  Part longest = {};
  double seconds = 0;
  double hiding = 0;
  double waits() const { return longest.second - compute; }
};

Pass PassOf(const ClusterTime& time, double compute, double to_gpus, double fetched) {
  Pass pass{.compute = compute, .fetched = fetched};
  pass.gather = Longest<2>(
      {Part("link", time.link / kCollectives), {"gpu_link", time.gpu_link / kCollectives}});
  pass.ahead = Part(to_gpus > pass.gather.second ? "host_link" : pass.gather.first,
                    to_gpus + pass.gather.second);
  return pass;
}

// States in DRAM change only after the decision. Forward waits for the update of each group in turn. `update` is the seconds
// of these updates.
void TimeForward(double update, double layers, Pass& pass) {
  const Part other = Longest<3>({Part("update", update), pass.ahead, {"swap", pass.fetched}});
  pass.hiding = other.second;
  pass.longest = Longest<2>({Part("compute", pass.compute), other});
  pass.seconds = Pipelined({pass.compute, update, pass.ahead.second, pass.fetched}, layers);
}

// The decision waits until the gradient of the last group is reduced, copied and added up.
void TimeBackward(const ClusterOptions& options, const ClusterTraffic& traffic, double additions,
                  double layers, Pass& pass) {
  const double from_gpus = TransferSeconds(traffic.from_gpus, options.host_link_rate);
  // The gradients of two groups are under way from a GPU at most. A rank without a GPU waits for each. Pieces that find no
  // room in the arenas wait for additions.
  const double under_way = options.host_link_rate > 0 ? 2 : 1;
  const double arenas =
      static_cast<double>(kPiecesOfARank * protocol::kGradPieceBytesMax * options.gpus);
  const double waiting = std::max(0.0, 1 - arenas * layers / traffic.from_gpus);
  const double delivered = pass.gather.second + from_gpus + waiting * additions;
  const std::string_view link = from_gpus > pass.gather.second ? "host_link" : pass.gather.first;
  const Part other = Longest<5>({pass.ahead,
                                 Part(pass.gather.first, 2 * pass.gather.second),
                                 {"host_link", from_gpus},
                                 {"update", additions},
                                 {"swap", pass.fetched}});
  pass.hiding = std::max(other.second, delivered);
  pass.longest = Longest<3>(
      {Part("compute", pass.compute), {link, (pass.compute + delivered) / under_way}, other});
  pass.seconds = pass.longest.second + (pass.gather.second + from_gpus + additions) / layers;
}

ClusterTime TimeOf(const ClusterModel& model, const ClusterOptions& options,
                   const ClusterMemory& node, const ClusterTraffic& traffic) {
  ClusterTime time;
  const double flops = ClusterFlops(model, options);
  const auto layers = static_cast<double>(model.layers);
  time.compute = options.gpu_tflops > 0 ? flops / (options.gpu_tflops * 1e12) : 0;
  time.link = TransferSeconds(traffic.link, options.link_rate);
  time.gpu_link = TransferSeconds(traffic.gpu_link, options.gpu_link_rate);
  const double to_gpus = TransferSeconds(traffic.to_gpus, options.host_link_rate);
  time.host_link = std::max(to_gpus, TransferSeconds(traffic.from_gpus, options.host_link_rate));
  time.swap = TransferSeconds(traffic.swap_read, options.read_rate) +
              TransferSeconds(traffic.swap_written, options.write_rate);
  time.update = TransferSeconds(traffic.update, options.update_rate);
  time.additions = TransferSeconds(traffic.additions, options.update_rate);

  const double fetched = TransferSeconds(node.weights_on_swap, options.read_rate);
  const double forward_compute = time.compute * ForwardShare(options);
  Pass forward = PassOf(time, forward_compute, to_gpus / 2, fetched);
  Pass backward = PassOf(time, time.compute - forward_compute, to_gpus / 2, fetched);
  const double states = node.states + node.states_on_swap;
  const bool updates_in_forward = options.early_updates && states > 0;
  TimeForward(updates_in_forward ? time.update * node.states / states : 0, layers, forward);
  TimeBackward(options, traffic, time.additions, layers, backward);
  const Part passes(
      forward.waits() > backward.waits() ? forward.longest.first : backward.longest.first,
      forward.seconds + backward.seconds);
  Part step;
  time.tail = forward.seconds - forward.longest.second + backward.seconds - backward.longest.second;
  if (options.early_updates) {
    const double share = ForwardShare(options);
    time.hiding = std::max({forward.hiding / share, backward.hiding / (1 - share), time.swap,
                            time.update + time.additions});
    step = Longest<3>({passes, {"swap", time.swap}, {"update", time.update + time.additions}});
  } else {
    const Part update =
        Longest<2>({Part("swap", time.swap - 2 * fetched), {"update", time.update}});
    step = Part(update.second > passes.second ? update.first : passes.first,
                passes.second + update.second);
  }
  time.step = step.second;
  time.bound = step.second > 0 ? std::string(step.first) : "";
  time.exposed = time.compute > 0 ? time.step / time.compute - 1 : 0;
  time.tflops = time.step > 0 ? flops / time.step / 1e12 : 0;
  return time;
}

// Returns the plan of a checked cluster.
ClusterPlan PlanOf(const ClusterModel& model, const ClusterOptions& options,
                   const ClusterMemory& node) {
  ClusterPlan plan{.node = node, .traffic = TrafficOf(model, options, node), .seconds = {}};
  plan.seconds = TimeOf(model, options, node, plan.traffic);
  return plan;
}

std::string Bytes(double bytes) { return FormatBytes(static_cast<uint64_t>(bytes)); }

}  // namespace

double TransferSeconds(double bytes, double rate) {
  return rate > 0 ? bytes / protocol::kGb / rate : 0;
}

double UpdateBytesPerParam(const ClusterModel& model) {
  return 2 * StatesWidth(model) + 3 * WeightsWidth(model);
}

double ForwardShare(const ClusterOptions& options) { return options.recompute ? 1.0 / 4 : 1.0 / 3; }

double ClusterFlops(const ClusterModel& model, const ClusterOptions& options) {
  return (options.recompute ? 8.0 : 6.0) * static_cast<double>(model.params) *
         static_cast<double>(options.tokens);
}

absl::StatusOr<ClusterPlan> PlanCluster(const ClusterModel& model, const ClusterOptions& options) {
  RETURN_IF_ERROR(CheckCluster(model, options));
  ASSIGN_OR_RETURN(const ClusterMemory node, PlaceOn(model, options));
  return PlanOf(model, options, node);
}

absl::StatusOr<ClusterPlan> PlanPlaced(const ClusterModel& model, const ClusterOptions& options,
                                       const ClusterMemory& node) {
  RETURN_IF_ERROR(CheckCluster(model, options));
  return PlanOf(model, options, node);
}

nlohmann::ordered_json SecondsJson(const ClusterTime& time) {
  return {{"compute", time.compute},     {"link", time.link},   {"gpu_link", time.gpu_link},
          {"host_link", time.host_link}, {"swap", time.swap},   {"update", time.update},
          {"additions", time.additions}, {"tail", time.tail},   {"step", time.step},
          {"exposed", time.exposed},     {"bound", time.bound}, {"tflops_per_gpu", time.tflops}};
}

nlohmann::ordered_json ClusterJson(const ClusterModel& model, const ClusterOptions& options,
                                   const ClusterPlan& plan) {
  const ClusterMemory& node = plan.node;
  const ClusterTraffic& traffic = plan.traffic;
  const ClusterTime& time = plan.seconds;
  nlohmann::ordered_json json = {{"params", model.params},
                                 {"layers", model.layers},
                                 {"nodes", options.nodes},
                                 {"gpus", options.gpus},
                                 {"node",
                                  {{"params", node.params},
                                   {"weights", node.weights},
                                   {"states", node.states},
                                   {"gradients", node.gradients},
                                   {"new_weights", node.new_weights},
                                   {"dram", node.dram()},
                                   {"weights_on_swap", node.weights_on_swap},
                                   {"states_on_swap", node.states_on_swap},
                                   {"swap", node.swap}}},
                                 {"traffic",
                                  {{"link", traffic.link},
                                   {"gpu_link", traffic.gpu_link},
                                   {"to_gpus", traffic.to_gpus},
                                   {"from_gpus", traffic.from_gpus},
                                   {"swap_read", traffic.swap_read},
                                   {"swap_written", traffic.swap_written},
                                   {"update", traffic.update},
                                   {"additions", traffic.additions}}}};
  if (time.step > 0) {
    json["seconds"] = SecondsJson(time);
  }
  return json;
}

std::string ClusterText(const ClusterModel& model, const ClusterOptions& options,
                        const ClusterPlan& plan) {
  const ClusterMemory& node = plan.node;
  const ClusterTraffic& traffic = plan.traffic;
  const ClusterTime& time = plan.seconds;
  Table memory({"PER NODE", "DRAM", "SWAP"});
  memory.Add({"weights", Bytes(node.weights), Bytes(node.weights_on_swap)});
  memory.Add({"states", Bytes(node.states), Bytes(node.states_on_swap)});
  memory.Add({"gradients, until their step is decided", Bytes(node.gradients), ""});
  memory.Add({"new weights, until their step is decided", Bytes(node.new_weights), ""});
  memory.Add({"total", Bytes(node.dram()), absl::StrCat(Bytes(node.swap), " allocated")});
  Table step({"PER STEP", "BYTES", "SECONDS"});
  const auto add = [&](const char* what, const std::string& bytes, double seconds) {
    step.Add({what, bytes, seconds > 0 ? absl::StrFormat("%.3f", seconds) : "-"});
  };
  add("compute of a GPU", "-", time.compute);
  add("link between nodes, in and as much out", Bytes(traffic.link), time.link);
  add("link between GPUs, into each", Bytes(traffic.gpu_link), time.gpu_link);
  add("DRAM to the GPUs", Bytes(traffic.to_gpus), time.host_link);
  add("GPUs to DRAM", Bytes(traffic.from_gpus), 0);
  add("swap, read", Bytes(traffic.swap_read), time.swap);
  add("swap, written", Bytes(traffic.swap_written), 0);
  add("DRAM, of the optimizer", Bytes(traffic.update), time.update);
  add("DRAM, to add gradients up", Bytes(traffic.additions), time.additions);
  std::string text =
      absl::StrCat(model.params, " parameters in ", model.layers, " layers on ", options.nodes,
                   options.nodes == 1 ? " node" : " nodes", " of ", options.gpus, " GPUs, ",
                   options.tokens, " tokens a GPU\n\n", memory.Text(), "\n", step.Text());
  if (time.step > 0) {
    absl::StrAppendFormat(
        &text, "\na step takes %.3f s, %s for %s: %.1f TFLOPS a GPU", time.step,
        options.early_updates ? "and waits" : "the update after compute, and waits", time.bound,
        time.tflops);
    if (time.compute > 0) absl::StrAppendFormat(&text, ", %.0f %% exposed", 100 * time.exposed);
    absl::StrAppend(&text, "\n");
  }
  return text;
}

}  // namespace forebay::tools
