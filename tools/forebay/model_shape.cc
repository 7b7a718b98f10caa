// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/model_shape.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// Upper bounds for the layers of a config, the experts of a layer, and the experts of all layers. They bound the list of
// parameters.
constexpr uint64_t kLayersMax = 4096;
constexpr uint64_t kExpertsMax = 1024;
constexpr uint64_t kExpertsInAllMax = uint64_t{1} << 17;

uint64_t ElemsOf(const std::vector<uint64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>());
}

// Reads the numbers of a config.json.
class Numbers {
 public:
  explicit Numbers(const nlohmann::json& config) : config_(config) {}

  // Returns the number of a key, which must be 1 to `max`.
  uint64_t Get(const char* key, uint64_t max = uint64_t{1} << 24) {
    const auto found = config_.find(key);
    if (found != config_.end() && found->is_number_unsigned()) {
      const auto number = found->get<uint64_t>();
      if (number >= 1 && number <= max) return number;
    }
    if (missing_.empty()) missing_ = absl::StrCat(key, " of 1 to ", max);
    return 1;
  }
  uint64_t GetOr(const char* key, uint64_t otherwise) {
    const auto found = config_.find(key);
    return found == config_.end() || found->is_null() ? otherwise : Get(key);
  }
  bool Is(const char* key, bool otherwise) const {
    const auto found = config_.find(key);
    return found != config_.end() && found->is_boolean() ? found->get<bool>() : otherwise;
  }
  absl::Status status() const {
    if (missing_.empty()) return absl::OkStatus();
    return MakeError(ErrorId::kOption, absl::StrCat("the config has no number ", missing_));
  }

 private:
  const nlohmann::json& config_;
  std::string missing_;
};

ShapeGroup::Param Vector(std::string name, uint64_t elems) { return {std::move(name), {elems}}; }

// nn.Linear.
void AddLinear(const std::string& name, uint64_t out, uint64_t in, bool has_bias,
               ShapeGroup& group) {
  group.params.push_back({name + ".weight", {out, in}});
  if (has_bias) group.params.push_back(Vector(name + ".bias", out));
}

ModelShape Gpt2(Numbers& numbers) {
  const uint64_t width = numbers.Get("n_embd");
  const uint64_t inner = numbers.GetOr("n_inner", 4 * width);
  ModelShape model;
  ShapeGroup& root = model.groups.emplace_back();
  root.name = kRootGroup;
  root.params = {{"wte.weight", {numbers.Get("vocab_size"), width}},
                 {"wpe.weight", {numbers.Get("n_positions"), width}},
                 Vector("ln_f.weight", width),
                 Vector("ln_f.bias", width)};
  const uint64_t layers = numbers.Get("n_layer", kLayersMax);
  for (uint64_t layer = 0; layer < layers; ++layer) {
    ShapeGroup group{.name = absl::StrCat("h.", layer), .params = {}};
    for (const char* norm : {"ln_1", "ln_2"}) {
      group.params.push_back(Vector(absl::StrCat(group.name, ".", norm, ".weight"), width));
      group.params.push_back(Vector(absl::StrCat(group.name, ".", norm, ".bias"), width));
    }
    // The weight of Conv1D is transposed: inputs come first.
    const auto add = [&](const char* name, uint64_t in, uint64_t out) {
      group.params.push_back({absl::StrCat(group.name, ".", name, ".weight"), {in, out}});
      group.params.push_back(Vector(absl::StrCat(group.name, ".", name, ".bias"), out));
    };
    add("attn.c_attn", width, 3 * width);
    add("attn.c_proj", width, width);
    add("mlp.c_fc", width, inner);
    add("mlp.c_proj", inner, width);
    model.groups.push_back(std::move(group));
  }
  return model;
}

struct LlamaKind {
  bool has_qkv_bias = false;
  bool has_output_bias = false;
  bool has_qk_norm = false;
  uint64_t experts = 0;  // 0: one feed-forward, without a router
};

ModelShape Llama(Numbers& numbers, const LlamaKind& kind) {
  const uint64_t width = numbers.Get("hidden_size");
  const uint64_t inner = numbers.Get("intermediate_size");
  const uint64_t heads = numbers.Get("num_attention_heads", width);
  const uint64_t head = numbers.GetOr("head_dim", width / heads);
  const uint64_t kv = numbers.GetOr("num_key_value_heads", heads) * head;
  const uint64_t vocab = numbers.Get("vocab_size");
  ModelShape model;
  ShapeGroup& root = model.groups.emplace_back();
  root.name = kRootGroup;
  root.params = {{"embed_tokens.weight", {vocab, width}}, Vector("norm.weight", width)};
  if (!numbers.Is("tie_word_embeddings", false)) {
    root.params.push_back({"lm_head.weight", {vocab, width}});
  }
  const uint64_t layers = numbers.Get("num_hidden_layers", kLayersMax);
  for (uint64_t layer = 0; layer < layers; ++layer) {
    ShapeGroup group{.name = absl::StrCat("layers.", layer), .params = {}};
    const std::string prefix = group.name + ".";
    AddLinear(prefix + "q_proj", heads * head, width, kind.has_qkv_bias, group);
    AddLinear(prefix + "k_proj", kv, width, kind.has_qkv_bias, group);
    AddLinear(prefix + "v_proj", kv, width, kind.has_qkv_bias, group);
    AddLinear(prefix + "o_proj", width, heads * head, kind.has_output_bias, group);
    if (kind.has_qk_norm) {
      group.params.push_back(Vector(prefix + "q_norm.weight", head));
      group.params.push_back(Vector(prefix + "k_norm.weight", head));
    }
    if (kind.experts > 0) AddLinear(prefix + "gate", kind.experts, width, false, group);
    for (uint64_t expert = 0; expert < std::max<uint64_t>(kind.experts, 1); ++expert) {
      const std::string of =
          kind.experts > 0 ? absl::StrCat(prefix, "experts.", expert, ".") : prefix;
      AddLinear(of + "gate_proj", inner, width, false, group);
      AddLinear(of + "up_proj", inner, width, false, group);
      AddLinear(of + "down_proj", width, inner, false, group);
    }
    group.params.push_back(Vector(prefix + "input_layernorm.weight", width));
    group.params.push_back(Vector(prefix + "post_attention_layernorm.weight", width));
    model.groups.push_back(std::move(group));
  }
  return model;
}

}  // namespace

