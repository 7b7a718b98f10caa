#include "protocol/layout.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::protocol {
namespace {

// A moment of an optimizer; a square is kept as its root where it is coded.
struct Moment {
  std::string_view name;
  std::string_view scale_name;
  bool square = false;
};

struct OptimizerEntry {
  Optimizer optimizer;
  std::string_view name;
  std::span<const Moment> moments;
};

constexpr Moment kExpAvg{"exp_avg", "exp_avg_scale"};
constexpr Moment kExpAvgSq{"exp_avg_sq", "exp_avg_sq_scale", true};

constexpr std::array kAdam = {kExpAvg, kExpAvgSq};
constexpr std::array kAmsgrad = {kExpAvg, kExpAvgSq,
                                 Moment{"max_exp_avg_sq", "max_exp_avg_sq_scale", true}};
constexpr std::array kAdagrad = {Moment{"sum", "sum_scale", true}};
constexpr std::array kLion = {kExpAvg};
constexpr std::array kSgd = {Moment{"momentum_buffer", "momentum_buffer_scale"}};

constexpr OptimizerEntry kOptimizers[] = {
    {Optimizer::kAdamW, "adamw", kAdam},
    {Optimizer::kAdam, "adam", kAdam},
    {Optimizer::kAdamWAmsgrad, "adamw_amsgrad", kAmsgrad},
    {Optimizer::kAdamAmsgrad, "adam_amsgrad", kAmsgrad},
    {Optimizer::kAdagrad, "adagrad", kAdagrad},
    {Optimizer::kLion, "lion", kLion},
    {Optimizer::kSgd, "sgd", kSgd},
    {Optimizer::kSgdNesterov, "sgd_nesterov", kSgd},
    {Optimizer::kLamb, "lamb", kAdam},
};

constexpr Format kFormats[] = {Format::kFp32, Format::kExact, Format::kBf16, Format::kInt8};
constexpr DType kWeightTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

bool Serves(Format format, DType weights_dtype) {
  if (format == Format::kFp32) {
    return std::find(std::begin(kWeightTypes), std::end(kWeightTypes), weights_dtype) !=
           std::end(kWeightTypes);
  }
  return weights_dtype == DType::kBFloat16;
}

DType MomentType(Format format, const Moment& moment) {
  if (format == Format::kBf16) return DType::kBFloat16;
  if (format != Format::kInt8) return DType::kFloat32;
  return moment.square ? DType::kUInt8 : DType::kInt8;
}

std::vector<Plane> MakePlanes(const OptimizerEntry& entry, Format format, DType weights_dtype) {
  std::vector<Plane> planes;
  if (format != Format::kFp32) {
    planes.push_back({"remainder", DType::kInt16});
  } else if (weights_dtype != DType::kFloat32) {
    planes.push_back({"master", DType::kFloat32});
  }
  for (const Moment& moment : entry.moments) {
    planes.push_back({moment.name, MomentType(format, moment)});
  }
  if (format != Format::kInt8) return planes;
  for (const Moment& moment : entry.moments) {
    planes.push_back({moment.scale_name, DType::kFloat32, kScaleElems});
  }
  return planes;
}

struct PlanesEntry {
  Optimizer optimizer;
  Format format;
  DType weights_dtype;
  std::vector<Plane> planes;
};

std::vector<PlanesEntry> MakeAllPlanes() {
  std::vector<PlanesEntry> all;
  for (const OptimizerEntry& entry : kOptimizers) {
    for (const Format format : kFormats) {
      for (const DType dtype : kWeightTypes) {
        if (!Serves(format, dtype)) continue;
        all.push_back({entry.optimizer, format, dtype, MakePlanes(entry, format, dtype)});
      }
    }
  }
  return all;
}

const OptimizerEntry* Find(Optimizer optimizer) {
  const auto* const entry =
      std::find_if(std::begin(kOptimizers), std::end(kOptimizers),
                   [optimizer](const OptimizerEntry& one) { return one.optimizer == optimizer; });
  return entry == std::end(kOptimizers) ? nullptr : entry;
}

std::string Describe(const ParamSpec& param) {
  return absl::StrCat(param.name, "[", absl::StrJoin(param.shape, ", "), "] in group ", param.group,
                      ", parameter group ", param.param_group);
}

absl::Status BadLayout(std::string_view message) { return MakeError(ErrorId::kLayout, message); }

absl::StatusOr<uint64_t> CheckedElems(const ParamSpec& param) {
  if (param.name.empty() || param.name.size() > kNameBytesMax) {
    return BadLayout(absl::StrCat("a parameter's name has ", param.name.size(), " bytes (1 to ",
                                  kNameBytesMax, ")"));
  }
  if (param.shape.size() > kDimsMax) {
    return BadLayout(absl::StrCat("parameter ", param.name, " has ", param.shape.size(),
                                  " dimensions (at most ", kDimsMax, ")"));
  }
  if (param.param_group >= kParamGroupsMax) {
    return BadLayout(absl::StrCat("parameter ", param.name, " is in parameter group ",
                                  param.param_group, " (at most ", kParamGroupsMax, " groups)"));
  }
  uint64_t elems = 1;
  for (const uint64_t dim : param.shape) {
    if (dim == 0 || dim > kGroupElemsMax || elems > kGroupElemsMax / dim) {
      return BadLayout(absl::StrCat("parameter ", Describe(param), " has no elements or more than ",
                                    kGroupElemsMax));
    }
    elems *= dim;
  }
  return elems;
}

}  // namespace

