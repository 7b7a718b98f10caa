// SPDX-License-Identifier: Apache-2.0
// A daemon that poisons a slot of weights as soon as the slot is released, and a gradient as soon as it has read the gradient.
// Tests see the poison if a device reads or writes too early or too late.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/flat_shards.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/wire.h"
#include "tests/client/scripted_daemon.h"
#include "tests/support/fake_cuda.h"

namespace forebay::client::internal {

// A distinct value for each element and step, so that tests see a wrong element, a wrong step or poison.
inline float WeightOf(uint64_t step, uint32_t partition, uint64_t elem) {
  return static_cast<float>(step * 1000003 + partition * 100003 + elem);
}
inline float GradientOf(uint64_t step, uint32_t param, uint64_t elem) {
  return -static_cast<float>(step * 1000003 + param * 100003 + elem);
}

// Returns the layout of units of equal size, each of parameters of equal size, with one owner.
inline protocol::LayoutSpec UnitsSpec(uint32_t units, uint32_t params_of_unit,
                                      uint64_t elems_of_param) {
  protocol::LayoutSpec spec{.dtype = protocol::DType::kFloat32,
                            .optimizer = protocol::Optimizer::kAdamW,
                            .format = protocol::Format::kFp32,
                            .params = {},
                            .group_names = {},
                            .partitions = {}};
  for (uint32_t unit = 0; unit < units; ++unit) {
    spec.group_names.push_back("g" + std::to_string(unit));
    for (uint32_t i = 0; i < params_of_unit; ++i) {
      spec.params.push_back({.name = "p" + std::to_string(spec.params.size()),
                             .shape = {elems_of_param},
                             .group = unit});
    }
  }
  return ShardFlat(std::move(spec), 1);
}

// A daemon with a job of one rank in float32. All partitions have the same size, and all parameters have the same size.
//
// Threads  The script runs on the daemon's thread. Tests may read gradients after Step has returned.
class PoisoningDaemon {
 public:
  static constexpr std::chrono::milliseconds kTimeout = kTestDeadline;

  // The grad arena has room for `gradients` partitions at once.
  PoisoningDaemon(protocol::LayoutSpec spec, uint64_t gradients,
                  std::shared_ptr<gpu::Device> device)
      : layout_(std::make_shared<const protocol::Layout>(
            protocol::Layout::Create(std::move(spec)).value())),
        elems_(layout_->partitions()[0].elems),
        slots_(6 * static_cast<uint32_t>(layout_->partitions().size())) {
    constexpr uint64_t kStepBytes = 8192;
    const uint64_t grad_bytes = gradients * slot_bytes();
    weights_ =
        Mapping::MapPrivate(std::max(layout_->weights_bytes(), slots_ * slot_bytes())).value();
    Poison(weights_->bytes());
    grad_ = Mapping::MapPrivate(grad_bytes + kStepBytes).value();
    Poison(grad_->bytes());
    gauge_ = std::make_shared<SessionGauge>();
    SessionParts parts{.layout = layout_,
                       .port = {.channel = protocol::MakeRingClientChannel(daemon_.Ends()).value(),
                                .daemon_pidfd = -1,
                                .gone_fd = daemon_.gone_fd(),
                                .explain =
                                    [](const protocol::Completion& completion) {
                                      return protocol::MakeError(
                                          static_cast<protocol::ErrorId>(completion.error),
                                          "as the script says");
                                    }},
                       .weights = weights_,
                       .grad = grad_,
                       .step_region_offset = grad_bytes,
                       .step_region_bytes = kStepBytes,
                       .gauge = gauge_,
                       .timeout = kTimeout,
                       .interrupt_check = {},
                       .device = std::move(device)};
    testing::FakeCuda::set_before_work([this] { WaitForDaemon(); });
    daemon_.Start(
        [this](const protocol::Command& command) { return std::optional(Serve(command)); });
    session_ = Attachment::Assemble(std::move(parts)).value();
  }
  ~PoisoningDaemon() {
    session_.reset();
    testing::FakeCuda::set_before_work({});
    daemon_.Stop();
  }
  PoisoningDaemon(const PoisoningDaemon&) = delete;
  PoisoningDaemon& operator=(const PoisoningDaemon&) = delete;

  // Ends the session. The caller has dropped all other references to it.
  void EndSession() { session_.reset(); }

  const std::shared_ptr<Attachment>& session() { return session_; }
  ScriptedDaemon& script() { return daemon_; }
  const protocol::Layout& layout() const { return *layout_; }
  std::span<std::byte> grad() const { return grad_->bytes(); }

  // Returns true if `bytes` are the partition's weights after the step.
  bool AreWeights(uint64_t step, uint32_t partition, std::span<const std::byte> bytes) const {
    const std::span<const float> values(reinterpret_cast<const float*>(bytes.data()), elems_);
    for (uint64_t i = 0; i < values.size(); ++i) {
      if (values[i] != WeightOf(step, partition, i)) return false;
    }
    return true;
  }