uint64_t ShapeGroup::elems() const {
  uint64_t elems = 0;
  for (const Param& param : params) elems += ElemsOf(param.shape);
  return elems;
}

uint64_t ModelShape::elems() const {
  uint64_t elems = 0;
  for (const ShapeGroup& group : groups) elems += group.elems();
  return elems;
}

ModelShape EvenShape(uint64_t params, uint32_t layers) {
  ModelShape model{.what = "layers of one size", .groups = {}};
  layers = static_cast<uint32_t>(std::min<uint64_t>(layers, params));
  for (uint32_t layer = 0; layer < layers; ++layer) {
    const uint64_t elems = params * (layer + 1) / layers - params * layer / layers;
    const std::string name = absl::StrCat("layers.", layer);
    model.groups.push_back({.name = name, .params = {Vector(name + ".weight", elems)}});
  }
  return model;
}

ModelShape DecoderShape(uint32_t layers, uint64_t width, uint64_t vocab) {
  const nlohmann::json config = {
      {"n_embd", width}, {"vocab_size", vocab}, {"n_positions", 1}, {"n_layer", layers}};
  Numbers numbers(config);
  ModelShape model = Gpt2(numbers);
  model.what = "a decoder";
  model.groups[0].params[1] = {"lm_head.weight", {vocab, width}};  // replaces wpe.weight
  return model;
}

absl::StatusOr<ModelShape> HuggingFaceShape(const nlohmann::json& config) {
  const auto named = config.find("model_type");  // end() if `config` is no object
  const bool is_named = named != config.end() && named->is_string();
  const std::string type = is_named ? named->get<std::string>() : "";
  Numbers numbers(config);
  ModelShape model;
  if (type == "gpt2") {
    model = Gpt2(numbers);
  } else if (type == "llama" || type == "mistral") {
    const bool has_bias = numbers.Is("attention_bias", false);
    model = Llama(numbers, {.has_qkv_bias = has_bias, .has_output_bias = has_bias});
  } else if (type == "qwen2") {
    model = Llama(numbers, {.has_qkv_bias = true});
  } else if (type == "qwen3") {
    model = Llama(numbers, {.has_qk_norm = true});
  } else if (type == "mixtral") {
    const uint64_t layers = numbers.Get("num_hidden_layers", kLayersMax);
    const uint64_t experts_max = std::min(kExpertsMax, kExpertsInAllMax / layers);
    const uint64_t experts = numbers.Get("num_local_experts", experts_max);
    RETURN_IF_ERROR(numbers.status());
    model = Llama(numbers, {.experts = experts});
  } else {
    return MakeError(
        ErrorId::kOption,
        type.empty()
            ? "the config has no model_type"
            : absl::StrCat("models of type ", absl::CHexEscape(type), " are not known here"),
        "known are gpt2, llama, mistral, mixtral, qwen2 and qwen3; else give --params, or "
        "--layers and --width");
  }
  RETURN_IF_ERROR(numbers.status());
  model.what = type;
  return model;
}

protocol::LayoutSpec LayoutOf(const ModelShape& model, const LayoutChoice& choice) {
  protocol::LayoutSpec spec;
  spec.dtype = choice.dtype;
  spec.format = choice.format;
  spec.optimizer = choice.optimizer;
  for (uint32_t group = 0; group < model.groups.size(); ++group) {
    const auto first = static_cast<uint32_t>(spec.params.size());
    spec.group_names.push_back(model.groups[group].name);
    for (const ShapeGroup::Param& param : model.groups[group].params) {
      spec.params.push_back({.name = param.name, .shape = param.shape, .group = group});
    }
    for (uint32_t rank = 0; rank < choice.ranks && !choice.is_shared; ++rank) {
      protocol::PartitionSpec partition{.group = group, .owner = rank, .replica = 0, .boxes = {}};
      for (uint32_t i = first; i < spec.params.size(); ++i) {
        const std::vector<uint64_t>& shape = spec.params[i].shape;
        const uint64_t row_elems = ElemsOf(shape) / shape[0];
        const uint64_t chunk = (shape[0] + choice.ranks - 1) / choice.ranks;
        const uint64_t begin = std::min(rank * chunk, shape[0]);
        const uint64_t elems = (std::min(begin + chunk, shape[0]) - begin) * row_elems;
        if (elems == 0) continue;
        partition.boxes.push_back({.param = i,
                                   .first_elem = begin * row_elems,
                                   .run_elems = elems,
                                   .stride_elems = elems});
      }
      if (!partition.boxes.empty()) spec.partitions.push_back(std::move(partition));
    }
  }
  return spec;
}

}  // namespace forebay::tools
