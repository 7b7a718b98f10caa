// SPDX-License-Identifier: Apache-2.0
#include "protocol/layout_codec.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/forebay.capnp.h"
#include "protocol/os/status_macros.h"

namespace forebay::protocol {
namespace {

absl::Status TooMany(const char* what, uint64_t have, uint64_t at_most) {
  return MakeError(ErrorId::kLayout,
                   absl::StrCat("the layout has ", have, " ", what, " (at most ", at_most, ")"));
}

absl::StatusOr<std::string> CheckedName(capnp::Text::Reader text) {
  if (text.size() > kNameBytesMax) {
    return MakeError(ErrorId::kLayout,
                     absl::StrCat("a name in the layout has ", text.size(), " bytes (at most ",
                                  kNameBytesMax, ")"),
                     "shorten the names of the modules that the parameter is in");
  }
  std::string name(text.begin(), text.size());
  const bool has_control = std::any_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
  });
  if (has_control) return MakeError(ErrorId::kLayout, "a name has control characters");
  return name;
}

absl::Status ReadPartitions(schema::LayoutMessage::Reader message, LayoutSpec& spec) {
  const auto partitions = message.getPartitions();
  if (partitions.size() > kPartitionsMax) {
    return TooMany("partitions", partitions.size(), kPartitionsMax);
  }
  size_t box_count = 0;
  for (const auto partition : partitions) {
    PartitionSpec out{.group = partition.getGroup(),
                      .owner = partition.getOwner(),
                      .replica = partition.getReplica(),
                      .boxes = {}};
    box_count += partition.getBoxes().size();
    if (box_count > kBoxesMax) return TooMany("boxes", box_count, kBoxesMax);
    for (const auto box : partition.getBoxes()) {
      out.boxes.push_back({.param = box.getParam(),
                           .first_elem = box.getFirstElem(),
                           .run_elems = box.getRunElems(),
                           .stride_elems = box.getStrideElems(),
                           .runs = box.getRuns()});
    }
    spec.partitions.push_back(std::move(out));
  }
  return absl::OkStatus();
}

absl::StatusOr<LayoutSpec> Read(schema::LayoutMessage::Reader message) {
  LayoutSpec spec;
  ASSIGN_OR_RETURN(const std::string dtype, CheckedName(message.getDtype()));
  ASSIGN_OR_RETURN(spec.dtype, WeightsDTypeFromName(dtype));
  ASSIGN_OR_RETURN(const std::string grad_dtype, CheckedName(message.getGradDtype()));
  if (!grad_dtype.empty()) {
    ASSIGN_OR_RETURN(spec.grad_dtype, WeightsDTypeFromName(grad_dtype));
  }
  ASSIGN_OR_RETURN(const std::string optimizer, CheckedName(message.getOptimizer()));
  ASSIGN_OR_RETURN(spec.optimizer, OptimizerFromName(optimizer));
  ASSIGN_OR_RETURN(const std::string format, CheckedName(message.getFormat()));
  ASSIGN_OR_RETURN(spec.format, FormatFromName(format));

  spec.seed = message.getSeed();
  spec.is_part = message.getIsPart();
  spec.first_rank = message.getFirstRank();
  spec.has_replicas = message.getHasReplicas();

  const auto group_names = message.getGroupNames();
  if (group_names.size() > kGroupsMax) return TooMany("groups", group_names.size(), kGroupsMax);
  for (const auto name : group_names) {
    ASSIGN_OR_RETURN(std::string checked, CheckedName(name));
    spec.group_names.push_back(std::move(checked));
  }
  const auto params = message.getParams();
  if (params.size() > kParamsMax) return TooMany("parameters", params.size(), kParamsMax);
  for (const auto param : params) {
    ParamSpec out;
    ASSIGN_OR_RETURN(out.name, CheckedName(param.getName()));
    const auto shape = param.getShape();
    if (shape.size() > kDimsMax) return TooMany("dimensions", shape.size(), kDimsMax);
    for (const uint64_t dim : shape) out.shape.push_back(dim);
    out.group = param.getGroup();
    out.param_group = param.getParamGroup();
    out.trainable = !param.getFrozen();
    spec.params.push_back(std::move(out));
  }
  RETURN_IF_ERROR(ReadPartitions(message, spec));
  return spec;
}

