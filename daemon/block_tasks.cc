#include "daemon/block_tasks.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpu_adam/square_sum.h"
#include "cpu_adam/stream_kernel.h"
#include "cpu_adam/update_kernel.h"
#include "protocol/check.h"
#include "protocol/error.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using cpu_adam::Gradient;
using cpu_adam::GradType;
using cpu_adam::Rule;
using cpu_adam::StateFormat;
using cpu_adam::StatePlanes;
using cpu_adam::StepScalars;
using protocol::DType;
using protocol::Format;
using protocol::Optimizer;

// Elements [first, first + elems) of a run of Value at a byte offset. Offsets are the state
// machine's own.
template <typename Value>
Value* Elems(std::span<std::byte> bytes, uint64_t offset_bytes, uint64_t first, uint64_t elems) {
  FOREBAY_CHECK(offset_bytes + (first + elems) * sizeof(Value) <= bytes.size());
  return reinterpret_cast<Value*>(bytes.data() + offset_bytes) + first;
}

Gradient GradientOf(DType dtype, std::span<const std::byte> bytes) {
  return {bytes.data(), dtype == DType::kFloat32 ? GradType::kFp32 : GradType::kBf16};
}

// The two rooms number them alike.
Rule RuleOf(Optimizer optimizer) {
  static_assert(static_cast<int>(Rule::kAdamW) == static_cast<int>(Optimizer::kAdamW) &&
                static_cast<int>(Rule::kAdam) == static_cast<int>(Optimizer::kAdam) &&
                static_cast<int>(Rule::kAdamWAmsgrad) ==
                    static_cast<int>(Optimizer::kAdamWAmsgrad) &&
                static_cast<int>(Rule::kAdamAmsgrad) == static_cast<int>(Optimizer::kAdamAmsgrad) &&
                static_cast<int>(Rule::kAdagrad) == static_cast<int>(Optimizer::kAdagrad) &&
                static_cast<int>(Rule::kLion) == static_cast<int>(Optimizer::kLion) &&
                static_cast<int>(Rule::kSgd) == static_cast<int>(Optimizer::kSgd) &&
                static_cast<int>(Rule::kSgdNesterov) == static_cast<int>(Optimizer::kSgdNesterov));
  return static_cast<Rule>(optimizer);
}

// wire.h says which fields hold what.
cpu_adam::Hyper HyperOf(const protocol::HyperParams& from) {
  return {.lr = from.lr,
          .beta1 = from.beta1,
          .beta2 = from.beta2,
          .eps = from.eps,
          .weight_decay = from.weight_decay,
          .momentum = from.beta1,
          .dampening = from.beta2,
          .lr_decay = from.beta1,
          .initial_accumulator = from.beta2};
}

size_t ElemsOf(DType dtype, std::span<const std::byte> bytes) {
  return bytes.size() / protocol::SizeBytes(dtype);
}

}  // namespace

nvme::Identity MakeIdentity(const BlockIdentity& identity, uint64_t nonce) {
  const std::array<uint64_t, 4> words = {identity.job, identity.block, identity.written_step,
                                         nonce};
  nvme::Identity bytes;
  static_assert(sizeof(words) == sizeof(bytes));
  std::memcpy(bytes.data(), words.data(), sizeof(bytes));
  return bytes;
}

uint64_t PlaneOffsetBytes(std::span<const protocol::Plane> planes, size_t plane,
                          uint64_t block_elems) {
  uint64_t offset_bytes = 0;
  for (size_t i = 0; i < plane; ++i) {
    offset_bytes +=
        protocol::RoundUp(block_elems * protocol::SizeBytes(planes[i].dtype), protocol::kPageBytes);
  }
  return offset_bytes;
}

uint64_t BlockBytes(std::span<const protocol::Plane> planes, uint64_t block_elems) {
  return PlaneOffsetBytes(planes, planes.size(), block_elems);
}

uint64_t RunUpdate(const UpdateBlock& action, const UpdateMemory& memory) {
  const bool exact = memory.format == Format::kExact;
  const auto planes = protocol::StatePlanes(memory.optimizer, memory.format,
                                            exact ? DType::kBFloat16 : DType::kFloat32);
  const Rule rule = RuleOf(memory.optimizer);
  const auto format = exact ? StateFormat::kExact : StateFormat::kFp32;
  uint64_t overflows = 0;
  for (const UpdateSegment& segment : action.segments) {
    const StepScalars scalars = cpu_adam::MakeStepScalars(
        rule, HyperOf(segment.hyper), segment.optimizer_step, action.grad_scale);
    const uint64_t first = segment.block_elem;
    const uint64_t elems = segment.elems;
    const uint64_t gradient_bytes = elems * sizeof(float);
    FOREBAY_CHECK(segment.accumulator_offset_bytes + gradient_bytes <= memory.accumulators.size());
    const Gradient gradient{memory.accumulators.data() + segment.accumulator_offset_bytes,
                            GradType::kFp32};
    const size_t first_moment = exact ? 1 : 0;
    StatePlanes state{};
    if (exact) {
      state.image = Elems<uint16_t>(memory.image, segment.image_offset_bytes, 0, elems);
      state.remainder = Elems<int16_t>(memory.block, 0, first, elems);
    } else {
      state.image = Elems<float>(memory.image, segment.image_offset_bytes, 0, elems);
    }
    for (size_t i = first_moment; i < planes.size(); ++i) {
      const uint64_t offset = PlaneOffsetBytes(planes, i, action.block_elems);
      state.moments[i - first_moment] = Elems<float>(memory.block, offset, first, elems);
    }
    overflows += cpu_adam::Update(rule, format, scalars, elems, gradient, state);
  }
  return overflows;
}

absl::Status VerifyBlock(const std::optional<nvme::ExpectedContent>& expected,
                         const BlockIdentity& identity, std::span<const std::byte> bytes) {
  if (expected.has_value()) return nvme::Verify(*expected, bytes);
  const bool zeros =
      std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; });
  if (zeros && identity.written_step == 0) return absl::OkStatus();
  return protocol::MakeError(
      protocol::ErrorId::kCorrupt,
      absl::StrCat("block ", identity.block, " of job ", identity.job, " written in step ",
                   identity.written_step, " has no bytes on swap that could be verified"));
}

bool RunAddGradient(const AddGradient& action, std::span<const std::byte> contribution,
                    std::span<std::byte> accumulator) {
  const Gradient gradient = GradientOf(action.dtype, contribution);
  if (!cpu_adam::AllFinite(action.elems, gradient)) return false;
  cpu_adam::AddGradient(action.elems, gradient,
                        action.assign ? cpu_adam::AddMode::kSet : cpu_adam::AddMode::kAdd,
                        Elems<float>(accumulator, 0, 0, action.elems));
  return true;
}

double RunSumGroup(std::span<const std::byte> accumulator) {
  return cpu_adam::SumSquaresAndFinite(ElemsOf(DType::kFloat32, accumulator),
                                       GradientOf(DType::kFloat32, accumulator))
      .ToDouble();
}

bool RunCopyInitial(DType dtype, std::span<const std::byte> from, std::span<std::byte> to) {
  std::memcpy(to.data(), from.data(), from.size());
  return cpu_adam::AllFinite(ElemsOf(dtype, to), GradientOf(dtype, to));
}

}  // namespace forebay::daemon
