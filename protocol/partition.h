// SPDX-License-Identifier: Apache-2.0
// The elements of parameters that an owner holds: partitions of groups, which consist of boxes.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace forebay::protocol {

// A strided set of elements of one parameter: `runs` runs of `run_elems` elements, each
// `stride_elems` after the one before. A part of consecutive elements is one run; a block of columns
// of a matrix is one run a row.
struct BoxSpec {
  uint32_t param = 0;  // index of the parameter in the layout
  uint64_t first_elem = 0;
  uint64_t run_elems = 0;
  // Distance from one run to the next, above run_elems. Equal to run_elems if the box is one run.
  uint64_t stride_elems = 0;
  uint64_t runs = 1;

  uint64_t elems() const { return run_elems * runs; }
  // End of the box: the element after its last one. The box must have been checked.
  uint64_t end_elem() const { return first_elem + (runs - 1) * stride_elems + run_elems; }

  bool operator==(const BoxSpec&) const = default;
};

// Part of a group that one owner holds. Replica 0 is the state's home: reads, norms and exports count only replica 0.
struct PartitionSpec {
  uint32_t group = 0;
  uint32_t owner = 0;
  uint32_t replica = 0;
  // At least one box, in ascending order of (param, first_elem).
  std::vector<BoxSpec> boxes;

  bool operator==(const PartitionSpec&) const = default;
};

// Fields of a parameter that CheckPartitions needs.
struct BoxedParam {
  std::string_view name;
  uint32_t group = 0;
  uint64_t elems = 0;
};

enum class Coverage : uint8_t { kWhole, kPart };  // kPart: other nodes hold some of the elements

// Checks partitions that a client has sent: the ascending order of (group, owner, replica), every box's shape and bounds
// (without a sum that could wrap around), no overlap of two boxes of one replica, and, with kWhole, that replica 0 holds every
// element.
//
// Limits  Boxes of one parameter whose strides differ are compared run by run, with a bound on that
//         work: no list of boxes takes longer than about a second.
// Errors  E_LAYOUT  names the partition, the parameter and the box.
absl::Status CheckPartitions(std::span<const BoxedParam> params, uint32_t groups,
                             std::span<const PartitionSpec> partitions,
                             Coverage coverage = Coverage::kWhole);

}  // namespace forebay::protocol
