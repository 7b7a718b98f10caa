// SPDX-License-Identifier: Apache-2.0
// The layout of a job: where each parameter lies in the weights and in the states of its owner, and
// which planes the states have. Client and daemon compute it with the same functions, so that neither
// has to trust the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/limits.h"
#include "protocol/optimizer.h"
#include "protocol/partition.h"

namespace forebay::protocol {

// Step requests and records of jobs have room for the hyper-parameters of at least this many parameter groups. The release
// before has room for exactly this many, so the bytes of its jobs are the same.
inline constexpr uint32_t kParamGroupRowsMin = 64;

// A box's states begin at a multiple of this many elements, so that no two share a cache line.
inline constexpr uint64_t kStatesAlignElems = 64;

// Gradients in a grad arena begin at a multiple of this.
inline constexpr uint64_t kGradAlignBytes = 64;

// A parameter of the model. Parameters are in the model's order: those of one group are neighbours, and groups ascend from 0.
// Within a group frozen parameters should come last (PartitionPlace::gradient_elems).
struct ParamSpec {
  // Unique, 1 to kNameBytesMax bytes.
  std::string name;
  // Empty: a scalar; no dimension is 0.
  std::vector<uint64_t> shape;
  // Gathered together; < kGroupsMax.
  uint32_t group = 0;
  // Number of the parameter group, which has its own hyper-parameters; < kParamGroupsMax.
  uint32_t param_group = 0;
  // A frozen parameter has weights and no states: it takes no gradient and is never updated.
  bool trainable = true;

  bool operator==(const ParamSpec&) const = default;
};

// Independent of the world size: ranks belong to the job's sessions, not to its layout.
struct LayoutSpec {
  DType dtype = DType::kFloat32;  // type of the weights
  // Element type of delivered gradients: the type of the weights, or float32. Empty: the type of the weights.
  std::optional<DType> grad_dtype = {};
  Optimizer optimizer = Optimizer::kAdamW;
  Format format = Format::kFp32;
  uint64_t seed = 0;  // for formats that round stochastically: bf16, int8
  std::vector<ParamSpec> params;
  // Name of each group, for messages and the trace.
  std::vector<std::string> group_names;
  // Empty: shared attachment, where the node is the one owner and holds every group whole.
  std::vector<PartitionSpec> partitions;
  // True for a job over several nodes: the partitions are those of one node's ranks, and other nodes hold the other elements.
  bool is_part = false;
  uint32_t first_rank = 0;  // the rank of owner 0 in the world
  // True if other nodes hold some of these partitions too. The nodes then compare the weights.
  bool has_replicas = false;

  bool operator==(const LayoutSpec&) const = default;
};

// The key of a parameter in stochastic rounding, whatever its place in the layout.
//
// Source  FNV-1a, 64 bits: Fowler, Noll & Vo, draft-eastlake-fnv.
uint64_t NameHash(std::string_view name);

struct ParamPlace {
  uint32_t group;
  uint32_t param_group;
  bool trainable;
  uint64_t offset_elems;  // from the start of its group
  uint64_t elems;
  uint64_t name_hash;
};

struct GroupPlace {
  // Shared attachment: from the start of the weights arena; a multiple of kPageBytes. Else 0.
  uint64_t weights_offset_bytes;
  uint64_t elems;
  // The group's parameters are [param_begin, param_end).
  uint32_t param_begin;
  uint32_t param_end;
};

struct PartitionPlace {
  uint32_t group;
  uint32_t owner;
  uint32_t replica;
  // From the start of the owner's weights; a multiple of kPageBytes.
  uint64_t weights_offset_bytes;
  uint64_t elems;
  // The gradient ends after the last trainable box: frozen parameters at the end of their group take no room in gradients and
  // in their sums. 0: all parameters are frozen.
  uint64_t gradient_elems;
  // The partition's boxes are [box_begin, box_end).
  uint32_t box_begin;
  uint32_t box_end;
};

// A box's elements lie end to end in the weights of its partition and, where the parameter is
// trainable, in the states of its owner. There each box begins at a multiple of kStatesAlignElems
// (int8: kScaleElems); what lies between is padding, which weights and gradients do not have.
struct BoxPlace {
  BoxSpec box;
  uint32_t partition;
  uint64_t partition_elem;  // from the start of the partition
  uint64_t states_elem;     // from the start of the owner's states
};

struct OwnerPlace {
  uint32_t owner;
  uint64_t weights_bytes;
  uint64_t states_elems;  // with padding
};

// A checked LayoutSpec with every offset. Immutable.
class Layout {
 public:
  // Errors  E_LAYOUT  a limit above is broken, a name repeats, groups do not ascend, partitions break
  //                   a rule of CheckPartitions; names the parameter.
  //         E_OPTION  (optimizer, format, dtype) or the gradients' dtype is not supported.
  //         E_UNSUPPORTED  LAMB with partitions: it needs sums over whole parameters.
  static absl::StatusOr<Layout> Create(LayoutSpec spec);

