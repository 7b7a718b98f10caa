// SPDX-License-Identifier: Apache-2.0
#include "tests/support/logical_state.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <ostream>
#include <regex>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"
#include "protocol/os/status_macros.h"
#include "tests/support/training_client.h"

namespace forebay::testing {
namespace {

using client::Attachment;
using protocol::DType;

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr uint64_t kSeed = 5;

client::AttachOptions OptionsOf(const LogicalJob& job) {
  return {.socket = job.socket,
          .job = job.job,
          .run = "run",
          .layout = job.layout,
          .timeout = kTimeout};
}

std::vector<protocol::HyperParams> HyperParamsOf(protocol::Optimizer optimizer) {
  protocol::HyperParams hyper{.lr = 1e-2,
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-6,
                              .weight_decay = 0.1,
                              .momentum = 0.9,
                              .lr_decay = 0.01,
                              .initial_accumulator_value = 0.1};
  if (optimizer == protocol::Optimizer::kSgd) hyper.dampening = 0.5;
  std::vector<protocol::HyperParams> groups(3, hyper);
  groups[1].lr = 3e-3;
  groups[2].weight_decay = 0;
  return groups;
}

// The mean over any world is k/16 with |k| < 64; rank r of w differs from it by a multiple of
// (2r - (w - 1))/16. Every value has 8 bits.
std::vector<std::byte> GradientOf(const protocol::Layout& layout, uint32_t param, uint64_t t,
                                  uint32_t rank, uint32_t world_size) {
  const DType dtype = layout.spec().dtype;
  const uint64_t width = protocol::SizeBytes(dtype);
  std::vector<std::byte> bytes(layout.params()[param].elems * width);
  for (uint64_t i = 0; i < layout.params()[param].elems; ++i) {
    uint64_t mixed = (layout.params()[param].name_hash + i) * 0x9E3779B97F4A7C15U + t;
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9U;
    const int mean = static_cast<int>(mixed >> 57) - 64;
    const int spread = static_cast<int>(mixed >> 50 & 31);
    const int offset = 2 * static_cast<int>(rank) - (static_cast<int>(world_size) - 1);
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(mean + spread * offset) / 16);
    const uint32_t stored = dtype == DType::kFloat32 ? bits : bits >> 16;
    std::memcpy(bytes.data() + i * width, &stored, width);
  }
  return bytes;
}

absl::Status TrainRank(const LogicalJob& job, const LogicalTraining& training, uint32_t rank) {
  client::AttachOptions options = OptionsOf(job);
  options.rank = rank;
  options.world_size = training.world_size;
  ASSIGN_OR_RETURN(const auto session, Attachment::Attach(std::move(options)));
  if (session->writes_initial()) RETURN_IF_ERROR(WriteInitial(*session, kSeed));
  const protocol::Layout& layout = session->layout();
  for (uint64_t t = training.first; t < training.end; ++t) {
    for (uint32_t param = 0; param < layout.params().size(); ++param) {
      const uint64_t gradient = training.gradient_of ? training.gradient_of(param, t) : t;
      if (!layout.params()[param].trainable || gradient == 0) continue;
      RETURN_IF_ERROR(session->AddGradient(
          param, GradientOf(layout, param, gradient, rank, training.world_size), kTimeout));
    }
    const std::string extra = absl::StrCat("rank ", rank, " step ", t);
    RETURN_IF_ERROR(session
                        ->Step(t, HyperParamsOf(layout.spec().optimizer), /*max_grad_norm=*/0,
                               std::as_bytes(std::span(extra)), kTimeout)
                        .status());
  }
  return session->Detach();
}

}  // namespace

protocol::LayoutSpec MakeMixedLayout(protocol::Optimizer optimizer, protocol::Format format,
                                     DType dtype) {
  protocol::LayoutSpec spec;
  spec.dtype = dtype;
  spec.optimizer = optimizer;
  spec.format = format;
  spec.seed = 9;
  for (uint32_t group = 0; group < 4; ++group) {
    const std::string prefix = absl::StrCat("layer", group, ".");
    spec.params.push_back({prefix + "weight", {257, 129}, group, 0});
    spec.params.push_back({prefix + "frozen", {513}, group, 0, /*trainable=*/false});
    spec.params.push_back({prefix + "bias", {1001}, group, 1});
    spec.params.push_back({prefix + "scale", {}, group, 2});
    spec.group_names.push_back(absl::StrCat("layer", group));
  }
  spec.params.push_back({"embedding.weight", {700}, 4, 0, /*trainable=*/false});
  spec.group_names.emplace_back("embedding");
  return spec;
}

