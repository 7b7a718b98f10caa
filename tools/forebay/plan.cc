// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/admin.h"
#include "nlohmann/json.hpp"
#include "protocol/durability.h"
#include "protocol/error.h"
#include "protocol/json.h"
#include "protocol/optimizer.h"
#include "protocol/os/status_macros.h"
#include "protocol/standard_output.h"
#include "protocol/units.h"
#include "tools/forebay/gpu_step.h"
#include "tools/forebay/model_shape.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::MakeError;

absl::Status CheckOneModel(const PlanOptions& options) {
  const int given = (options.hugging_face.empty() ? 0 : 1) + (options.job.empty() ? 0 : 1) +
                    (options.params > 0 ? 1 : 0) + (options.width > 0 ? 1 : 0);
  if (given != 1) {
    return MakeError(ErrorId::kOption, "plan needs one model",
                     "give --hf config.json, or --params, or --layers and --width, or --job");
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelShape> ShapeOf(const PlanOptions& options) {
  if (options.params > 0) return EvenShape(options.params, options.layers);
  if (options.width > 0) return DecoderShape(options.layers, options.width, options.vocab);
  std::string text;
  std::error_code error;
  if (std::filesystem::is_regular_file(options.hugging_face, error)) {
    std::ifstream file(options.hugging_face);
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  const nlohmann::json config = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (config.is_discarded()) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat(options.hugging_face, " cannot be read as JSON"),
                     "give the model's config.json");
  }
  return HuggingFaceShape(config);
}

absl::StatusOr<LayoutChoice> ChoiceOf(const PlanOptions& options) {
  LayoutChoice choice{.ranks = options.ranks, .is_shared = options.is_shared};
  ASSIGN_OR_RETURN(choice.dtype, protocol::WeightsDTypeFromName(options.dtype));
  ASSIGN_OR_RETURN(choice.optimizer, protocol::OptimizerFromName(options.optimizer));
  const bool is_bf16 = choice.dtype == protocol::DType::kBFloat16;
  const std::string usual = is_bf16 ? "exact" : "fp32";
  ASSIGN_OR_RETURN(choice.format,
                   protocol::FormatFromName(options.format.empty() ? usual : options.format));
  return choice;
}

absl::StatusOr<uint64_t> SizeOf(const std::string& text) {
  const absl::StatusOr<uint64_t> bytes = protocol::ParseBytes(text);
  if (bytes.ok() && *bytes > 0) return bytes;
  return MakeError(ErrorId::kOption, absl::StrCat(text, " is no size"), "write 64GiB, or 2TiB");
}

absl::StatusOr<std::optional<client::AdminClient::NodeSize>> NodeOf(const PlanOptions& options) {
  if (options.dram.empty()) return std::nullopt;
  client::AdminClient::NodeSize node;
  for (const auto& [text, bytes] :
       {std::pair(&options.dram, &node.dram_bytes), {&options.swap_size, &node.swap_bytes}}) {
    if (text->empty()) continue;
    ASSIGN_OR_RETURN(*bytes, SizeOf(*text));
  }
  return node;
}

// Rates of the node's swap in GB/s. 0: unknown.
struct DiskRates {
  double read = 0;
  double write = 0;
  bool is_measured = false;
};

// Returns the rates of the options if both are set or another node is planned. Otherwise returns the sum of the rates that the
// daemon has measured on this node's paths; 0 if a path was not measured.
DiskRates RatesOf(const PlanOptions& options, schema::NodeStatus::Reader status) {
  const bool is_given = options.read_rate > 0 && options.write_rate > 0;
  if (is_given || !options.dram.empty()) {
    return DiskRates{.read = options.read_rate, .write = options.write_rate};
  }
  DiskRates rates{.is_measured = true};
  for (const auto path : status.getSwap()) {
    if (path.getReadRate() <= 0) return DiskRates{};
    rates.read += path.getReadRate() / protocol::kGb;
    rates.write += path.getWriteRate() / protocol::kGb;
  }
  return rates;
}

// Seconds that the disk works in a step, and the seconds that it writes more in a durable step. Every durable_every-th step is
// durable; 0: no step is.
struct DiskTime {
  double step_s = 0;
  double durable_s = 0;
  uint64_t durable_every = 0;
};

// Appends the time of a step. Early updates hide the disk under compute: the step takes the longer of both. Otherwise the step
// takes the sum. If every step is durable, the call of step also waits for the durable writes. If only some steps are, the
// durable writes run during the next step.
void AppendStepTime(const PlanOptions& options, const DiskTime& disk, std::string& text) {
  if (options.compute_s == 0) return;
  const bool hides = options.early_updates && !options.is_shared;
  const auto with = [&](double disk_s) {
    return hides ? std::max(options.compute_s, disk_s) : options.compute_s + disk_s;
  };
  double step_s = with(disk.step_s);
  if (disk.durable_every == 1) {
    step_s += disk.durable_s;
  } else if (disk.durable_every > 1) {
    const double later_s = std::max(with(disk.step_s + disk.durable_s), step_s) - step_s;
    step_s += later_s / static_cast<double>(disk.durable_every);
  }
  absl::StrAppendFormat(&text, "with %.3g s of compute a step takes %.2f s%s: %s\n",
                        options.compute_s, step_s, disk.durable_every > 1 ? " on average" : "",
                        !hides                            ? "the disk after compute"
                        : disk.step_s > options.compute_s ? "the disk works all the time"
                        : disk.durable_s > 0              ? "the disk waits for compute, and a "
                                                            "durable step for the disk"
                                                          : "the disk waits for compute");
}

// Table of the bytes that the partitions of each rank take. Neighbouring ranks with equal bytes share a row.
std::string RanksText(schema::JobPlan::Reader plan) {
  Table table({"RANK", "WEIGHTS", "CACHE", "STATES", "GRADIENT SUMS", "WEIGHTS ON SWAP",
               "STATES ON SWAP", "LARGEST SHARD"});
  std::vector<std::string> row;
  uint32_t first = 0;
  uint32_t last = 0;
  const auto add_row = [&] {
    if (row.empty()) return;
    row.insert(row.begin(), first == last ? absl::StrCat(first) : absl::StrCat(first, "-", last));
    table.Add(row);
  };
  for (const auto rank : plan.getRanks()) {
    std::vector<std::string> cells;
    for (const uint64_t bytes :
         {rank.getWeights(), rank.getWeightsCache(), rank.getStates(), rank.getSums(),
          rank.getWeightsOnSwap(), rank.getStatesOnSwap(), rank.getLargestPartition()}) {
      cells.push_back(FormatBytes(bytes));
    }
    if (cells != row) {
      add_row();
      first = rank.getRank();
      row = std::move(cells);
    }
    last = rank.getRank();
  }
  add_row();
  return table.empty() ? "" : "\n" + table.Text();
}

// Describes the arenas of each rank, which the DRAM table counts in one row.
std::string ArenasText(schema::JobPlan::Reader plan) {
  std::string text = absl::StrCat("each rank has an arena of ", FormatBytes(plan.getGradArena()),
                                  " for gradients");
  for (const auto& [what, bytes] :
       {std::pair("its step region", plan.getStepRegion()),
        {"activations", plan.getActivations()},
        {"its trace", plan.getTrace()},
        {"its ring", plan.getRing()},
        {"extra_state as it was at attach", plan.getExtraStateCopy()}}) {
    if (bytes > 0) absl::StrAppend(&text, ", ", FormatBytes(bytes), " for ", what);
  }
  return text + "\n";
}

// Describes the gathered weights that FSDP2 holds in each process. The group outside the layers stays gathered from forward to
// backward. A single rank on a GPU gathers nothing. It holds copies of the group in use and of the next group
// (client/python/forebay/sharded/copy_ahead.py).
std::string GatheredText(const ModelShape& model, protocol::DType dtype,
                         const PlanOptions& options) {
  uint64_t root_bytes = 0;
  std::vector<uint64_t> layers{0, 0};
  for (const ShapeGroup& group : model.groups) {
    const uint64_t bytes = group.elems() * protocol::SizeBytes(dtype);
    if (group.name == kRootGroup) {
      root_bytes = bytes;
    } else {
      layers.push_back(bytes);
    }
  }
  std::ranges::sort(layers, std::greater());
  std::string text = absl::StrCat(
      "beside that each trainer itself holds gathered groups: ", FormatBytes(layers[0] + layers[1]),
      " of two layers, one in use and one gathered ahead");
  if (root_bytes > 0) {
    absl::StrAppend(&text, ", and ", FormatBytes(root_bytes), " of what belongs to no layer");
  }
  if (options.is_on_gpu && options.ranks == 1) {
    const uint64_t gathered_ahead = layers[1];  // a single rank gathers no group ahead
    layers.push_back(root_bytes);
    std::ranges::sort(layers, std::greater());
    absl::StrAppend(&text, "; ", FormatBytes(layers[0] + layers[1] - gathered_ahead),
                    " more, of copies under way");
  }
  return text + "\n";
}

// Table of the DRAM that the job takes. `is_made` is true if the job exists.
std::string DramText(schema::JobPlan::Reader plan, uint64_t elems, uint32_t ranks, bool is_made) {
  Table table({"DRAM", "BYTES", "PER PARAMETER"});
  const auto add = [&](std::string what, uint64_t bytes) {
    const double share = static_cast<double>(bytes) / static_cast<double>(elems);
    table.Add({std::move(what), FormatBytes(bytes), absl::StrFormat("%.3f", share)});
  };
  add("weights", plan.getWeights());
  if (plan.getWeightsOnSwap() > 0) {
    add(absl::StrCat("cache of weights on swap (", FormatBytes(plan.getWeightsOnSwap()), ")"),
        plan.getWeightsCache());
  }
  add(absl::StrCat("states, ", plan.getResidentBlocks(), " of ", plan.getBlocks(), " blocks"),
      plan.getStates());
  const uint64_t gradients = plan.getGradientsOnSwap();
  add(gradients == 0 ? "gradient sums"
                     : absl::StrCat("gradient sums (", FormatBytes(gradients), " on swap)"),
      plan.getSums());
  if (plan.getNewWeights() > 0) {
    add("new weights, until their step is decided", plan.getNewWeights());
  }
  add("extra_state", plan.getExtraState());
  add(absl::StrCat("arenas of ", ranks, ranks == 1 ? " rank" : " ranks"), plan.getSessions());
  add("tables", plan.getTables());
  const uint64_t job = plan.getWeights() + plan.getWeightsCache() + plan.getStates() +
                       plan.getSums() + plan.getNewWeights() + plan.getExtraState() +
                       plan.getSessions() + plan.getTables();
  add("job total", job);
  add("daemon", plan.getNode());
  if (plan.getOthers() > 0) add("other jobs", plan.getOthers());
  std::string text = absl::StrCat(
      "\n", table.Text(), "\nof a limit of ", FormatBytes(plan.getLimit()), "; with ",
      FormatBytes(plan.getAllInDram()),
      is_made && plan.getWeightsOnSwap() > 0
          ? " a new job like it would have nothing on swap; one with weights there stays there"
          : " nothing would be on swap",
      "\n", ArenasText(plan));
  if (plan.getMissing() > 0) {
    absl::StrAppend(&text, "other jobs move ", FormatBytes(plan.getMissing()), " to swap first\n");
  }
  return text;
}

std::string DurableText(schema::JobPlan::Reader plan) {
  if (plan.getDurableWritten() == 0) return {};
  const std::string which = plan.getDurableEvery() == 1
                                ? "each step"
                                : absl::StrCat("every ", plan.getDurableEvery(), " steps one");
  return absl::StrCat(which, " becomes durable, and writes ", FormatBytes(plan.getDurableWritten()),
                      " more for what is in DRAM\n");
}

// Returns an empty text if the job takes no swap.
std::string SwapText(const PlanOptions& options, schema::JobPlan::Reader plan,
                     const DiskRates& rates) {
  if (plan.getSwap() == 0) return {};
  const uint64_t gradients = plan.getGradientsOnSwap();
  std::string text = absl::StrCat(
      "swap: ", FormatBytes(plan.getSwap()), " taken",
      options.durability.empty() ? "" : absl::StrCat(" at durability ", options.durability),
      "; a step of one pass reads ", FormatBytes(plan.getStepRead()), " and writes ",
      FormatBytes(plan.getStepWritten()),
      gradients == 0
          ? ""
          : absl::StrCat(", and at most ", FormatBytes(gradients), " more each way for gradients"),
      "\n", DurableText(plan));
  if (rates.read > 0 && rates.write > 0) {
    const double seconds =
        static_cast<double>(plan.getStepRead() + gradients) / protocol::kGb / rates.read +
        static_cast<double>(plan.getStepWritten() + gradients) / protocol::kGb / rates.write;
    const DiskTime time{
        .step_s = seconds,
        .durable_s = static_cast<double>(plan.getDurableWritten()) / protocol::kGb / rates.write,
        .durable_every = plan.getDurableEvery()};
    absl::StrAppendFormat(
        &text, "the disk works %.2f s a step%s, at %.3g GB/s read and %.3g written%s\n", seconds,
        time.durable_s > 0 ? absl::StrFormat(", %.2f s more for a durable one", time.durable_s)
                           : "",
        rates.read, rates.write, rates.is_measured ? ", as measured" : "");
    AppendStepTime(options, time, text);
  }
  return text;
}

// True if the options have a rate of a step on GPUs.
bool HasGpuRates(const ClusterOptions& step) {
  return step.gpu_tflops > 0 || step.host_link_rate > 0 || step.update_rate > 0;
}

// Checks that options of a step on GPUs come with all that its time is computed from.
absl::Status CheckGpuStep(const PlanOptions& options) {
  const ClusterOptions& step = options.cluster;
  const bool describes_step =
      HasGpuRates(step) || step.recompute || step.tokens != ClusterOptions().tokens;
  const bool is_timed = options.is_on_gpu && options.job.empty() && options.compute_s == 0;
  if (!describes_step || (is_timed && HasGpuRates(step))) return absl::OkStatus();
  return MakeError(ErrorId::kOption,
                   "--tokens, --recompute and rates of GPUs are of a step on GPUs",
                   "give --gpu or --nodes with a model and with --gpu-tflops, --host-link-rate or "
                   "--update-rate, and neither --compute nor --job");
}

ClusterModel ModelOf(const ModelShape& shape, const LayoutChoice& choice) {
  return {.params = shape.elems(),
          .layers = shape.groups.size(),
          .dtype = choice.dtype,
          .format = choice.format,
          .optimizer = choice.optimizer};
}

// Returns the closed form of the step of a job on GPUs, with the memory of `plan`. `plan_of` asks the daemon for another format.
absl::StatusOr<GpuStep> GpuStepOf(
    const PlanOptions& options, const ClusterModel& model, const DiskRates& rates,
    const client::JobPlan& plan,
    const std::function<absl::StatusOr<client::JobPlan>(protocol::Format)>& plan_of) {
  GpuStep step;
  ASSIGN_OR_RETURN(step.options, ClusterOptionsOf(options));
  step.options.nodes = 1;
  step.options.gpus = options.ranks;
  step.options.read_rate = rates.read;
  step.options.write_rate = rates.write;
  ASSIGN_OR_RETURN(step.plan, PlanGpuStep(model, step.options, *plan));
  ClusterModel int8 = model;
  int8.format = protocol::Format::kInt8;
  const bool is_supported = !protocol::StatePlanes(int8.optimizer, int8.format, int8.dtype).empty();
  if (!is_supported || UpdateBytesPerParam(model) <= UpdateBytesPerParam(int8)) return step;
  ASSIGN_OR_RETURN(const client::JobPlan other, plan_of(int8.format));
  ASSIGN_OR_RETURN(const ClusterPlan with_int8, PlanGpuStep(int8, step.options, *other));
  if (with_int8.seconds.step < step.plan.seconds.step) step.with_int8 = with_int8;
  return step;
}

std::string Text(const PlanOptions& options, const ModelShape& model, protocol::DType dtype,
                 schema::JobPlan::Reader plan, const DiskRates& rates) {
  return absl::StrCat(model.what, ": ", model.elems(), " parameters in ", model.groups.size(),
                      " groups, ", options.ranks, options.ranks == 1 ? " rank\n" : " ranks\n",
                      DramText(plan, model.elems(), options.ranks, /*is_made=*/false),
                      options.is_shared ? "" : GatheredText(model, dtype, options),
                      SwapText(options, plan, rates), RanksText(plan));
}

absl::Status PlanOfJob(const PlanOptions& options, client::AdminClient& admin,
                       const std::optional<client::AdminClient::NodeSize>& node) {
  ASSIGN_OR_RETURN(const client::JobPlan plan, admin.PlanJob(options.job, node));
  if (options.as_json) return protocol::WriteOutput(protocol::JsonOf(*plan) + "\n");
  ASSIGN_OR_RETURN(const client::NodeStatus status, admin.Status());
  for (const auto job : status->getJobs()) {
    if (job.getName().cStr() != options.job) continue;
    PlanOptions of_job = options;
    of_job.is_shared = plan->getRanks().size() == 0;
    of_job.durability = job.getDurability().cStr();
    const uint32_t ranks = job.getWorldSize();
    return protocol::WriteOutput(absl::StrCat(
        "job ", options.job, ": ", job.getParams(), " parameters, ", job.getOptimizer().cStr(),
        ", ", job.getFormat().cStr(), ", ", ranks, ranks == 1 ? " rank\n" : " ranks\n",
        DramText(*plan, job.getParams(), ranks, /*is_made=*/true),
        SwapText(of_job, *plan, RatesOf(options, *status)), RanksText(*plan)));
  }
  return MakeError(ErrorId::kJobName, absl::StrCat("job ", options.job, " was deleted"));
}

absl::Status PlanOfCluster(const PlanOptions& options) {
  ASSIGN_OR_RETURN(const ClusterModel model, ClusterModelOf(options));
  ASSIGN_OR_RETURN(const ClusterOptions cluster, ClusterOptionsOf(options));
  ASSIGN_OR_RETURN(const ClusterPlan plan, PlanCluster(model, cluster));
  return protocol::WriteOutput(options.as_json ? ClusterJson(model, cluster, plan).dump(2) + "\n"
                                               : ClusterText(model, cluster, plan));
}

}  // namespace