  const LayoutSpec& spec() const { return spec_; }
  std::span<const ParamPlace> params() const { return params_; }
  std::span<const GroupPlace> groups() const { return groups_; }
  // Parameter groups that a step call names at least: 1 + the largest ParamSpec::param_group.
  uint32_t param_groups() const { return param_groups_; }
  // Parameter groups that a step call has room for.
  uint32_t param_group_rows() const { return std::max(param_groups_, kParamGroupRowsMin); }
  // In the order of the spec; with shared attachment partition g is group g.
  std::span<const PartitionPlace> partitions() const { return partitions_; }
  std::span<const BoxPlace> boxes() const { return boxes_; }
  std::span<const OwnerPlace> owners() const { return owners_; }
  bool is_shared() const { return spec_.partitions.empty(); }

  uint64_t total_elems() const { return total_elems_; }
  uint64_t trainable_elems() const { return trainable_elems_; }
  // Elements of the states of all owners, with padding.
  uint64_t states_elems() const;
  // Bytes of the weights arena, which holds all owners' weights.
  uint64_t weights_bytes() const;
  // Each box begins at a multiple of this many elements in the states.
  uint64_t states_align_elems() const;
  DType grad_dtype() const { return spec_.grad_dtype.value_or(spec_.dtype); }
  // Rounded up to kGradAlignBytes: room for the gradient of any partition, for its weights, and for a
  // range of its masters.
  uint64_t largest_gradient_bytes() const { return largest_gradient_bytes_; }
  // Bytes of a partition's weights, and of its gradient (gradient_elems). With shared attachment partition g is group g.
  uint64_t partition_bytes(uint32_t partition) const;
  uint64_t gradient_bytes(uint32_t partition) const;
  std::span<const BoxPlace> boxes_of(uint32_t partition) const;
  // The number in the world of a rank of this node.
  uint32_t WorldRank(uint32_t rank) const { return spec_.first_rank + rank; }
  // For messages: the name of the group, sharded "NAME of rank 1".
  std::string PartitionName(uint32_t partition) const;
  // "group 3 (NAME)", sharded "group 3 (NAME of rank 1)".
  std::string DescribePartition(uint32_t partition) const;

  // First difference between two layouts in words, for E_LAYOUT; empty where they are equal.
  static std::string Difference(const LayoutSpec& have, const LayoutSpec& want);

 private:
  Layout() = default;

  absl::Status PlaceParams();
  absl::Status PlacePartitions();
  void PlacePartition(const PartitionSpec& partition, OwnerPlace& owner);

  LayoutSpec spec_;
  std::vector<ParamPlace> params_;
  std::vector<GroupPlace> groups_;
  std::vector<PartitionPlace> partitions_;
  std::vector<BoxPlace> boxes_;
  std::vector<OwnerPlace> owners_;
  uint32_t param_groups_ = 0;
  uint64_t total_elems_ = 0;
  uint64_t trainable_elems_ = 0;
  uint64_t largest_gradient_bytes_ = 0;
};

}  // namespace forebay::protocol
