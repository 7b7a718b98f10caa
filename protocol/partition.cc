// SPDX-License-Identifier: Apache-2.0
#include "protocol/partition.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/limits.h"
#include "protocol/os/status_macros.h"

namespace forebay::protocol {
namespace {

constexpr uint64_t kComparisonsMax = uint64_t{1} << 26;

absl::Status BadPartition(std::string_view message) { return MakeError(ErrorId::kLayout, message); }

std::string Describe(const BoxSpec& box) {
  return absl::StrCat(box.runs, " runs of ", box.run_elems, " elements from element ",
                      box.first_elem, " every ", box.stride_elems);
}

std::string Describe(const PartitionSpec& partition) {
  return absl::StrCat("the partition of group ", partition.group, ", owner ", partition.owner,
                      ", replica ", partition.replica);
}

// Shape and bounds of one box. No sum of a client's numbers is formed before it is known to fit.
absl::Status CheckBox(std::span<const BoxedParam> params, const PartitionSpec& partition,
                      const BoxSpec& box) {
  if (box.param >= params.size() || params[box.param].group != partition.group) {
    return BadPartition(absl::StrCat(Describe(partition), " has a box of parameter ", box.param,
                                     ", which is not in that group"));
  }
  const BoxedParam& param = params[box.param];
  const auto bad = [&](auto... what) {
    return BadPartition(absl::StrCat("box of parameter ", std::string(param.name), " (",
                                     Describe(box), ")", what...));
  };
  if (box.runs == 0 || box.run_elems == 0) return bad(" has no elements");
  if (box.runs == 1 ? box.stride_elems != box.run_elems : box.stride_elems <= box.run_elems) {
    return bad(": the stride is above the length of a run, or equal to it where there is one run");
  }
  const bool run_fits =
      box.run_elems <= param.elems && box.first_elem <= param.elems - box.run_elems;
  if (!run_fits ||
      box.runs - 1 > (param.elems - box.run_elems - box.first_elem) / box.stride_elems) {
    return bad(" ends outside of the parameter, which has ", param.elems, " elements");
  }
  return absl::OkStatus();
}

absl::Status CheckPartition(std::span<const BoxedParam> params, uint32_t groups,
                            const PartitionSpec& partition) {
  if (partition.group >= groups || partition.owner >= kOwnersMax ||
      partition.replica >= kReplicasMax) {
    return BadPartition(absl::StrCat(Describe(partition), " is out of bounds: ", groups,
                                     " groups, at most ", kOwnersMax, " owners and ", kReplicasMax,
                                     " replicas"));
  }
  if (partition.boxes.empty()) {
    return BadPartition(absl::StrCat(Describe(partition), " has no boxes: leave it out"));
  }
  for (size_t i = 0; i < partition.boxes.size(); ++i) {
    const BoxSpec& box = partition.boxes[i];
    RETURN_IF_ERROR(CheckBox(params, partition, box));
    if (i == 0) continue;
    const BoxSpec& before = partition.boxes[i - 1];
    if (std::tie(before.param, before.first_elem) >= std::tie(box.param, box.first_elem)) {
      return BadPartition(absl::StrCat(Describe(partition), " has a box of parameter ",
                                       std::string(params[box.param].name),
                                       " out of order: boxes ascend by parameter and element"));
    }
  }
  return absl::OkStatus();
}

// Whether a run of `box` has an element in [begin, end).
bool HasRunIn(const BoxSpec& box, uint64_t begin, uint64_t end) {
  uint64_t index = 0;
  if (begin >= box.first_elem + box.run_elems) {
    index = (begin - box.first_elem - box.run_elems) / box.stride_elems + 1;
  }
  return index < box.runs && box.first_elem + index * box.stride_elems < end;
}

// Whether checked boxes with a.first_elem <= b.first_elem share an element; adds to `comparisons`.
bool Overlap(const BoxSpec& a, const BoxSpec& b, uint64_t& comparisons) {
  ++comparisons;
  if (a.runs > 1 && b.runs > 1 && a.stride_elems == b.stride_elems) {
    // Run i of a and run j of b overlap where -b.run_elems < b.first - a.first + (j - i) * stride <
    // a.run_elems: with runs shorter than the stride only two values of i - j can do that.
    const uint64_t rows = (b.first_elem - a.first_elem) / a.stride_elems;
    const uint64_t rest = (b.first_elem - a.first_elem) % a.stride_elems;
    if (rest < a.run_elems && rows < a.runs) return true;
    return a.stride_elems - rest < b.run_elems && rows + 1 < a.runs;
  }
  const BoxSpec& few = a.runs <= b.runs ? a : b;
  const BoxSpec& many = a.runs <= b.runs ? b : a;
  for (uint64_t run = 0; run < few.runs && comparisons <= kComparisonsMax; ++run, ++comparisons) {
    const uint64_t begin = few.first_elem + run * few.stride_elems;
    if (HasRunIn(many, begin, begin + few.run_elems)) return true;
  }
  return false;
}

struct ReplicaBox {
  uint32_t replica = 0;
  const BoxSpec* box = nullptr;
};

// Boxes of one parameter and replica, in ascending order of the first element.
absl::Status CheckDisjoint(const BoxedParam& param, std::span<const ReplicaBox> boxes,
                           uint64_t& comparisons) {
  std::vector<const BoxSpec*> open;  // boxes that reach into the range of the current box
  for (const ReplicaBox& entry : boxes) {
    const BoxSpec& box = *entry.box;
    std::erase_if(open, [&](const BoxSpec* other) { return other->end_elem() <= box.first_elem; });
    for (const BoxSpec* other : open) {
      if (Overlap(*other, box, comparisons)) {
        return BadPartition(absl::StrCat("parameter ", std::string(param.name), ", replica ",
                                         entry.replica, ": boxes overlap: ", Describe(*other),
                                         " and ", Describe(box)));
      }
      if (comparisons > kComparisonsMax) {
        return BadPartition(absl::StrCat("parameter ", std::string(param.name),
                                         ": its boxes have too many different strides"));
      }
    }
    open.push_back(&box);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPartitions(std::span<const BoxedParam> params, uint32_t groups,
                             std::span<const PartitionSpec> partitions, Coverage coverage) {
  if (partitions.size() > kPartitionsMax) {
    return BadPartition(
        absl::StrCat(partitions.size(), " partitions (at most ", kPartitionsMax, ")"));
  }
  size_t box_count = 0;
  std::vector<std::vector<ReplicaBox>> by_param(params.size());
  for (size_t i = 0; i < partitions.size(); ++i) {
    const PartitionSpec& partition = partitions[i];
    RETURN_IF_ERROR(CheckPartition(params, groups, partition));
    const auto key = [](const PartitionSpec& p) { return std::tuple(p.group, p.owner, p.replica); };
    if (i > 0 && key(partitions[i - 1]) >= key(partition)) {
      return BadPartition(
          absl::StrCat(Describe(partition), " is out of order: group, owner and replica ascend"));
    }
    box_count += partition.boxes.size();
    if (box_count > kBoxesMax) {
      return BadPartition(absl::StrCat("more than ", kBoxesMax, " boxes"));
    }
    for (const BoxSpec& box : partition.boxes) {
      by_param[box.param].push_back({partition.replica, &box});
    }
  }
  uint64_t comparisons = 0;
  for (size_t p = 0; p < params.size(); ++p) {
    std::vector<ReplicaBox>& boxes = by_param[p];
    std::sort(boxes.begin(), boxes.end(), [](const ReplicaBox& a, const ReplicaBox& b) {
      return std::tie(a.replica, a.box->first_elem) < std::tie(b.replica, b.box->first_elem);
    });
    uint64_t home_elems = 0;
    for (size_t begin = 0, end = 0; begin < boxes.size(); begin = end) {
      while (end < boxes.size() && boxes[end].replica == boxes[begin].replica) {
        if (boxes[end].replica == 0) home_elems += boxes[end].box->elems();
        ++end;
      }
      RETURN_IF_ERROR(
          CheckDisjoint(params[p], std::span(boxes).subspan(begin, end - begin), comparisons));
    }
    if (coverage == Coverage::kWhole && home_elems != params[p].elems) {
      return BadPartition(absl::StrCat("parameter ", std::string(params[p].name), ": ", home_elems,
                                       " of its ", params[p].elems,
                                       " elements are in partitions of replica 0"));
    }
  }
  return absl::OkStatus();
}

}  // namespace forebay::protocol
