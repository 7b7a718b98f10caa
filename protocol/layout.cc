// SPDX-License-Identifier: Apache-2.0
#include "protocol/layout.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::protocol {
namespace {

std::string Describe(const ParamSpec& param) {
  return absl::StrCat(param.name, "[", absl::StrJoin(param.shape, ", "), "] in group ", param.group,
                      ", parameter group ", param.param_group, param.trainable ? "" : ", frozen");
}

absl::Status BadLayout(std::string_view message) { return MakeError(ErrorId::kLayout, message); }

// The begin of a long name, in whole characters of UTF-8: a message may name thousands of groups.
std::string Shown(const std::string& name) {
  constexpr size_t kNameShownBytesMax = 1024;
  if (name.size() <= kNameShownBytesMax) return name;
  size_t end = kNameShownBytesMax;
  while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xc0) == 0x80) --end;
  return absl::StrCat(name.substr(0, end), "...");
}

absl::Status CheckParamGroups(const LayoutSpec& spec) {
  const auto last = std::ranges::max_element(spec.params, {}, &ParamSpec::param_group);
  if (last->param_group < kParamGroupsMax) return absl::OkStatus();
  return MakeError(ErrorId::kLayout,
                   absl::StrCat("the layout has ", uint64_t{last->param_group} + 1,
                                " parameter groups (at most ", kParamGroupsMax, "): parameter ",
                                last->name, " is in parameter group ", last->param_group),
                   "join parameter groups with the same hyper-parameters");
}

absl::StatusOr<uint64_t> CheckedElems(const ParamSpec& param) {
  if (param.name.empty() || param.name.size() > kNameBytesMax) {
    return MakeError(ErrorId::kLayout,
                     absl::StrCat("a parameter's name has ", param.name.size(), " bytes, not 1 to ",
                                  kNameBytesMax),
                     "shorten the names of the modules that the parameter is in");
  }
  if (param.shape.size() > kDimsMax) {
    return BadLayout(absl::StrCat("parameter ", param.name, " has ", param.shape.size(),
                                  " dimensions (at most ", kDimsMax, ")"));
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

absl::Status CheckGradDType(const LayoutSpec& spec) {
  const DType dtype = spec.grad_dtype.value_or(spec.dtype);
  if (dtype == spec.dtype || dtype == DType::kFloat32) return absl::OkStatus();
  return MakeError(ErrorId::kOption,
                   absl::StrCat("gradients in ", std::string(Name(dtype)), " for ",
                                std::string(Name(spec.dtype)), " weights"),
                   "deliver gradients in the weights' dtype or in float32");
}

}  // namespace

uint64_t NameHash(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : name) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  }
  return hash;
}

absl::StatusOr<Layout> Layout::Create(LayoutSpec spec) {
  if (spec.params.empty() || spec.params.size() > kParamsMax) {
    return BadLayout(
        absl::StrCat("the layout has ", spec.params.size(), " parameters, not 1 to ", kParamsMax));
  }
  if (!IsKnown(spec.dtype) || StatePlanes(spec.optimizer, spec.format, spec.dtype).empty()) {
    return MakeError(
        ErrorId::kOption,
        absl::StrCat("optimizer ", std::string(Name(spec.optimizer)), " with format ",
                     std::string(Name(spec.format)), " does not support ",
                     std::string(Name(spec.dtype)), " parameters"),
        "float32 and float16 parameters take format fp32; bfloat16 parameters take exact, bf16, "
        "int8 or fp32");
  }
  RETURN_IF_ERROR(CheckGradDType(spec));
  RETURN_IF_ERROR(CheckParamGroups(spec));
  if (!spec.partitions.empty() && Info(spec.optimizer).passes > 1) {
    return MakeError(ErrorId::kUnsupported,
                     absl::StrCat("optimizer ", std::string(Name(spec.optimizer)),
                                  " with sharded attachment: it needs norms of whole parameters "
                                  "between its two passes"),
                     "attach shared, or choose another optimizer");
  }
  const uint32_t group_count = spec.params.back().group + 1;
  if (spec.params.back().group >= kGroupsMax || spec.group_names.size() != group_count) {
    return BadLayout(absl::StrCat("the layout has ", spec.group_names.size(), " group names for ",
                                  group_count, " groups (one for each, at most ", kGroupsMax, ")"));
  }
  Layout layout;
  layout.spec_ = std::move(spec);
  RETURN_IF_ERROR(layout.PlaceParams());
  RETURN_IF_ERROR(layout.PlacePartitions());
  return layout;
}

