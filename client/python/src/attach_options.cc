// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/attach_options.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/python/src/errors.h"
#include "client/python/src/timeout.h"
#include "gpu/cuda_device.h"
#include "gpu/host_device.h"
#include "protocol/durability.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"

namespace forebay::python {
namespace nb = nanobind;
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// A parameter: name, shape, group, parameter group, trainable.
using ParamTuple = std::tuple<std::string, std::vector<uint64_t>, uint32_t, uint32_t, bool>;
// A box: parameter, first element, elements of a run, stride, runs.
using BoxTuple = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t, uint64_t>;
// A partition: group, owner, replica, boxes.
using PartitionTuple = std::tuple<uint32_t, uint32_t, uint32_t, std::vector<BoxTuple>>;
// The nodes of a job: world_ranks, first_rank, has_replicas, all_gather. has_replicas is true if other nodes hold parts that this
// node holds. all_gather is a callable that gives every rank the bytes of all ranks.
using NodesTuple = std::tuple<uint32_t, uint32_t, bool, nb::callable>;

// Options that are being read from the mapping.
struct Draft {
  client::AttachOptions options = {};
  std::optional<int> cuda_device = {};  // ordinal of the CUDA device; nullopt: host memory
  std::string cuda_driver = "libcuda.so.1";
  std::shared_ptr<EndedObjects> ended;
};

// Returns an AllGather that acquires the GIL and calls `function`, a Python callable.
client::AllGather AllGatherBy(std::shared_ptr<const void> function) {
  return [function = std::move(function)](
             const std::string& own) -> absl::StatusOr<std::vector<std::string>> {
    const nb::gil_scoped_acquire acquired;
    const nb::handle call(static_cast<PyObject*>(const_cast<void*>(function.get())));
    try {
      std::vector<std::string> all;
      for (const nb::handle one : nb::list(call(nb::bytes(own.data(), own.size())))) {
        const auto bytes = nb::cast<nb::bytes>(one);
        all.emplace_back(bytes.c_str(), bytes.size());
      }
      return all;
    } catch (nb::python_error& error) {
      if (error.matches(PyExc_KeyboardInterrupt)) {
        error.restore();
        return MakeError(ErrorId::kInterrupted, "Ctrl-C between the nodes");
      }
      const nb::str text(error.value());
      return absl::UnavailableError(text.c_str());
    } catch (const nb::cast_error&) {
      return absl::UnavailableError("all_gather gave something else than bytes");
    }
  };
}

template <typename T>
void Assign(T& to, nb::handle value) {
  to = nb::cast<T>(value);
}

protocol::DType DTypeOf(nb::handle name) {
  return ValueOrThrow(protocol::WeightsDTypeFromName(nb::cast<std::string>(name)));
}

void SetParams(Draft& draft, nb::handle value) {
  for (auto& [name, shape, group, param_group, trainable] :
       nb::cast<std::vector<ParamTuple>>(value)) {
    draft.options.layout.params.push_back({.name = std::move(name),
                                           .shape = std::move(shape),
                                           .group = group,
                                           .param_group = param_group,
                                           .trainable = trainable});
  }
}

void SetPartitions(Draft& draft, nb::handle value) {
  for (const auto& [group, owner, replica, boxes] : nb::cast<std::vector<PartitionTuple>>(value)) {
    protocol::PartitionSpec& partition = draft.options.layout.partitions.emplace_back();
    partition.group = group;
    partition.owner = owner;
    partition.replica = replica;
    for (const auto& [param, first_elem, run_elems, stride_elems, runs] : boxes) {
      partition.boxes.push_back({param, first_elem, run_elems, stride_elems, runs});
    }
  }
}

void SetNodes(Draft& draft, nb::handle value) {
  const auto [world_ranks, first_rank, has_replicas, all_gather] = nb::cast<NodesTuple>(value);
  draft.options.layout.is_part = true;
  draft.options.layout.first_rank = first_rank;
  draft.options.layout.has_replicas = has_replicas;
  draft.options.nodes = {.world_ranks = world_ranks,
                         .all_gather = AllGatherBy(EndedObjects::Keep(draft.ended, all_gather))};
}

struct Option {
  std::string_view name;
  void (*set)(Draft& draft, nb::handle value);
};

constexpr Option kOptions[] = {
    {"socket", [](Draft& d, nb::handle v) { Assign(d.options.socket, v); }},
    {"job", [](Draft& d, nb::handle v) { Assign(d.options.job, v); }},
    {"reader", [](Draft& d, nb::handle v) { Assign(d.options.reader, v); }},
    {"rank", [](Draft& d, nb::handle v) { Assign(d.options.rank, v); }},
    {"world_size", [](Draft& d, nb::handle v) { Assign(d.options.world_size, v); }},
    {"nodes", SetNodes},
    {"run", [](Draft& d, nb::handle v) { Assign(d.options.run, v); }},
    {"resume", [](Draft& d, nb::handle v) { Assign(d.options.resume, v); }},
    {"timeout",
     [](Draft& d, nb::handle v) { d.options.timeout = TimeoutOf(nb::cast<double>(v)); }},
    {"accumulate", [](Draft& d, nb::handle v) { Assign(d.options.accumulate, v); }},
    {"drain", [](Draft& d, nb::handle v) { Assign(d.options.drain, v); }},
    {"early_updates", [](Draft& d, nb::handle v) { Assign(d.options.early_updates, v); }},
    {"durability",
     [](Draft& d, nb::handle v) {
       d.options.durability.level =
           ValueOrThrow(protocol::ParseDurability(nb::cast<std::string>(v)));
     }},
    {"daemon_wait",
     [](Draft& d, nb::handle v) {
       d.options.durability.daemon_wait = TimeoutOf(nb::cast<double>(v));
     }},
    {"grad_arena_bytes",
     [](Draft& d, nb::handle v) { Assign(d.options.memory.grad_arena_bytes, v); }},
    {"extra_state_bytes",
     [](Draft& d, nb::handle v) { Assign(d.options.memory.extra_state_bytes, v); }},
    {"activation_bytes",
     [](Draft& d, nb::handle v) { Assign(d.options.memory.activation_bytes, v); }},
    {"cuda_device", [](Draft& d, nb::handle v) { Assign(d.cuda_device, v); }},
    {"cuda_driver", [](Draft& d, nb::handle v) { Assign(d.cuda_driver, v); }},
    {"dtype", [](Draft& d, nb::handle v) { d.options.layout.dtype = DTypeOf(v); }},
    {"grad_dtype", [](Draft& d, nb::handle v) { d.options.layout.grad_dtype = DTypeOf(v); }},
    {"optimizer",
     [](Draft& d, nb::handle v) {
       d.options.layout.optimizer =
           ValueOrThrow(protocol::OptimizerFromName(nb::cast<std::string>(v)));
     }},
    {"format",
     [](Draft& d, nb::handle v) {
       d.options.layout.format = ValueOrThrow(protocol::FormatFromName(nb::cast<std::string>(v)));
     }},
    {"seed", [](Draft& d, nb::handle v) { Assign(d.options.layout.seed, v); }},
    {"params", SetParams},
    {"group_names", [](Draft& d, nb::handle v) { Assign(d.options.layout.group_names, v); }},
    {"partitions", SetPartitions}};

void Set(Draft& draft, nb::handle key, nb::handle value) {
  std::string name;
  if (!nb::try_cast(key, name)) {
    Raise(MakeError(ErrorId::kOption,
                    absl::StrCat("attach: option ", nb::repr(key).c_str(), " is no name")));
  }
  const auto* const option = std::ranges::find(kOptions, name, &Option::name);
  if (option == std::end(kOptions)) {
    Raise(MakeError(ErrorId::kOption, absl::StrCat("attach has no option ", name)));
  }
  try {
    option->set(draft, value);
  } catch (const nb::cast_error&) {
    Raise(MakeError(ErrorId::kOption,
                    absl::StrCat("attach: option ", name, " is ", nb::repr(value).c_str())));
  }
}

}  // namespace

client::AttachOptions AttachOptionsFrom(const nb::dict& mapping,
                                        const std::shared_ptr<EndedObjects>& ended) {
  Draft draft{.ended = ended};
  for (const auto& [key, value] : mapping) Set(draft, key, value);
  if (draft.cuda_device.has_value()) {
    const gpu::CudaDevice::Options cuda{.ordinal = *draft.cuda_device, .soname = draft.cuda_driver};
    draft.options.device = ValueOrThrow(WithoutGil([&] { return gpu::CudaDevice::Create(cuda); }));
  } else {
    draft.options.device = std::make_shared<gpu::HostDevice>();
  }
  return std::move(draft.options);
}

}  // namespace forebay::python
