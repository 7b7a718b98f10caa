// SPDX-License-Identifier: Apache-2.0
// Trains a perceptron on several ranks, with ZeRO stage 1, 2 or 3 of forebay::client::Pipeline.
//
// Each process is one rank: RANK and WORLD_SIZE number them, as torchrun sets both. A layer is a group of the job: a
// weight of [outputs, inputs], then a bias. Each rank takes its part of the rows, and the gradient of a step is the
// mean over the ranks. Forward and backward run on the host in both cases of --device; a model on the GPU gives the
// bytes that Gather() and Gradient() return to its kernels.

#include <array>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/flat_shards.h"
#include "client/pipeline.h"
#include "gpu/communicator.h"
#include "gpu/cuda_device.h"
#include "gpu/host_communicator.h"
#include "gpu/host_device.h"
#include "gpu/nccl_communicator.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace {

using forebay::client::Attachment;
using forebay::client::Pipeline;
using forebay::client::ZeroStage;
namespace gpu = forebay::gpu;
namespace protocol = forebay::protocol;

constexpr std::array<uint32_t, 4> kWidths{8, 16, 16, 1};
constexpr uint32_t kLayers = kWidths.size() - 1;
constexpr uint32_t kRows = 32;  // rows of the batch, of all ranks together
constexpr auto kTimeout = std::chrono::seconds(60);
// The optimizer's parameters. eps is near the size of the gradients, so that the updates depend on the gradients' scale.
constexpr protocol::HyperParams kAdamW{
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-2, .weight_decay = 0.1};

using Floats = std::vector<float>;  // a matrix, row by row

struct Options {
  std::string job = "perceptron";
  uint32_t stage = 3;
  uint32_t steps = 10;
  bool is_on_gpu = false;
  std::string weights_file;  // empty: none
  uint32_t rank = 0;
  uint32_t size = 1;
};

// ----------------------------------------------------------------------------------------- the model

// Returns an element of the training inputs. Inputs are multiples of 1/32, so that a target is exact in float32.
float Input(uint32_t row, uint32_t column) {
  const uint32_t number = (row * row * 7 + row * (column * 13 + 1) + column * 29) % 61;
  return (static_cast<float>(number) - 30) / 32;
}

float Target(uint32_t row) { return Input(row, 0) * Input(row, 1) - Input(row, 2); }

constexpr uint64_t LayerElems(uint32_t layer) {
  return uint64_t{kWidths[layer]} * kWidths[layer + 1] + kWidths[layer + 1];
}

Floats InitialLayer(uint32_t layer) {
  Floats values(LayerElems(layer));
  for (uint32_t i = 0; i < values.size(); ++i) {
    values[i] = (static_cast<float>((i * 7919 + layer * 104729) % 1000) - 500) / 1000;
  }
  return values;
}

protocol::LayoutSpec Model() {
  protocol::LayoutSpec spec;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    const uint32_t outputs = kWidths[layer + 1];
    spec.params.push_back(
        {.name = name + ".weight", .shape = {outputs, kWidths[layer]}, .group = layer});
    spec.params.push_back({.name = name + ".bias", .shape = {outputs}, .group = layer});
    spec.group_names.push_back(name);
  }
  return spec;
}

// Computes a layer's outputs for the rows of `inputs`.
Floats Forward(uint32_t layer, const Floats& weights, const Floats& inputs) {
  const uint32_t from = kWidths[layer];
  const uint32_t to = kWidths[layer + 1];
  const float* const bias = weights.data() + uint64_t{to} * from;
  Floats outputs(inputs.size() / from * to);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const float* const row = inputs.data() + i / to * from;
    const float* const weight = weights.data() + i % to * from;
    float sum = 0;
    for (uint32_t j = 0; j < from; ++j) sum += row[j] * weight[j];
    sum += bias[i % to];
    const bool is_last = layer + 1 == kLayers;
    outputs[i] = is_last || sum > 0 ? sum : 0;
  }
  return outputs;
}