absl::Status Layout::PlaceParams() {
  std::set<std::string_view> names;
  for (uint32_t i = 0; i < spec_.params.size(); ++i) {
    const ParamSpec& param = spec_.params[i];
    ASSIGN_OR_RETURN(const uint64_t elems, CheckedElems(param));
    if (!names.insert(param.name).second) {
      return BadLayout(absl::StrCat("parameter ", param.name, " is listed twice"));
    }
    const bool opens_group = groups_.size() == param.group;
    // `param.group + 1` could wrap around: it is the client's number.
    if (!opens_group && (groups_.empty() || param.group != groups_.size() - 1)) {
      return BadLayout(absl::StrCat("parameter ", Describe(param),
                                    " breaks the order: groups ascend from 0 without a gap"));
    }
    if (opens_group) {
      groups_.push_back({.weights_offset_bytes = 0, .elems = 0, .param_begin = i, .param_end = i});
    }
    GroupPlace& group = groups_.back();
    params_.push_back({.group = param.group,
                       .param_group = param.param_group,
                       .trainable = param.trainable,
                       .offset_elems = group.elems,
                       .elems = elems,
                       .name_hash = NameHash(param.name)});
    param_groups_ = std::max(param_groups_, param.param_group + 1);
    total_elems_ += elems;
    if (param.trainable) trainable_elems_ += elems;
    group.elems += elems;
    group.param_end = i + 1;
    if (group.elems > kGroupElemsMax) {
      return BadLayout(
          absl::StrCat("group ", param.group, " has more than ", kGroupElemsMax, " elements"));
    }
  }
  return absl::OkStatus();
}

absl::Status Layout::PlacePartitions() {
  if (is_shared()) {
    owners_.push_back({.owner = 0, .weights_bytes = 0, .states_elems = 0});
    for (uint32_t g = 0; g < groups_.size(); ++g) {
      PartitionSpec whole{.group = g, .owner = 0, .replica = 0, .boxes = {}};
      for (uint32_t p = groups_[g].param_begin; p < groups_[g].param_end; ++p) {
        const uint64_t elems = params_[p].elems;
        whole.boxes.push_back(
            {.param = p, .first_elem = 0, .run_elems = elems, .stride_elems = elems, .runs = 1});
      }
      PlacePartition(whole, owners_.front());
      groups_[g].weights_offset_bytes = partitions_[g].weights_offset_bytes;
    }
    return absl::OkStatus();
  }
  std::vector<BoxedParam> boxed;
  for (size_t p = 0; p < params_.size(); ++p) {
    boxed.push_back({spec_.params[p].name, params_[p].group, params_[p].elems});
  }
  RETURN_IF_ERROR(CheckPartitions(boxed, static_cast<uint32_t>(groups_.size()), spec_.partitions,
                                  spec_.is_part ? Coverage::kPart : Coverage::kWhole));
  std::map<uint32_t, size_t> places;  // by owner
  for (const PartitionSpec& partition : spec_.partitions) {
    const auto [place, is_new] = places.try_emplace(partition.owner, owners_.size());
    if (is_new) {
      owners_.push_back({.owner = partition.owner, .weights_bytes = 0, .states_elems = 0});
    }
    PlacePartition(partition, owners_[place->second]);
  }
  return absl::OkStatus();
}

void Layout::PlacePartition(const PartitionSpec& partition, OwnerPlace& owner) {
  PartitionPlace place{.group = partition.group,
                       .owner = partition.owner,
                       .replica = partition.replica,
                       .weights_offset_bytes = owner.weights_bytes,
                       .elems = 0,
                       .gradient_elems = 0,
                       .box_begin = static_cast<uint32_t>(boxes_.size()),
                       .box_end = 0};
  for (const BoxSpec& box : partition.boxes) {
    boxes_.push_back({.box = box,
                      .partition = static_cast<uint32_t>(partitions_.size()),
                      .partition_elem = place.elems,
                      .states_elem = owner.states_elems});
    place.elems += box.elems();
    if (params_[box.param].trainable) {
      owner.states_elems = RoundUp(owner.states_elems + box.elems(), states_align_elems());
      place.gradient_elems = place.elems;
    }
  }
  place.box_end = static_cast<uint32_t>(boxes_.size());
  owner.weights_bytes += RoundUp(place.elems * SizeBytes(spec_.dtype), kPageBytes);
  const uint64_t unit_bytes = std::min(place.elems, kGradUnitElems) * sizeof(float);
  const uint64_t gradient_bytes = place.gradient_elems * SizeBytes(grad_dtype());
  const uint64_t weights_bytes = place.elems * SizeBytes(spec_.dtype);
  largest_gradient_bytes_ =
      std::max(largest_gradient_bytes_,
               RoundUp(std::max({gradient_bytes, weights_bytes, unit_bytes}), kGradAlignBytes));
  partitions_.push_back(place);
}

