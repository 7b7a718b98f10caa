// The layout of a job: which parameter lies where in its group's weights, which planes its states
// have. Client and daemon compute it with the same functions, so that neither has to believe the
// other.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/optimizer.h"

namespace forebay::protocol {

inline constexpr uint32_t kGroupsMax = 16384;
inline constexpr uint32_t kParamsMax = 1 << 20;
inline constexpr uint32_t kWorldMax = 1024;
inline constexpr uint32_t kParamGroupsMax = 64;
inline constexpr uint32_t kDimsMax = 8;
inline constexpr uint64_t kGroupElemsMax = uint64_t{1} << 32;
inline constexpr uint32_t kNameBytesMax = 1024;

// Partitions start on a multiple of this many elements, so that they never share a cache line.
inline constexpr uint64_t kPartitionAlignElems = 64;

// What a client asks for, in the order of the model: parameters of one group are neighbours, groups
// ascend from 0.
struct ParamSpec {
  std::string name;             // unique, 1 to kNameBytesMax bytes
  std::vector<uint64_t> shape;  // empty: a scalar; no dimension is 0
  uint32_t group = 0;           // unit of fetch and grad_ready
  uint32_t param_group = 0;     // which hyper-parameters; < kParamGroupsMax

  bool operator==(const ParamSpec&) const = default;
};

struct LayoutSpec {
  uint32_t world_size = 1;
  DType dtype = DType::kFloat32;  // of weights and gradients
  Optimizer optimizer = Optimizer::kAdamW;
  Format format = Format::kFp32;
  uint64_t seed = 0;  // of formats that round by drawing: bf16, int8
  std::vector<ParamSpec> params;
  std::vector<std::string> group_names;  // one per group, for messages and the trace

  bool operator==(const LayoutSpec&) const = default;
};

struct ParamPlace {
  uint32_t group;
  uint32_t param_group;
  uint64_t offset_elems;  // from the start of its group
  uint64_t elems;
};

struct GroupPlace {
  uint64_t weights_offset_bytes;  // from the start of the weights arena; a multiple of kPageBytes
  uint64_t elems;  // up to the end of its last parameter: without padding, but that between
                   // parameters of format int8, which is zero permanently too
  uint64_t
      padded_elems;  // a multiple of world_size * kPartitionAlignElems (int8: kScaleElems); the padding is
                     // zero permanently
  uint32_t param_begin;  // its parameters are [param_begin, param_end)
  uint32_t param_end;
};

// A checked LayoutSpec with every offset. Immutable.
//
// A rank's partition of group g is the elements [r, r + 1) * padded_elems / world_size of the
// group.
class Layout {
 public:
  // Errors  E_LAYOUT  a limit above is broken, a name repeats, groups do not ascend; names the
  //         parameter.
  //         E_OPTION  (optimizer, format, dtype) is not supported.
  static absl::StatusOr<Layout> Create(LayoutSpec spec);

  const LayoutSpec& spec() const { return spec_; }
  std::span<const ParamPlace> params() const { return params_; }
  std::span<const GroupPlace> groups() const { return groups_; }
  uint64_t total_elems() const { return total_elems_; }      // parameters, without padding
  uint64_t padded_elems() const { return padded_elems_; }    // all groups
  uint64_t weights_bytes() const { return weights_bytes_; }  // size of the weights arena
  uint64_t largest_group_bytes() const { return largest_group_bytes_; }  // padded, in dtype
  uint64_t partition_elems(uint32_t group) const;                        // per rank
  uint64_t group_bytes(uint32_t group) const;                            // padded, in dtype

  // First difference between two layouts in words, for E_LAYOUT; empty where they are equal.
  static std::string Difference(const LayoutSpec& have, const LayoutSpec& want);

 private:
  Layout() = default;

  LayoutSpec spec_;
  std::vector<ParamPlace> params_;
  std::vector<GroupPlace> groups_;
  uint64_t total_elems_ = 0;
  uint64_t padded_elems_ = 0;
  uint64_t weights_bytes_ = 0;
  uint64_t largest_group_bytes_ = 0;
};

}  // namespace forebay::protocol