void PrintTo(const StateKind& kind, std::ostream* out) { *out << kind.name; }

std::vector<StateKind> KindsOfAllOptimizers(const std::vector<StateKind>& formats) {
  std::vector<StateKind> kinds;
  for (const protocol::OptimizerInfo& info : protocol::kOptimizers) {
    for (StateKind kind : formats) {
      kind.name = std::string(info.name) + "_" + kind.name;
      kind.optimizer = info.optimizer;
      kinds.push_back(std::move(kind));
    }
  }
  return kinds;
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> StartWithSwap(const TempDir& dir,
                                                             const LogicalJob& job,
                                                             uint32_t world_size) {
  std::vector<std::string> settings = {
      absl::StrCat("swap.paths=[\"", dir.Make("a"), "\", \"", dir.Make("b"), "\"]"),
      "swap.capacity=16MiB", "update.block_elems=4096", "dram.limit=6MiB"};
  absl::Status refused;
  {
    ASSIGN_OR_RETURN(const auto daemon, DaemonProcess::Start(job.socket, settings));
    client::AttachOptions options = OptionsOf(job);
    options.world_size = world_size;
    refused = Attachment::Attach(std::move(options)).status();
  }
  std::smatch least;
  const std::string hint = protocol::HintOf(refused);
  if (!std::regex_search(hint, least, std::regex("at least ([0-9]+) bytes"))) return refused;
  ASSIGN_OR_RETURN(const protocol::Layout layout, protocol::Layout::Create(job.layout));
  const uint64_t state_bytes = protocol::StateBytes(job.layout.optimizer, job.layout.format,
                                                    job.layout.dtype, layout.trainable_elems());
  settings.back() = absl::StrCat("dram.limit=", std::stoull(least[1]) + state_bytes / 2);
  return DaemonProcess::Start(job.socket, settings);
}

absl::Status Train(const LogicalJob& job, const LogicalTraining& training) {
  std::vector<absl::Status> statuses(training.world_size);
  {
    std::vector<std::jthread> ranks;
    for (uint32_t rank = 0; rank < training.world_size; ++rank) {
      ranks.emplace_back([&, rank] { statuses[rank] = TrainRank(job, training, rank); });
    }
  }
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::StatusOr<LogicalState> ReadLogicalState(const LogicalJob& job, uint32_t world_size) {
  client::AttachOptions options = OptionsOf(job);
  options.world_size = world_size;
  ASSIGN_OR_RETURN(const auto session, Attachment::Attach(std::move(options)));
  const protocol::LayoutSpec& spec = session->layout().spec();
  const uint64_t width = protocol::SizeBytes(spec.dtype);
  LogicalState state;
  for (uint32_t group = 0; group < spec.group_names.size(); ++group) {
    ASSIGN_OR_RETURN(const client::Lease lease, session->Fetch(group, kTimeout));
    for (uint32_t param = 0; param < spec.params.size(); ++param) {
      const protocol::ParamPlace& place = session->layout().params()[param];
      if (place.group != group) continue;
      std::vector<uint32_t>& bits = state[spec.params[param].name + "/weights"];
      bits.resize(place.elems);
      for (uint64_t i = 0; i < place.elems; ++i) {
        std::memcpy(&bits[i], lease.bytes.data() + (place.offset_elems + i) * width, width);
      }
    }
    RETURN_IF_ERROR(session->Release(lease));
  }
  for (uint32_t param = 0; param < spec.params.size(); ++param) {
    if (!spec.params[param].trainable) continue;
    const std::string& name = spec.params[param].name;
    for (const std::string& kept : protocol::StateNames(spec.optimizer)) {
      std::vector<float> values(session->layout().params()[param].elems);
      ASSIGN_OR_RETURN(const uint64_t updates,
                       session->ReadState({.param = name, .state = kept}, values, kTimeout));
      std::vector<uint32_t>& bits = state[absl::StrCat(name, "/", kept)];
      bits.resize(values.size());
      std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
      state[name + "/step"] = {static_cast<uint32_t>(updates)};
    }
  }
  RETURN_IF_ERROR(session->Detach());
  return state;
}

std::vector<std::string> Differences(const LogicalState& a, const LogicalState& b) {
  std::vector<std::string> names;
  for (const auto& [name, bits] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second != bits) names.push_back(name);
  }
  for (const auto& [name, bits] : b) {
    if (!a.contains(name)) names.push_back(name);
  }
  return names;
}

}  // namespace forebay::testing
