// SPDX-License-Identifier: Apache-2.0
// Goal    A training loop in C++ computes the same on two ranks, in every stage of ZeRO and with every
//         communicator, as one process does with the whole batch: every loss and every weight, bit by bit.
// Method  A perceptron of two layers predicts the next character of a text. Each rank has half of the batch. The one process
//         takes both halves and the mean of their gradients, which is also the mean that two ranks reduce to in any order. The
//         device is the host, or CUDA and NCCL over drivers that are late or work in random orders, as if each operation were
//         delayed before and after. One rank also runs on a GPU if the machine has one.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/flat_shards.h"
#include "client/pipeline.h"
#include "gmock/gmock.h"
#include "gpu/cuda_device.h"
#include "gpu/host_communicator.h"
#include "gpu/host_device.h"
#include "gpu/nccl_communicator.h"
#include "gtest/gtest.h"
#include "tests/client/pipeline_rank.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_thread.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/rank_threads.h"
#include "tests/support/status_test.h"

namespace forebay::client {
namespace {

using testing::FakeCuda;
using testing::FakeNccl;
using testing::OnRanks;

constexpr uint32_t kChars = 64;
constexpr uint32_t kHidden = 32;
constexpr uint32_t kBatch = 32;  // samples of a rank in a step
constexpr uint64_t kSteps = 12;
constexpr Timeout kTimeout = std::chrono::seconds(30);

// A layer is a group: weights of [inputs, outputs], then biases.
constexpr uint64_t LayerElems(uint32_t inputs, uint32_t outputs) {
  return uint64_t{inputs} * outputs + outputs;
}
constexpr uint64_t kFirst = LayerElems(kChars, kHidden);
constexpr uint64_t kSecond = LayerElems(kHidden, kChars);

protocol::LayoutSpec Spec() {
  return {.dtype = protocol::DType::kFloat32,
          .optimizer = protocol::Optimizer::kAdamW,
          .format = protocol::Format::kFp32,
          .params = {{.name = "first.weight", .shape = {kChars, kHidden}, .group = 0},
                     {.name = "first.bias", .shape = {kHidden}, .group = 0},
                     {.name = "second.weight", .shape = {kHidden, kChars}, .group = 1},
                     {.name = "second.bias", .shape = {kChars}, .group = 1}},
          .group_names = {"first", "second"},
          .partitions = {}};
}

// The first chapters of the text that the quickstart trains on. Returns an empty text if the program `bible` is missing.
std::string Text() {
  std::string text;
  FILE* const output = ::popen("bible -f gen1:1-gen5:32 2>/dev/null", "r");
  std::array<char, 4096> part{};
  for (size_t read = 1; output != nullptr && read > 0;) {
    read = std::fread(part.data(), 1, part.size(), output);
    text.append(part.data(), read);
  }
  if (output != nullptr) ::pclose(output);
  return text;
}

uint32_t CharAt(const std::string& text, uint64_t at) {
  return static_cast<unsigned char>(text[at % text.size()]) % kChars;
}

std::vector<float> Initial(uint32_t group) {
  std::vector<float> values(group == 0 ? kFirst : kSecond);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        static_cast<float>(static_cast<int>((i * 7919 + group * 104729) % 1000) - 500) / 2500;
  }
  return values;
}

// Loss and gradients of one half of a step's batch.
struct Half {
  float loss = 0;
  std::vector<float> first = std::vector<float>(kFirst);
  std::vector<float> second = std::vector<float>(kSecond);
};

Half Compute(std::span<const float> first, std::span<const float> second, const std::string& text,
             uint64_t step, uint32_t rank) {
  Half half;
  for (uint32_t i = 0; i < kBatch; ++i) {
    const uint64_t at = (step * 2 + rank) * kBatch + i;
    const uint32_t input = CharAt(text, at);
    const uint32_t target = CharAt(text, at + 1);
    std::array<float, kHidden> hidden{};
    for (uint32_t h = 0; h < kHidden; ++h) {
      hidden[h] = std::tanh(first[input * kHidden + h] + first[kChars * kHidden + h]);
    }
    std::array<float, kChars> logits{};
    for (uint32_t c = 0; c < kChars; ++c) {
      logits[c] = second[kHidden * kChars + c];
      for (uint32_t h = 0; h < kHidden; ++h) logits[c] += hidden[h] * second[h * kChars + c];
    }
    const float largest = *std::ranges::max_element(logits);
    float sum = 0;
    for (float& logit : logits) sum += logit = std::exp(logit - largest);
    half.loss -= std::log(logits[target] / sum) / kBatch;
    std::array<float, kHidden> hidden_gradient{};
    for (uint32_t c = 0; c < kChars; ++c) {
      const float gradient = (logits[c] / sum - (c == target ? 1.0F : 0.0F)) / kBatch;
      half.second[kHidden * kChars + c] += gradient;
      for (uint32_t h = 0; h < kHidden; ++h) {
        half.second[h * kChars + c] += gradient * hidden[h];
        hidden_gradient[h] += gradient * second[h * kChars + c];
      }
    }
    for (uint32_t h = 0; h < kHidden; ++h) {
      const float gradient = hidden_gradient[h] * (1 - hidden[h] * hidden[h]);
      half.first[input * kHidden + h] += gradient;
      half.first[kChars * kHidden + h] += gradient;
    }
  }
  return half;
}

std::vector<float> Mean(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> mean(a.size());
  for (size_t i = 0; i < a.size(); ++i) mean[i] = (a[i] + b[i]) / 2;
  return mean;
}

struct Trained {
  std::vector<float> losses;  // of each half of the batch: 2 a step
  std::vector<float> weights;
};

class Loop {
 public:
  static absl::StatusOr<std::unique_ptr<Loop>> Create(RankOptions options) {
    options.spec = Spec();
    auto loop = std::make_unique<Loop>();
    ASSIGN_OR_RETURN(loop->own, PipelineRank::Create(options));
    for (uint32_t group = 0; group < 2; ++group) {
      const std::vector<float> values = Initial(group);
      RETURN_IF_ERROR(loop->own.pipeline->WriteInitial(group, std::as_bytes(std::span(values))));
    }
    RETURN_IF_ERROR(loop->own.attachment->InitialDone(kTimeout));
    return loop;
  }