// Returns the gradient of a layer's weight and bias, computed from the gradient of the layer's outputs.
Floats LayerGradient(uint32_t layer, const Floats& inputs, const Floats& outputs_gradient) {
  const uint32_t from = kWidths[layer];
  const uint32_t to = kWidths[layer + 1];
  Floats gradient(LayerElems(layer));
  for (size_t i = 0; i < outputs_gradient.size(); ++i) {
    const float* const row = inputs.data() + i / to * from;
    float* const weight = gradient.data() + i % to * from;
    for (uint32_t j = 0; j < from; ++j) weight[j] += outputs_gradient[i] * row[j];
    gradient[uint64_t{to} * from + i % to] += outputs_gradient[i];
  }
  return gradient;
}

// Returns the gradient of a layer's inputs, which are the outputs of the previous layer. The gradient is 0 if the input is 0.
Floats InputsGradient(uint32_t layer, const Floats& weights, const Floats& inputs,
                      const Floats& outputs_gradient) {
  const uint32_t from = kWidths[layer];
  const uint32_t to = kWidths[layer + 1];
  Floats gradient(inputs.size());
  for (size_t i = 0; i < outputs_gradient.size(); ++i) {
    float* const row = gradient.data() + i / to * from;
    const float* const weight = weights.data() + i % to * from;
    for (uint32_t j = 0; j < from; ++j) row[j] += outputs_gradient[i] * weight[j];
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i] == 0) gradient[i] = 0;
  }
  return gradient;
}

// -------------------------------------------------------------------------------------- the training

// Training of one rank. Members are destroyed in reverse order.
class Training {
 public:
  // Attaches, and writes the initial weights if the job is new.
  static absl::StatusOr<std::unique_ptr<Training>> Create(const Options& options);

  // Trains the remaining steps, evaluates the model, and detaches.
  absl::Status Run();

 private:
  explicit Training(const Options& options) : options_(options) {}
  absl::Status CreateDevice();
  absl::Status WriteInitial();
  absl::StatusOr<Floats> Weights(uint32_t layer);
  absl::StatusOr<float> ForwardPass();
  absl::Status BackwardPass();
  absl::StatusOr<float> MeanOverRanks(float value);
  absl::Status CheckWeightsFile() const;

  const Options options_;
  std::shared_ptr<gpu::Device> device_;
  std::shared_ptr<gpu::CudaDevice> cuda_;  // null: the job runs on the host
  std::unique_ptr<gpu::Stream> compute_;
  std::shared_ptr<Attachment> attachment_;
  std::shared_ptr<gpu::Communicator> communicator_;
  std::unique_ptr<Pipeline> pipeline_;
  std::ofstream weights_file_;              // open on rank 0 only
  std::array<Floats, kLayers + 1> values_;  // the inputs of each layer, then the outputs
};