std::string_view Name(Optimizer optimizer) {
  const OptimizerEntry* const entry = Find(optimizer);
  return entry == nullptr ? "unknown" : entry->name;
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
  for (const OptimizerEntry& entry : kOptimizers) {
    if (entry.name == name) return entry.optimizer;
    known.emplace_back(entry.name);
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

std::span<const Plane> StatePlanes(Optimizer optimizer, Format format, DType weights_dtype) {
  static const std::vector<PlanesEntry> kAll = MakeAllPlanes();
  for (const PlanesEntry& entry : kAll) {
    if (entry.optimizer == optimizer && entry.format == format &&
        entry.weights_dtype == weights_dtype) {
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

absl::StatusOr<Layout> Layout::Create(LayoutSpec spec) {
  if (spec.world_size == 0 || spec.world_size > kWorldMax) {
    return MakeError(ErrorId::kRank,
                     absl::StrCat("world size ", spec.world_size, " (1 to ", kWorldMax, ")"));
  }
  if (spec.params.empty() || spec.params.size() > kParamsMax) {
    return BadLayout(absl::StrCat(spec.params.size(), " parameters (1 to ", kParamsMax, ")"));
  }
  if (!IsKnown(spec.dtype) || StatePlanes(spec.optimizer, spec.format, spec.dtype).empty()) {
    return MakeError(
        ErrorId::kOption,
        absl::StrCat("optimizer ", std::string(Name(spec.optimizer)), " with format ",
                     std::string(Name(spec.format)), " does not serve ",
                     std::string(Name(spec.dtype)), " parameters"),
        "float32 and float16 parameters take format fp32; bfloat16 parameters take exact, bf16, "
        "int8 or fp32");
  }
  const uint32_t group_count = spec.params.back().group + 1;
  if (spec.params.back().group >= kGroupsMax || spec.group_names.size() != group_count) {
    return BadLayout(absl::StrCat(spec.group_names.size(), " group names for ", group_count,
                                  " groups (at most ", kGroupsMax, ")"));
  }

  Layout layout;
  std::set<std::string_view> names;
  const bool scaled = spec.format == Format::kInt8;
  const uint64_t param_align = scaled ? kScaleElems : 1;
  const uint64_t pad_elems = spec.world_size * (scaled ? kScaleElems : kPartitionAlignElems);
  const uint64_t width = SizeBytes(spec.dtype);
  for (uint32_t i = 0; i < spec.params.size(); ++i) {
    const ParamSpec& param = spec.params[i];
    ASSIGN_OR_RETURN(const uint64_t elems, CheckedElems(param));
    if (!names.insert(param.name).second) {
      return BadLayout(absl::StrCat("parameter ", param.name, " is there twice"));
    }
    const bool opens_group = layout.groups_.size() == param.group;
    // No sum with the client's word: the largest group + 1 is 0.
    if (!opens_group && (layout.groups_.empty() || param.group != layout.groups_.size() - 1)) {
      return BadLayout(absl::StrCat("parameter ", Describe(param),
                                    " breaks the order: groups ascend from 0 without a gap"));
    }
    if (opens_group) {
      layout.groups_.push_back({.weights_offset_bytes = 0,
                                .elems = 0,
                                .padded_elems = 0,
                                .param_begin = i,
                                .param_end = i});
    }
    GroupPlace& group = layout.groups_.back();
    group.elems = RoundUp(group.elems, param_align);
    layout.total_elems_ += elems;
    layout.params_.push_back({param.group, param.param_group, group.elems, elems});
    group.elems += elems;
    group.param_end = i + 1;
    if (group.elems > kGroupElemsMax) {
      return BadLayout(
          absl::StrCat("group ", param.group, " has more than ", kGroupElemsMax, " elements"));
    }
  }
  for (GroupPlace& group : layout.groups_) {
    group.padded_elems = RoundUp(group.elems, pad_elems);
    group.weights_offset_bytes = layout.weights_bytes_;
    const uint64_t group_bytes = group.padded_elems * width;
    layout.weights_bytes_ += RoundUp(group_bytes, kPageBytes);
    layout.largest_group_bytes_ = std::max(layout.largest_group_bytes_, group_bytes);
    layout.padded_elems_ += group.padded_elems;
  }
  layout.spec_ = std::move(spec);
  return layout;
}

uint64_t Layout::partition_elems(uint32_t group) const {
  return groups_[group].padded_elems / spec_.world_size;
}

uint64_t Layout::group_bytes(uint32_t group) const {
  return groups_[group].padded_elems * SizeBytes(spec_.dtype);
}

std::string Layout::Difference(const LayoutSpec& have, const LayoutSpec& want) {
  const auto differ = [](std::string_view what, const auto& a, const auto& b) {
    return absl::StrCat(std::string(what), ": the job has ", a, ", this client wants ", b);
  };
  if (have.world_size != want.world_size)
    return differ("world size", have.world_size, want.world_size);
  if (have.dtype != want.dtype) {
    return differ("dtype", std::string(Name(have.dtype)), std::string(Name(want.dtype)));
  }
  if (have.optimizer != want.optimizer) {
    return differ("optimizer", std::string(Name(have.optimizer)),
                  std::string(Name(want.optimizer)));
  }
  if (have.format != want.format) {
    return differ("format", std::string(Name(have.format)), std::string(Name(want.format)));
  }
  if (have.seed != want.seed) return differ("seed", have.seed, want.seed);
  if (have.params.size() != want.params.size()) {
    return differ("number of parameters", have.params.size(), want.params.size());
  }
  for (size_t i = 0; i < have.params.size(); ++i) {
    if (!(have.params[i] == want.params[i])) {
      return differ(absl::StrCat("parameter ", i), Describe(have.params[i]),
                    Describe(want.params[i]));
    }
  }
  return have == want ? std::string() : std::string("group names differ");
}

}  // namespace forebay::protocol
