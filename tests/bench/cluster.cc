// SPDX-License-Identifier: Apache-2.0
// Bench cluster: simulates a step of one node of a cluster in virtual time with the daemon's state machine. The result is
// compared with the closed form of `forebay plan --nodes`. All other nodes behave like the simulated one.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tests/bench/cluster_node.h"
#include "tests/bench/lab.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/cluster_model.h"
#include "tools/forebay/model_shape.h"

namespace forebay::tools {
namespace {

constexpr uint32_t kSteps = 3;
constexpr uint64_t kBlockElems = uint64_t{1} << 20;
constexpr uint64_t kBlockUnit = 65536;

absl::StatusOr<VirtualNodeOptions> NodeOf(const BenchOptions& options,
                                          const ClusterBenchOptions& asked,
                                          const ClusterModel& model, const ClusterOptions& cluster,
                                          const ClusterPlan& plan) {
  const uint64_t params = (model.params + cluster.nodes - 1) / cluster.nodes;
  const ModelShape shape = EvenShape(params, static_cast<uint32_t>(model.layers));
  ASSIGN_OR_RETURN(
      protocol::Layout layout,
      protocol::Layout::Create(LayoutOf(shape, {.dtype = model.dtype,
                                                .format = model.format,
                                                .optimizer = model.optimizer,
                                                .ranks = std::min(cluster.gpus, asked.ranks)})));
  VirtualNodeOptions node;
  node.layout = std::make_shared<const protocol::Layout>(std::move(layout));
  node.dram_bytes = cluster.dram_bytes;
  node.block_elems = std::max(
      kBlockElems, protocol::RoundUp((params + asked.blocks - 1) / asked.blocks, kBlockUnit));
  node.workers = asked.workers;
  if (!asked.staging.empty()) {
    ASSIGN_OR_RETURN(node.staging_bytes, protocol::ParseBytes(asked.staging));
  }
  node.early_updates = cluster.early_updates;
  node.drain = asked.drain;
  node.in_turn = asked.in_turn;
  node.compute_s = options.compute_ms > 0 ? options.compute_ms * 1e-3 : plan.seconds.compute;
  node.forward_share = ForwardShare(cluster);
  node.gather_s_per_elem =
      std::max(plan.seconds.link, plan.seconds.gpu_link) / kCollectives / plan.node.params;
  node.host_link_rate = cluster.host_link_rate;
  node.update_rate = cluster.update_rate;
  node.update_bytes_per_param = UpdateBytesPerParam(model);
  node.read_rate = cluster.read_rate;
  node.write_rate = cluster.write_rate;
  return node;
}

}  // namespace

absl::Status BenchCluster(const BenchOptions& options, const ClusterBenchOptions& asked,
                          const Report& report) {
  PlanOptions planned = asked.plan;
  planned.params = options.params;
  ASSIGN_OR_RETURN(const ClusterModel model, ClusterModelOf(planned));
  ASSIGN_OR_RETURN(ClusterOptions cluster, ClusterOptionsOf(planned));
  if (cluster.nodes == 0) {
    return protocol::MakeError(protocol::ErrorId::kOption, "bench cluster needs a cluster",
                               "give --nodes, --gpus and a model as to forebay plan");
  }
  if (options.compute_ms > 0) {  // replaces the GPUs' rate
    cluster.gpu_tflops = ClusterFlops(model, cluster) / (options.compute_ms * 1e-3) / 1e12;
  }
  ASSIGN_OR_RETURN(const ClusterPlan plan, PlanCluster(model, cluster));
  ASSIGN_OR_RETURN(const VirtualNodeOptions node, NodeOf(options, asked, model, cluster, plan));
  ASSIGN_OR_RETURN(const VirtualSteps steps, SimulateNode(node, kSteps));
  BenchResult result;
  result.what = {
      .bench = "cluster",
      .name = absl::StrCat("cluster/params=", model.params, "/nodes=", cluster.nodes,
                           "/gpus=", cluster.gpus, "/early=", cluster.early_updates ? "yes" : "no",
                           "/drain=", asked.drain ? "yes" : "no"),
      .unit = "s",
      .limit_what = "the closed form",
      .measure = Measure::kTime};
  result.value = steps.step_s;
  result.limit = plan.seconds.step;
  result.share = result.value > 0 ? result.limit / result.value : 0;
  result.samples = 1;
  result.bytes_read = static_cast<uint64_t>(steps.read_bytes);
  result.bytes_written = static_cast<uint64_t>(steps.written_bytes);
  result.more = {
      {"compute_s", node.compute_s},
      {"disk_s", steps.disk_s},
      {"gpu_wait_s", steps.gpu_wait_s},
      {"exposed", node.compute_s > 0 ? steps.step_s / node.compute_s - 1 : 0},
      {"tflops_per_gpu", steps.step_s > 0 ? ClusterFlops(model, cluster) / steps.step_s / 1e12 : 0},
      {"blocks", steps.blocks},
      {"resident_blocks", steps.resident_blocks},
      {"block_elems", node.block_elems},
      {"weights_on_swap", steps.weights_on_swap_bytes},
      {"events", steps.events}};
  RETURN_IF_ERROR(report(result));
  return absl::OkStatus();
}

}  // namespace forebay::tools