absl::StatusOr<ClusterModel> ClusterModelOf(const PlanOptions& options) {
  RETURN_IF_ERROR(CheckOneModel(options));
  ASSIGN_OR_RETURN(const ModelShape shape, ShapeOf(options));
  ASSIGN_OR_RETURN(const LayoutChoice choice, ChoiceOf(options));
  return ModelOf(shape, choice);
}

absl::StatusOr<ClusterOptions> ClusterOptionsOf(const PlanOptions& options) {
  ClusterOptions cluster = options.cluster;
  cluster.read_rate = options.read_rate;
  cluster.write_rate = options.write_rate;
  cluster.early_updates = options.early_updates;
  ASSIGN_OR_RETURN(const auto node, NodeOf(options));
  if (node) {
    cluster.dram_bytes = node->dram_bytes;
    cluster.swap_bytes = node->swap_bytes;
  }
  return cluster;
}

absl::Status Plan(const PlanOptions& options) {
  if (std::isnan(options.read_rate) || std::isnan(options.write_rate)) {
    return MakeError(ErrorId::kOption, "nan is no rate", "write GB/s, as 3.5");
  }
  if (options.cluster.nodes > 0) return PlanOfCluster(options);
  RETURN_IF_ERROR(CheckGpuStep(options));
  RETURN_IF_ERROR(CheckOneModel(options));
  ASSIGN_OR_RETURN(const auto node, NodeOf(options));
  const auto connect = [&] { return client::AdminClient::Connect({.socket = options.socket}); };
  if (!options.job.empty()) {
    ASSIGN_OR_RETURN(const auto admin, connect());
    return PlanOfJob(options, *admin, node);
  }
  ASSIGN_OR_RETURN(const ModelShape model, ShapeOf(options));
  ASSIGN_OR_RETURN(const LayoutChoice choice, ChoiceOf(options));
  client::AttachOptions attach;
  attach.world_size = options.ranks;
  attach.accumulate = options.accumulate;
  if (!options.buffers.empty()) {
    ASSIGN_OR_RETURN(const uint64_t buffers, SizeOf(options.buffers));
    constexpr uint64_t kUnitBytes = 64 * protocol::kKiB;  // the Python client's unit
    attach.memory.extra_state_bytes += protocol::RoundUp(buffers, kUnitBytes);
  }
  attach.early_updates = options.early_updates && !options.is_shared;
  if (!options.durability.empty()) {
    ASSIGN_OR_RETURN(attach.durability.level, protocol::ParseDurability(options.durability));
  }
  attach.is_on_gpu = options.is_on_gpu;
  ASSIGN_OR_RETURN(const auto admin, connect());
  const auto plan_of = [&](protocol::Format format) {
    LayoutChoice other = choice;
    other.format = format;
    attach.layout = LayoutOf(model, other);
    return admin->Plan(attach, node);
  };
  ASSIGN_OR_RETURN(const client::JobPlan plan, plan_of(choice.format));
  ASSIGN_OR_RETURN(const client::NodeStatus status, admin->Status());
  const DiskRates rates = RatesOf(options, *status);
  std::string text = options.as_json ? protocol::JsonOf(*plan) + "\n"
                                     : Text(options, model, choice.dtype, *plan, rates);
  if (!HasGpuRates(options.cluster)) return protocol::WriteOutput(text);
  ASSIGN_OR_RETURN(const GpuStep step,
                   GpuStepOf(options, ModelOf(model, choice), rates, plan, plan_of));
  if (options.as_json) {
    nlohmann::ordered_json json = nlohmann::ordered_json::parse(text);
    json["seconds"] = GpuStepJson(step);
    return protocol::WriteOutput(json.dump(2) + "\n");
  }
  return protocol::WriteOutput(text + GpuStepText(step));
}

}  // namespace forebay::tools