uint64_t Layout::states_align_elems() const {
  return spec_.format == Format::kInt8 ? kScaleElems : kStatesAlignElems;
}

uint64_t Layout::states_elems() const {
  uint64_t elems = 0;
  for (const OwnerPlace& owner : owners_) elems += owner.states_elems;
  return elems;
}

uint64_t Layout::weights_bytes() const {
  uint64_t bytes = 0;
  for (const OwnerPlace& owner : owners_) bytes += owner.weights_bytes;
  return bytes;
}

uint64_t Layout::largest_piece_bytes() const {
  return std::min(largest_gradient_bytes_, kGradPieceBytesMax);
}

uint64_t Layout::partition_bytes(uint32_t partition) const {
  return partitions_[partition].elems * SizeBytes(spec_.dtype);
}

uint64_t Layout::gradient_bytes(uint32_t partition) const {
  return partitions_[partition].gradient_elems * SizeBytes(grad_dtype());
}

std::span<const BoxPlace> Layout::boxes_of(uint32_t partition) const {
  const PartitionPlace& place = partitions_[partition];
  return boxes().subspan(place.box_begin, place.box_end - place.box_begin);
}

std::string Layout::PartitionName(uint32_t partition) const {
  const PartitionPlace& place = partitions_[partition];
  std::string group = Shown(spec_.group_names[place.group]);
  return is_shared() ? group : absl::StrCat(group, " of rank ", WorldRank(place.owner));
}

std::string Layout::DescribePartition(uint32_t partition) const {
  return absl::StrCat("group ", partitions_[partition].group, " (", PartitionName(partition), ")");
}

std::string Layout::Difference(const LayoutSpec& have, const LayoutSpec& want) {
  const auto differ = [](std::string_view what, const auto& a, const auto& b) {
    return absl::StrCat(std::string(what), ": the job has ", a, ", this client wants ", b);
  };
  if (have.dtype != want.dtype) {
    return differ("dtype", std::string(Name(have.dtype)), std::string(Name(want.dtype)));
  }
  const DType have_grad = have.grad_dtype.value_or(have.dtype);
  const DType want_grad = want.grad_dtype.value_or(want.dtype);
  if (have_grad != want_grad) {
    return differ("gradients' dtype", std::string(Name(have_grad)), std::string(Name(want_grad)));
  }
  if (have.partitions.empty() != want.partitions.empty()) {
    const auto mode = [](const LayoutSpec& spec) {
      return spec.partitions.empty() ? "shared" : "sharded";
    };
    return differ("attachment", mode(have), mode(want));
  }
  if (have.is_part != want.is_part) {
    const auto nodes = [](const LayoutSpec& spec) { return spec.is_part ? "several" : "one"; };
    return differ("nodes", nodes(have), nodes(want));
  }
  if (have.first_rank != want.first_rank) {
    return differ("first rank of the node", have.first_rank, want.first_rank);
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
  std::map<std::string_view, bool> trained;
  for (const ParamSpec& param : have.params) trained.emplace(param.name, param.trainable);
  for (const ParamSpec& param : want.params) {
    const auto found = trained.find(param.name);
    if (found == trained.end() || found->second == param.trainable) continue;
    const auto word = [](bool is_trained) { return is_trained ? "trained" : "frozen"; };
    return differ(absl::StrCat("parameter ", param.name), word(found->second),
                  word(param.trainable));
  }
  for (size_t i = 0; i < have.params.size(); ++i) {
    if (!(have.params[i] == want.params[i])) {
      return differ(absl::StrCat("parameter ", i), Describe(have.params[i]),
                    Describe(want.params[i]));
    }
  }
  if (have.group_names != want.group_names) return "group names differ";
  return have.partitions == want.partitions ? std::string() : std::string("partitions differ");
}

}  // namespace forebay::protocol