  // A group's weights now, as compute sees them.
  absl::StatusOr<std::vector<float>> Weights(uint32_t group) {
    ASSIGN_OR_RETURN(const auto bytes, own.pipeline->Gather(group, *own.compute));
    std::vector<float> weights(bytes.size() / sizeof(float));
    RETURN_IF_ERROR(own.compute->Copy(std::as_writable_bytes(std::span(weights)), bytes));
    RETURN_IF_ERROR(own.compute->Synchronize());
    RETURN_IF_ERROR(own.pipeline->Release(group, *own.compute));
    return weights;
  }
  absl::Status Reduce(uint32_t group, const std::vector<float>& gradient) {
    ASSIGN_OR_RETURN(const auto to, own.pipeline->Gradient(group, *own.compute));
    RETURN_IF_ERROR(own.compute->Copy(to, std::as_bytes(std::span(gradient))));
    return own.pipeline->Reduce(group, *own.compute);
  }
  absl::Status Step(uint64_t t) {
    const std::array<protocol::HyperParams, 1> hyper{protocol::HyperParams{
        .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01}};
    return own.pipeline->Step(t, hyper, 0, {}).status();
  }

  PipelineRank own;
};

class Perceptron : public ::testing::Test {
 protected:
  void SetUp() override {
    FakeCuda::Start();
    FakeNccl::Start();
    ASSERT_OK_AND_ASSIGN(daemon_, testing::StartDaemonThread(dir_.path() + "/s"));
    ASSERT_FALSE(text_.empty()) << "the program `bible` (package bible-kjv) is missing";
    ASSERT_GT(text_.size(), 2 * kBatch * (kSteps + 1));
  }

  // Trains in one process with the whole batch.
  absl::StatusOr<Trained> TrainAlone(const std::string& job = "alone", Kind kind = Kind::kHost) {
    ASSIGN_OR_RETURN(
        const auto loop,
        Loop::Create({.socket = dir_.path() + "/s", .job = job, .kind = kind, .spec = {}}));
    Trained trained;
    for (uint64_t t = 1; t <= kSteps; ++t) {
      ASSIGN_OR_RETURN(const auto first, loop->Weights(0));
      ASSIGN_OR_RETURN(const auto second, loop->Weights(1));
      const Half a = Compute(first, second, text_, t, 0);
      const Half b = Compute(first, second, text_, t, 1);
      trained.losses.push_back(a.loss);
      trained.losses.push_back(b.loss);
      RETURN_IF_ERROR(loop->Reduce(1, Mean(a.second, b.second)));
      RETURN_IF_ERROR(loop->Reduce(0, Mean(a.first, b.first)));
      RETURN_IF_ERROR(loop->Step(t));
    }
    RETURN_IF_ERROR(AppendWeights(*loop, trained));
    return trained;
  }
  static absl::Status AppendWeights(Loop& loop, Trained& trained) {
    for (uint32_t group = 0; group < 2; ++group) {
      ASSIGN_OR_RETURN(const auto weights, loop.Weights(group));
      trained.weights.insert(trained.weights.end(), weights.begin(), weights.end());
    }
    return absl::OkStatus();
  }

