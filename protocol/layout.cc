#include "protocol/layout.h"

#include <algorithm>
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
