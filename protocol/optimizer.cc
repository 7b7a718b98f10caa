// SPDX-License-Identifier: Apache-2.0
#include "protocol/optimizer.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"

namespace forebay::protocol {
namespace {

constexpr Format kFormats[] = {Format::kFp32, Format::kExact, Format::kBf16, Format::kInt8};

constexpr bool IsConsistent() {
  for (size_t i = 0; i < kOptimizerCount; ++i) {
    const OptimizerInfo& info = kOptimizers[i];
    if (static_cast<size_t>(info.optimizer) != i + 1) return false;
    if (info.moments.size() != kMomentShapes[i].count) return false;
  }
  return true;
}
static_assert(IsConsistent(), "kOptimizers follows the enum, its moments kMomentShapes");

DType MomentType(const OptimizerInfo& info, Format format, size_t moment) {
  if (format == Format::kBf16) return DType::kBFloat16;
  if (format != Format::kInt8) return DType::kFloat32;
  return IsSquare(info.optimizer, moment) ? DType::kUInt8 : DType::kInt8;
}

std::vector<Plane> MakePlanes(const OptimizerInfo& info, const StateFormat& state_format) {
  const auto [format, weights_dtype] = state_format;
  std::vector<Plane> planes;
  if (format != Format::kFp32) {
    planes.push_back({"remainder", DType::kInt16});
  } else if (weights_dtype != DType::kFloat32) {
    planes.push_back({"master", DType::kFloat32});
  }
  for (size_t moment = 0; moment < info.moments.size(); ++moment) {
    planes.push_back({info.moments[moment].name, MomentType(info, format, moment)});
  }
  if (format != Format::kInt8) return planes;
  for (const MomentInfo& moment : info.moments) {
    planes.push_back({moment.scale_name, DType::kFloat32, kScaleElems});
  }
  return planes;
}

struct PlanesEntry {
  Optimizer optimizer;
  StateFormat format;
  std::vector<Plane> planes;
};

std::vector<PlanesEntry> MakeAllPlanes() {
  std::vector<PlanesEntry> all;
  for (const OptimizerInfo& info : kOptimizers) {
    for (const StateFormat& format : kStateFormats) {
      all.push_back({info.optimizer, format, MakePlanes(info, format)});
    }
  }
  return all;
}

}  // namespace

std::string_view Describe(HyperRange range) {
  switch (range) {
    case HyperRange::kFinite:
      return "finite in float32";
    case HyperRange::kNotNegative:
      return "0 or above";
    case HyperRange::kPositive:
      return "above 0 in float32";
    case HyperRange::kFraction:
      return "in [0, 1)";
    case HyperRange::kZero:
      return "0, which Nesterov's momentum needs";
  }
  return "known";
}

bool Contains(HyperRange range, double value) {
  const bool finite = std::fabs(value) <= std::numeric_limits<float>::max();
  switch (range) {
    case HyperRange::kFinite:
      return finite;
    case HyperRange::kNotNegative:
      return finite && value >= 0;
    case HyperRange::kPositive:
      return finite && value >= std::numeric_limits<float>::min();
    case HyperRange::kFraction:
      return value >= 0 && value < 1;
    case HyperRange::kZero:
      return value == 0;
  }
  return false;
}

std::string_view Name(Format format) {
  switch (format) {
    case Format::kFp32:
      return "fp32";
    case Format::kExact:
      return "exact";
    case Format::kBf16:
      return "bf16";
    case Format::kInt8:
      return "int8";
  }
  return "unknown";
}

absl::StatusOr<Optimizer> OptimizerFromName(std::string_view name) {
  std::vector<std::string> known;
  for (const OptimizerInfo& info : kOptimizers) {
    if (info.name == name) return info.optimizer;
    known.emplace_back(info.name);
  }
  return MakeError(ErrorId::kOption, absl::StrCat("unknown optimizer \"", std::string(name), "\""),
                   absl::StrCat("known: ", absl::StrJoin(known, ", ")));
}

absl::StatusOr<Format> FormatFromName(std::string_view name) {
  for (const Format format : kFormats) {
    if (name == Name(format)) return format;
  }
  return MakeError(ErrorId::kOption, absl::StrCat("unknown format \"", std::string(name), "\""),
                   "known: fp32, exact, bf16, int8");
}

absl::StatusOr<DType> WeightsDTypeFromName(std::string_view name) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (name == Name(dtype)) return dtype;
  }
  return MakeError(ErrorId::kOption, absl::StrCat("unknown dtype \"", std::string(name), "\""),
                   "known: float32, bfloat16, float16");
}

HyperParams DefaultHyperParams(Optimizer optimizer) {
  HyperParams hyper_params;
  for (const HyperParamInfo& info : Info(optimizer).hyper_params) {
    hyper_params.*info.field = info.initial;
  }
  return hyper_params;
}

absl::Status CheckHyperParams(Optimizer optimizer, const HyperParams& hyper_params) {
  for (const HyperParamInfo& info : Info(optimizer).hyper_params) {
    const double value = hyper_params.*info.field;
    if (Contains(info.range, value)) continue;
    return MakeError(ErrorId::kOption, absl::StrCat(std::string(info.name), " ", value, " is not ",
                                                    std::string(Describe(info.range))));
  }
  return absl::OkStatus();
}

std::span<const Plane> StatePlanes(Optimizer optimizer, Format format, DType weights_dtype) {
  static const std::vector<PlanesEntry> kAll = MakeAllPlanes();
  for (const PlanesEntry& entry : kAll) {
    if (entry.optimizer == optimizer && entry.format == StateFormat{format, weights_dtype}) {
      return entry.planes;
    }
  }
  return {};
}

uint64_t StateBytes(Optimizer optimizer, Format format, DType weights_dtype, uint64_t elems) {
  uint64_t bytes = 0;
  for (const Plane& plane : StatePlanes(optimizer, format, weights_dtype)) {
    bytes += PlaneBytes(plane, elems);
  }
  return bytes;
}

std::vector<std::string> StateNames(Optimizer optimizer) {
  std::vector<std::string> names = {"master"};
  for (const MomentInfo& moment : Info(optimizer).moments) names.emplace_back(moment.name);
  return names;
}

}  // namespace forebay::protocol