absl::Status Training::CreateDevice() {
  if (!options_.is_on_gpu) {
    device_ = std::make_shared<gpu::HostDevice>();
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(cuda_, gpu::CudaDevice::Create({.ordinal = static_cast<int>(options_.rank)}));
  device_ = cuda_;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Training>> Training::Create(const Options& options) {
  std::unique_ptr<Training> own(new Training(options));
  RETURN_IF_ERROR(own->CreateDevice());
  ASSIGN_OR_RETURN(own->compute_, own->device_->MakeStream());
  ASSIGN_OR_RETURN(own->attachment_,
                   Attachment::Attach({.job = options.job,
                                       .rank = options.rank,
                                       .world_size = options.size,
                                       .layout = forebay::client::ShardFlat(Model(), options.size),
                                       .device = own->device_}));
  const gpu::Exchange exchange = [session = own->attachment_](const std::string& bytes) {
    return session->Exchange(bytes, kTimeout);
  };
  if (options.is_on_gpu) {
    ASSIGN_OR_RETURN(own->communicator_,
                     gpu::NcclCommunicator::Create({.rank = options.rank, .size = options.size},
                                                   own->cuda_, exchange));
  } else {
    ASSIGN_OR_RETURN(
        own->communicator_,
        gpu::HostCommunicator::Create({.rank = options.rank, .size = options.size}, exchange));
  }
  // Prefetches the weights of one layer ahead of compute.
  ASSIGN_OR_RETURN(own->pipeline_,
                   Pipeline::Create(own->attachment_, own->device_, own->communicator_,
                                    {.stage = static_cast<ZeroStage>(options.stage),
                                     .prefetch_bytes = LayerElems(1) * sizeof(float)}));
  if (own->attachment_->writes_initial()) RETURN_IF_ERROR(own->WriteInitial());
  if (!options.weights_file.empty() && options.rank == 0) {
    own->weights_file_.open(options.weights_file, std::ios::binary);
    RETURN_IF_ERROR(own->CheckWeightsFile());
  }
  return own;
}

absl::Status Training::WriteInitial() {
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const Floats values = InitialLayer(layer);
    RETURN_IF_ERROR(pipeline_->WriteInitial(layer, std::as_bytes(std::span(values))));
  }
  return attachment_->InitialDone(kTimeout);
}

absl::StatusOr<Floats> Training::Weights(uint32_t layer) {
  ASSIGN_OR_RETURN(const auto bytes, pipeline_->Gather(layer, *compute_));
  Floats weights(LayerElems(layer));
  RETURN_IF_ERROR(compute_->Copy(std::as_writable_bytes(std::span(weights)), bytes));
  RETURN_IF_ERROR(compute_->Synchronize());
  RETURN_IF_ERROR(pipeline_->Release(layer, *compute_));
  return weights;
}

// Returns the mean squared error over all ranks' rows.
absl::StatusOr<float> Training::ForwardPass() {
  const uint32_t rows = kRows / options_.size;
  values_[0].clear();
  for (uint32_t i = 0; i < rows * kWidths[0]; ++i) {
    values_[0].push_back(Input(options_.rank * rows + i / kWidths[0], i % kWidths[0]));
  }
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSIGN_OR_RETURN(const Floats weights, Weights(layer));
    if (weights_file_.is_open()) {
      weights_file_.write(reinterpret_cast<const char*>(weights.data()),
                          static_cast<std::streamsize>(weights.size() * sizeof(float)));
    }
    values_[layer + 1] = Forward(layer, weights, values_[layer]);
  }
  float sum = 0;
  for (uint32_t row = 0; row < rows; ++row) {
    const float error = values_[kLayers][row] - Target(options_.rank * rows + row);
    sum += error * error;
  }
  return MeanOverRanks(sum / static_cast<float>(rows));
}

absl::Status Training::BackwardPass() {
  const uint32_t rows = kRows / options_.size;
  Floats outputs_gradient(rows);
  for (uint32_t row = 0; row < rows; ++row) {
    const float error = values_[kLayers][row] - Target(options_.rank * rows + row);
    outputs_gradient[row] = 2 * error / static_cast<float>(rows);
  }
  for (uint32_t layer = kLayers; layer-- > 0;) {
    const Floats gradient = LayerGradient(layer, values_[layer], outputs_gradient);
    if (layer > 0) {
      ASSIGN_OR_RETURN(const Floats weights, Weights(layer));
      outputs_gradient = InputsGradient(layer, weights, values_[layer], outputs_gradient);
    }
    ASSIGN_OR_RETURN(const auto room, pipeline_->Gradient(layer, *compute_));
    RETURN_IF_ERROR(compute_->Copy(room, std::as_bytes(std::span(gradient))));
    RETURN_IF_ERROR(pipeline_->Reduce(layer, *compute_));
    RETURN_IF_ERROR(compute_->Synchronize());  // `gradient` must outlive the copy
  }
  return absl::OkStatus();
}