  // Returns the errors in the gradients that the last step was applied with. Gradients of absent parameters are zeros or
  // missing.
  template <typename HasGradient>
  std::vector<std::string> CheckGradients(uint64_t step, HasGradient has_gradient) const {
    std::vector<std::string> wrong;
    uint64_t elems = 0;
    for (const auto& [place, values] : committed_) {
      elems += values.size();
      for (uint64_t i = 0; i < values.size(); ++i) {
        const auto [param, elem] = PlaceOf(place.first, place.second + i);
        const float want = has_gradient(param) ? GradientOf(step, param, elem) : 0.0F;
        if (values[i] == want) continue;
        wrong.push_back("another gradient of parameter " + std::to_string(param));
        break;
      }
    }
    uint64_t least = layout_->partitions().size() * elems_;
    for (uint32_t param = 0; param < layout_->params().size(); ++param) {
      if (!has_gradient(param)) least -= layout_->params()[param].elems;
    }
    if (elems < least) wrong.emplace_back("a gradient did not arrive");
    return wrong;
  }

 private:
  static void Poison(std::span<std::byte> bytes) {
    std::ranges::fill(bytes, testing::FakeCuda::kPoison);
  }
  uint64_t slot_bytes() const { return elems_ * sizeof(float); }
  std::span<std::byte> SlotBytes(uint32_t slot) const {
    return weights_->bytes().subspan(slot * slot_bytes(), slot_bytes());
  }
  // Returns the parameter at an element of a partition, and the element of the parameter.
  std::pair<uint32_t, uint64_t> PlaceOf(uint32_t partition, uint64_t elem) const {
    for (const protocol::BoxPlace& place : layout_->boxes_of(partition)) {
      if (elem < place.partition_elem + place.box.elems()) {
        return {place.box.param, place.box.first_elem + elem - place.partition_elem};
      }
    }
    return {0, 0};
  }

  protocol::Completion Serve(const protocol::Command& command) {
    using protocol::Op;
    protocol::Completion completion = ScriptedDaemon::Success(command);
    const auto bytes = grad_->bytes().subspan(command.arena_offset_bytes, command.length_bytes);
    switch (static_cast<Op>(command.op)) {
      case Op::kFetch: {
        if (leases_.size() == slots_) {
          return ScriptedDaemon::Failure(command, protocol::ErrorId::kLimit);
        }
        // A released slot is not used again at once, so that tests can see its poison.
        uint32_t slot = last_slot_;
        do {
          slot = (slot + 1) % slots_;
        } while (leases_.contains(slot));
        last_slot_ = slot;
        leases_[slot] = command.partition;
        const auto to = SlotBytes(slot);
        for (uint64_t i = 0; i < elems_; ++i) {
          const float value = WeightOf(step_, command.partition, i);
          std::memcpy(to.data() + i * sizeof(float), &value, sizeof(value));
        }
        completion.lease_id = slot;
        completion.offset_bytes = slot * slot_bytes();
        completion.length_bytes = slot_bytes();
        return completion;
      }
      case Op::kRelease:
        leases_.erase(static_cast<uint32_t>(command.lease_id));
        Poison(SlotBytes(static_cast<uint32_t>(command.lease_id)));
        return completion;
      case Op::kGradReady: {
        std::vector<float> values(bytes.size() / sizeof(float));
        std::memcpy(values.data(), bytes.data(), bytes.size());
        if (command.attempt >= attempt_) {
          if (command.attempt > attempt_) delivered_.clear();
          attempt_ = command.attempt;
          delivered_[{command.partition, command.element_offset}] = std::move(values);
        }
        Poison(bytes);
        return completion;
      }
      case Op::kStep:
        if (!leases_.empty()) {
          return ScriptedDaemon::Failure(command, protocol::ErrorId::kLease);
        }
        completion.committed_step = step_ = command.step;
        attempt_ = 0;
        committed_.swap(delivered_);
        delivered_.clear();
        return completion;
      case Op::kWriteState:
        for (const auto& [slot, partition] : leases_) {
          if (partition == command.partition) {
            return ScriptedDaemon::Failure(command, protocol::ErrorId::kLease);
          }
        }
        return completion;
      default:
        return completion;
    }
  }

  // Waits until the daemon has handled every command that was sent. Device work that runs later cannot change what it has read.
  void WaitForDaemon() {
    const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
    while (daemon_.SeenCount() < gauge_->commands && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
  }

  std::shared_ptr<const protocol::Layout> layout_;
  const uint64_t elems_;  // elements of a partition
  const uint32_t slots_;  // most leases at once
  std::shared_ptr<Mapping> weights_;
  std::shared_ptr<Mapping> grad_;
  std::shared_ptr<SessionGauge> gauge_;
  ScriptedDaemon daemon_;
  std::shared_ptr<Attachment> session_;
  // Only the daemon's thread uses the members below until Step has returned.
  std::map<uint32_t, uint32_t> leases_;  // leased slot to its partition
  uint32_t last_slot_ = 0;
  uint64_t step_ = 0;
  uint64_t attempt_ = 0;
  using Delivered = std::map<std::pair<uint32_t, uint64_t>, std::vector<float>>;
  Delivered delivered_;
  Delivered committed_;
};

}  // namespace forebay::client::internal
