#include "pinned_mem/internal/numa.h"

#include <hwloc.h>

#include <cerrno>
#include <memory>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::pinned_mem::internal {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

struct TopologyDeleter {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};

}  // namespace

absl::Status BindToNode(std::span<std::byte> span, int numa_node) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return MakeError(ErrorId::kInternal, "hwloc cannot start");
  const std::unique_ptr<hwloc_topology, TopologyDeleter> topology(raw);
  if (hwloc_topology_load(raw) != 0) {
    return MakeError(ErrorId::kInternal, "hwloc cannot read this machine's memory");
  }
  const int nodes = hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_NUMANODE);
  const hwloc_obj_t node = numa_node < 0 ? nullptr
                                         : hwloc_get_obj_by_type(raw, HWLOC_OBJ_NUMANODE,
                                                                 static_cast<unsigned>(numa_node));
  if (node == nullptr) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("NUMA node ", numa_node, " does not exist: this machine has ",
                                  nodes, ", numbered from 0"));
  }
  if (nodes == 1) return absl::OkStatus();
  if (hwloc_set_area_membind(raw, span.data(), span.size(), node->nodeset, HWLOC_MEMBIND_BIND,
                             HWLOC_MEMBIND_BYNODESET) != 0) {
    return MakeError(
        ErrorId::kInternal,
        protocol::ErrnoText(absl::StrCat("bind memory to NUMA node ", numa_node), errno));
  }
  return absl::OkStatus();
}

}  // namespace forebay::pinned_mem::internal
