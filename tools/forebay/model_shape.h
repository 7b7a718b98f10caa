// SPDX-License-Identifier: Apache-2.0
// Models as lists of shapes, from which `forebay plan` computes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "protocol/layout.h"

namespace forebay::tools {

// Name of the group of the parameters outside the layers.
inline constexpr char kRootGroup[] = "root";

// Parameters that are gathered together. A decoder has a group for the parameters outside the layers, then one for each layer.
struct ShapeGroup {
  struct Param {
    std::string name;
    std::vector<uint64_t> shape;
  };

  std::string name;
  std::vector<Param> params;

  uint64_t elems() const;
};

struct ModelShape {
  std::string what;  // "llama"
  std::vector<ShapeGroup> groups;

  uint64_t elems() const;
};

// Shape of `params` elements in `layers` groups, or in fewer if `params` is less. Each group has one parameter.
ModelShape EvenShape(uint64_t params, uint32_t layers);

// Shape of a GPT. Each layer has attention of 4 width^2 elements, feed-forward of 8 width^2 and two norms. The model has an
// embedding of `vocab` rows and a separate head.
ModelShape DecoderShape(uint32_t layers, uint64_t width, uint64_t vocab);

// Shape of the model in a config.json of Hugging Face's transformers: model_type gpt2, llama, mistral, mixtral, qwen2 or
// qwen3.
//
// Errors  E_OPTION  another model_type, or a key is missing: names it.
absl::StatusOr<ModelShape> HuggingFaceShape(const nlohmann::json& config);

// Choices for the layout of a model. A layout that is not shared is cut like FSDP2's: each parameter along its rows into as
// many chunks as there are ranks. The last chunks may be short or empty.
struct LayoutChoice {
  protocol::DType dtype = protocol::DType::kBFloat16;
  protocol::Format format = protocol::Format::kExact;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  uint32_t ranks = 1;
  bool is_shared = false;
};
protocol::LayoutSpec LayoutOf(const ModelShape& model, const LayoutChoice& choice);

}  // namespace forebay::tools