  // Trains on two ranks. Returns the losses of both ranks.
  absl::StatusOr<Trained> TrainOnRanks(const std::string& job, Kind kind,
                                       const PipelineOptions& options) {
    std::array<Trained, 2> of_rank;
    const auto results = OnRanks(2, [&](uint32_t rank) -> absl::Status {
      ASSIGN_OR_RETURN(const auto loop, Loop::Create({.socket = dir_.path() + "/s",
                                                      .job = job,
                                                      .rank = rank,
                                                      .ranks = 2,
                                                      .kind = kind,
                                                      .spec = {},
                                                      .pipeline = options}));
      for (uint64_t t = 1; t <= kSteps; ++t) {
        ASSIGN_OR_RETURN(const auto first, loop->Weights(0));
        ASSIGN_OR_RETURN(const auto second, loop->Weights(1));
        const Half half = Compute(first, second, text_, t, rank);
        of_rank[rank].losses.push_back(half.loss);
        RETURN_IF_ERROR(loop->Reduce(1, half.second));
        RETURN_IF_ERROR(loop->Reduce(0, half.first));
        RETURN_IF_ERROR(loop->Step(t));
      }
      return AppendWeights(*loop, of_rank[rank]);
    });
    for (const absl::Status& status : results) RETURN_IF_ERROR(status);
    EXPECT_EQ(of_rank[0].weights, of_rank[1].weights);
    Trained trained{.losses = {}, .weights = of_rank[0].weights};
    for (uint64_t t = 0; t < kSteps; ++t) {
      for (const Trained& one : of_rank) trained.losses.push_back(one.losses[t]);
    }
    return trained;
  }

  const std::string text_ = Text();
  testing::TempDir dir_;
  std::unique_ptr<daemon::Daemon> daemon_;
};

TEST_F(Perceptron, ComputesTheSameOnEveryDevice) {
  ASSERT_OK_AND_ASSIGN(const Trained alone, TrainAlone());
  std::vector<Kind> kinds{Kind::kCuda};
  if (gpu::CudaDevice::Create({}).ok()) kinds.push_back(Kind::kGpu);
  for (const Kind kind : kinds) {
    const std::string job = kind == Kind::kGpu ? "gpu" : "fake";
    ASSERT_OK_AND_ASSIGN(const Trained trained, TrainAlone(job, kind));
    EXPECT_EQ(trained.losses, alone.losses) << job;
    EXPECT_EQ(trained.weights, alone.weights) << job;
  }
}

TEST_F(Perceptron, ComputesTheSameOnTwoRanksInEveryStage) {
  ASSERT_OK_AND_ASSIGN(const Trained alone, TrainAlone());
  EXPECT_LT(alone.losses.back(), 0.9F * alone.losses.front()) << "it learns";
  int number = 0;
  for (const ZeroStage stage : {ZeroStage::kStates, ZeroStage::kGradients, ZeroStage::kWeights}) {
    constexpr uint64_t kSeeds = 3;  // random orders of the device; one more run is on the host
    for (uint64_t seed = 0; seed <= kSeeds + 1; ++seed) {
      const Kind kind = seed > kSeeds ? Kind::kHost : Kind::kCuda;
      FakeCuda::Options options;
      if (seed > 0) options.seed = seed;
      FakeCuda::Start(options);
      FakeNccl::Start();
      const std::string job = "ranks" + std::to_string(number++);
      ASSERT_OK_AND_ASSIGN(
          const Trained ranks,
          TrainOnRanks(job, kind, {.stage = stage, .prefetch_bytes = kFirst * sizeof(float)}));
      EXPECT_EQ(ranks.losses, alone.losses) << job;
      EXPECT_EQ(ranks.weights, alone.weights) << job;
      EXPECT_THAT(FakeCuda::mistakes(), ::testing::IsEmpty()) << job;
    }
  }
}

}  // namespace
}  // namespace forebay::client