void Write(const LayoutSpec& spec, schema::LayoutMessage::Builder message) {
  message.setDtype(std::string(Name(spec.dtype)).c_str());
  message.setIsPart(spec.is_part);
  message.setFirstRank(spec.first_rank);
  message.setHasReplicas(spec.has_replicas);
  if (spec.grad_dtype) message.setGradDtype(std::string(Name(*spec.grad_dtype)).c_str());
  message.setOptimizer(std::string(Name(spec.optimizer)).c_str());
  message.setFormat(std::string(Name(spec.format)).c_str());
  message.setSeed(spec.seed);
  auto group_names = message.initGroupNames(static_cast<unsigned>(spec.group_names.size()));
  for (unsigned i = 0; i < group_names.size(); ++i) {
    group_names.set(i, spec.group_names[i].c_str());
  }
  auto params = message.initParams(static_cast<unsigned>(spec.params.size()));
  for (unsigned i = 0; i < params.size(); ++i) {
    const ParamSpec& param = spec.params[i];
    params[i].setName(param.name.c_str());
    auto shape = params[i].initShape(static_cast<unsigned>(param.shape.size()));
    for (unsigned d = 0; d < shape.size(); ++d) shape.set(d, param.shape[d]);
    params[i].setGroup(param.group);
    params[i].setParamGroup(param.param_group);
    params[i].setFrozen(!param.trainable);
  }
  auto partitions = message.initPartitions(static_cast<unsigned>(spec.partitions.size()));
  for (unsigned i = 0; i < partitions.size(); ++i) {
    const PartitionSpec& partition = spec.partitions[i];
    partitions[i].setGroup(partition.group);
    partitions[i].setOwner(partition.owner);
    partitions[i].setReplica(partition.replica);
    auto boxes = partitions[i].initBoxes(static_cast<unsigned>(partition.boxes.size()));
    for (unsigned b = 0; b < boxes.size(); ++b) {
      const BoxSpec& box = partition.boxes[b];
      boxes[b].setParam(box.param);
      boxes[b].setFirstElem(box.first_elem);
      boxes[b].setRunElems(box.run_elems);
      boxes[b].setStrideElems(box.stride_elems);
      boxes[b].setRuns(box.runs);
    }
  }
}

}  // namespace

absl::StatusOr<std::vector<std::byte>> EncodeLayout(const LayoutSpec& spec) {
  if (spec.params.size() > kParamsMax) return TooMany("parameters", spec.params.size(), kParamsMax);
  if (spec.group_names.size() > kGroupsMax) {
    return TooMany("groups", spec.group_names.size(), kGroupsMax);
  }
  capnp::MallocMessageBuilder builder;
  Write(spec, builder.initRoot<schema::LayoutMessage>());
  const kj::Array<capnp::word> words = capnp::messageToFlatArray(builder);
  const auto bytes = words.asBytes();
  if (bytes.size() > kLayoutBytesMax) return TooMany("bytes", bytes.size(), kLayoutBytesMax);
  std::vector<std::byte> out(bytes.size());
  std::memcpy(out.data(), bytes.begin(), bytes.size());
  return out;
}

absl::StatusOr<LayoutSpec> DecodeLayout(std::span<const std::byte> bytes) {
  if (bytes.size() > kLayoutBytesMax) return TooMany("bytes", bytes.size(), kLayoutBytesMax);
  if (bytes.empty() || bytes.size() % sizeof(capnp::word) != 0) {
    return MakeError(ErrorId::kProtocol, absl::StrCat("the layout message has ", bytes.size(),
                                                      " bytes, not a multiple of 8"));
  }
  auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), bytes.data(), bytes.size());
  capnp::ReaderOptions options;
  // The reader may traverse each word once, and some more for empty lists.
  options.traversalLimitInWords = 2 * words.size() + 64;
  options.nestingLimit = 8;

  absl::StatusOr<LayoutSpec> spec = MakeError(ErrorId::kProtocol, "not a layout message");
  const auto exception = kj::runCatchingExceptions([&] {
    capnp::FlatArrayMessageReader reader(words, options);
    spec = Read(reader.getRoot<schema::LayoutMessage>());
  });
  KJ_IF_MAYBE (e, exception) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("not a layout message: ", e->getDescription().cStr()));
  }
  return spec;
}

}  // namespace forebay::protocol