absl::StatusOr<float> Training::MeanOverRanks(float value) {
  const auto bytes = std::as_writable_bytes(std::span(&value, 1));
  ASSIGN_OR_RETURN(const gpu::DeviceMemory memory, compute_->Allocate(bytes.size()));
  RETURN_IF_ERROR(compute_->Copy(memory.bytes(), bytes));
  RETURN_IF_ERROR(communicator_->AllReduce(*compute_, memory.bytes(), protocol::DType::kFloat32,
                                           gpu::Reduction::kMean));
  RETURN_IF_ERROR(compute_->Copy(bytes, memory.bytes()));
  RETURN_IF_ERROR(compute_->Synchronize());
  RETURN_IF_ERROR(communicator_->Check());
  return value;
}

absl::Status Training::CheckWeightsFile() const {
  if (weights_file_.good()) return absl::OkStatus();
  return protocol::MakeError(protocol::ErrorId::kOption,
                             "--weights: cannot write " + options_.weights_file);
}

absl::Status Training::Run() {
  const bool prints = options_.rank == 0;
  for (uint64_t step = attachment_->committed_step() + 1; step <= options_.steps; ++step) {
    ASSIGN_OR_RETURN(const float loss, ForwardPass());
    RETURN_IF_ERROR(BackwardPass());
    RETURN_IF_ERROR(pipeline_->Step(step, std::span(&kAdamW, 1), 0, {}).status());
    if (prints) std::printf("step %u loss %.9g\n", static_cast<uint32_t>(step), double{loss});
  }
  ASSIGN_OR_RETURN(const float loss, ForwardPass());
  if (prints) {
    std::printf("trained loss %.9g\n", double{loss});
    std::printf("stage %u: at most %zu bytes of weights and gradients on the device\n",
                options_.stage, static_cast<size_t>(pipeline_->device_bytes_max()));
  }
  weights_file_.flush();
  RETURN_IF_ERROR(CheckWeightsFile());
  pipeline_.reset();
  return attachment_->Detach();
}

// ---------------------------------------------------------------------------------- the command line

bool Parse(std::string_view text, uint32_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

bool ParseVariable(const char* name, uint32_t& number) {
  const char* const text = std::getenv(name);
  return text == nullptr || Parse(text, number);
}

// Parses the arguments and the environment. Returns nullopt if an argument or a variable is invalid.
std::optional<Options> ParseOptions(std::span<char* const> arguments) {
  Options options;
  for (size_t i = 1; i + 1 < arguments.size(); i += 2) {
    const std::string_view name = arguments[i];
    const std::string_view value = arguments[i + 1];
    const bool is_valid = (name == "--stage" && Parse(value, options.stage)) ||
                          (name == "--steps" && Parse(value, options.steps)) ||
                          (name == "--device" && (value == "host" || value == "cuda")) ||
                          name == "--job" || name == "--weights";
    if (!is_valid) return std::nullopt;
    if (name == "--device") options.is_on_gpu = value == "cuda";
    if (name == "--job") options.job = value;
    if (name == "--weights") options.weights_file = value;
  }
  const bool are_pairs = arguments.size() % 2 == 1;
  const bool has_ranks =
      ParseVariable("RANK", options.rank) && ParseVariable("WORLD_SIZE", options.size);
  const bool has_rows = options.size > 0 && kRows % options.size == 0;
  const bool has_stage = 1 <= options.stage && options.stage <= 3;
  if (!are_pairs || !has_ranks || !has_rows || !has_stage) return std::nullopt;
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = ParseOptions({argv, static_cast<size_t>(argc)});
  if (!options.has_value()) {
    std::fprintf(
        stderr,
        "usage: [RANK=R WORLD_SIZE=N] train [--stage 1|2|3] [--steps STEPS] "
        "[--device host|cuda] [--job NAME] [--weights FILE]\n"
        "  N divides %u, the rows of a batch. FILE gets the weights before each step, and after "
        "the last, as float32.\n",
        kRows);
    return 2;
  }
  const auto train = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const auto training, Training::Create(*options));
    return training->Run();
  };
  const absl::Status status = train();
  if (status.ok()) return 0;
  protocol::PrintError(status);
  return 1;
}
