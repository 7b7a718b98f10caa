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

// Alignment of a box's states, in elements: no two boxes share a cache line.
inline constexpr uint64_t kStatesAlignElems = 64;

// Alignment of gradients in a grad arena.
inline constexpr uint64_t kGradAlignBytes = 64;

// A parameter of the model. Parameters are in the model's order: those of one group are neighbours, and groups ascend from 0.
// Within a group frozen parameters should come last (PartitionPlace::gradient_elems).
struct ParamSpec {
  // Unique name, 1 to kNameBytesMax bytes.
  std::string name;
  // Dimensions, none 0. Empty: a scalar.
  std::vector<uint64_t> shape;
  // Number of the group, whose parameters are gathered together; < kGroupsMax.
  uint32_t group = 0;
  // Number of the parameter group, which has its own hyper-parameters; < kParamGroupsMax.
  uint32_t param_group = 0;
  // A frozen parameter has weights and no states: it takes no gradient and is never updated.
  bool trainable = true;

  bool operator==(const ParamSpec&) const = default;
};

// Input of a layout. Independent of the world size: ranks belong to the job's sessions, not to its layout.
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
  // Partitions of sharded attachment. Empty: shared attachment, in which the node is the only owner and holds every group
  // whole.
  std::vector<PartitionSpec> partitions;
  // True for a job over several nodes: the partitions are those of one node's ranks, and other nodes hold the other elements.
  bool is_part = false;
  uint32_t first_rank = 0;  // the rank of owner 0 in the world
  // True if other nodes hold some of these partitions too. The nodes then compare the weights.
  bool has_replicas = false;

  bool operator==(const LayoutSpec&) const = default;
};

// Returns the key of a parameter in stochastic rounding. The key does not depend on the parameter's place in the layout.
//
// Source  FNV-1a, 64 bits: Fowler, Noll & Vo, draft-eastlake-fnv.
uint64_t NameHash(std::string_view name);

struct ParamPlace {
  uint32_t group;
  uint32_t param_group;
  bool trainable;
  uint64_t offset_elems;  // offset from the start of its group
  uint64_t elems;
  uint64_t name_hash;
};

struct GroupPlace {
  // Shared attachment: offset from the start of the weights arena, a multiple of kPageBytes. Sharded attachment: 0.
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
  // Offset from the start of the owner's weights, a multiple of kPageBytes.
  uint64_t weights_offset_bytes;
  uint64_t elems;
  // Number of elements of the gradient, which ends after the last trainable box. Frozen parameters at the end of their group
  // take no memory in gradients and in their sums. 0: all parameters are frozen.
  uint64_t gradient_elems;
  // The partition's boxes are [box_begin, box_end).
  uint32_t box_begin;
  uint32_t box_end;
};

// Place of a box's elements. They lie end to end in the weights of its partition and, if the parameter is trainable, in the
// states of its owner. In the states each box begins at a multiple of kStatesAlignElems (int8: kScaleElems); the elements
// between boxes are padding, which weights and gradients do not have.
struct BoxPlace {
  BoxSpec box;
  uint32_t partition;
  uint64_t partition_elem;  // offset from the start of the partition
  uint64_t states_elem;     // offset from the start of the owner's states
};

struct OwnerPlace {
  uint32_t owner;
  uint64_t weights_bytes;
  uint64_t states_elems;  // elements of the states, with padding
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
  // Least number of parameter groups in a step call: 1 + the largest ParamSpec::param_group.
  uint32_t param_groups() const { return param_groups_; }
  // Most parameter groups in a step call.
  uint32_t param_group_rows() const { return std::max(param_groups_, kParamGroupRowsMin); }
  // Partitions in the order of the spec. With shared attachment partition g is group g.
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
  // Alignment of a box in the states, in elements.
  uint64_t states_align_elems() const;
  DType grad_dtype() const { return spec_.grad_dtype.value_or(spec_.dtype); }
  // Bytes that hold the gradient of any partition, its weights, or a range of its masters. Rounded up to kGradAlignBytes.
  uint64_t largest_gradient_bytes() const { return largest_gradient_bytes_; }
  // Bytes of the largest range of a partition that is delivered at once.
  uint64_t largest_piece_bytes() const;
  // Bytes of a partition's weights, and of its gradient (gradient_elems). With shared attachment partition g is group g.
  uint64_t partition_bytes(uint32_t partition) const;
  uint64_t gradient_bytes(uint32_t partition) const;
  std::span<const BoxPlace> boxes_of(uint32_t partition) const;
  // Returns the number in the world of a rank of this node.
  uint32_t WorldRank(uint32_t rank) const { return spec_.first_rank + rank; }
  // Returns the name of a partition for messages: the name of the group, sharded "NAME of rank 1".
  std::string PartitionName(uint32_t partition) const;
  // Returns "group 3 (NAME)", sharded "group 3 (NAME of rank 1)".
  std::string DescribePartition(uint32_t partition) const;

  // Describes the first difference between two layouts, for E_LAYOUT. Empty if the layouts are equal.
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
