#include "tools/forebay/bench_adam_pass.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <span>

#include "cpu_adam/lamb.h"
#include "cpu_adam/parallel_update.h"
#include "cpu_adam/step_scalars.h"
#include "cpu_adam/stream_kernel.h"
#include "nvme/checksum.h"
#include "protocol/optimizer.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::tools {
namespace {

using cpu_adam::PartitionUpdate;
using cpu_adam::StatePlanes;
using protocol::DType;
using protocol::RoundUp;
using protocol::StateFormat;
using Access = StreamShape::Access;
using Beside = AdamFormat::Beside;
using Clock = std::chrono::steady_clock;

constexpr double kGiga = 1e9;
constexpr uint64_t kBlockElems = uint64_t{1} << 20;  // as the daemon's
constexpr uint64_t kTileElems = uint64_t{1} << 13;   // as the daemon updates and digests at a time
constexpr uint64_t kPatternElemsMax = uint64_t{1} << 20;
constexpr size_t kDenormalEvery = 97;
constexpr uint32_t kSeed = 20251121;

StreamShape ShapeOf(uint32_t elem_bytes, Access access) {
  return {elem_bytes * static_cast<uint32_t>(kStreamGroupElems), access};
}

// In this order: weights, what is beside it, moments, scales.
std::vector<StreamShape> StateShapes(const AdamPass& pass) {
  const AdamFormat& format = *pass.format;
  std::vector<StreamShape> shapes;
  switch (format.beside) {
    case Beside::kNothing:
      shapes = {ShapeOf(4, Access::kUpdate)};
      break;
    case Beside::kRemainder:
      shapes = {ShapeOf(2, Access::kUpdate), ShapeOf(2, Access::kUpdate)};
      break;
    case Beside::kMaster:
      shapes = {ShapeOf(2, Access::kWrite), ShapeOf(4, Access::kUpdate)};
      break;
  }
  const size_t moments = protocol::Info(pass.optimizer).moments.size();
  shapes.insert(shapes.end(), moments, ShapeOf(format.moment_bytes, Access::kUpdate));
  if (format.scale_group_bytes != 0) {
    shapes.insert(shapes.end(), moments, {format.scale_group_bytes, Access::kUpdate});
  }
  return shapes;
}

// The gradient first, then the state.
std::vector<StreamShape> PassShapes(const AdamPass& pass) {
  std::vector<StreamShape> shapes = StateShapes(pass);
  shapes.insert(shapes.begin(), ShapeOf(ElemBytes(pass.format->grad), Access::kRead));
  return shapes;
}

// Gradient and weights, then everything else of a block in one piece, as it goes to disk.
std::vector<StreamShape> BlockShapes(const AdamPass& pass) {
  const std::vector<StreamShape> all = PassShapes(pass);
  StreamShape states = {0, Access::kUpdate};
  for (size_t s = 2; s < all.size(); ++s) states.group_bytes += all[s].group_bytes;
  return {all[0], all[1], states};
}

uint64_t PartitionElems(const AdamPass& pass, uint64_t params) { return params / pass.partitions; }

// Partitions begin at whole groups, so that arrays of bytes too begin on a cache line.
uint64_t PartitionSpan(const AdamPass& pass, uint64_t params) {
  return RoundUp(PartitionElems(pass, params), kStreamGroupElems);
}

uint64_t SpanOf(const AdamPass& pass, uint64_t params) {
  return RoundUp(PartitionSpan(pass, params) * pass.partitions, kLoopElems);
}

Laying FlatLaying(const AdamPass& pass, uint64_t params) {
  return {.shapes = PassShapes(pass),
          .elems = SpanOf(pass, params),
          .place = pass.place,
          .offsets = pass.offsets};
}

// Planes from arrays in the order of StateShapes().
StatePlanes PlanesOf(const AdamPass& pass, const std::vector<std::byte*>& arrays) {
  StatePlanes planes = {};
  size_t next = 0;
  planes.weights = arrays[next++];
  if (pass.format->beside == Beside::kRemainder) {
    planes.remainder = reinterpret_cast<int16_t*>(arrays[next++]);
  }
  if (pass.format->beside == Beside::kMaster) {
    planes.master = reinterpret_cast<float*>(arrays[next++]);
  }
  const size_t moments = protocol::Info(pass.optimizer).moments.size();
  for (size_t m = 0; m < moments; ++m) planes.moments[m] = arrays[next++];
  if (pass.format->scale_group_bytes == 0) return planes;
  for (size_t m = 0; m < moments; ++m) {
    planes.scales[m] = reinterpret_cast<float*>(arrays[next++]);
  }
  return planes;
}

std::byte* SourceOf(const BenchStream& stream) {
  return stream.from == nullptr ? stream.to : stream.from;
}

// Repeats `pattern` over an array of n elements.
template <class T>
void Fill(const std::vector<T>& pattern, uint64_t n, const void* array) {
  auto* const elems = static_cast<T*>(const_cast<void*>(array));
  for (uint64_t begin = 0; begin < n; begin += pattern.size()) {
    std::memcpy(elems + begin, pattern.data(),
                std::min<uint64_t>(pattern.size(), n - begin) * sizeof(T));
  }
}

// Weights and gradients of plausible sizes; with denormal data one element of 97 has no gradient.
struct Pattern {
  Pattern(AdamPass::Data data, uint64_t elems_max)
      : elems(std::min(elems_max, kPatternElemsMax)), w(elems), grad(elems) {
    std::mt19937 random(kSeed);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < elems; ++i) {
      w[i] = 0.02f * normal(random);
      const bool none = data == AdamPass::Data::kDenormal && i % kDenormalEvery == 0;
      grad[i] = none ? 0.0f : std::copysign(1e-3f, w[i]) + 0.1f * w[i];
      // binary16: a sign, an exponent of 2^-7 to 2^-4, 10 bits
      const auto bits = static_cast<uint32_t>(random());
      half.push_back(static_cast<uint16_t>((bits & 0x83FF) | ((8 + (bits >> 30)) << 10)));
      if (none) half.back() = 0;
    }
    w16.resize(elems);
    remainder.resize(elems);
    cpu_adam::SplitMaster(elems, w.data(), w16.data(), remainder.data());
    grad16.resize(elems);
    cpu_adam::RoundToBf16(elems, grad.data(), grad16.data());
  }

  void Put(const AdamFormat& format, const PartitionUpdate& piece) const {
    switch (format.grad) {
      case DType::kFloat32:
        Fill(grad, piece.n, piece.grad.data);
        break;
      case DType::kBFloat16:
        Fill(grad16, piece.n, piece.grad.data);
        break;
      default:  // kFloat16
        Fill(half, piece.n, piece.grad.data);
        break;
    }
    switch (format.beside) {
      case Beside::kNothing:
        Fill(w, piece.n, piece.from.weights);
        break;
      case Beside::kRemainder:
        Fill(w16, piece.n, piece.from.weights);
        Fill(remainder, piece.n, piece.from.remainder);
        break;
      case Beside::kMaster:
        Fill(w, piece.n, piece.from.master);
        break;
    }
  }

  uint64_t elems;
  std::vector<float> w, grad;
  std::vector<uint16_t> w16, grad16, half;
  std::vector<int16_t> remainder;
};

// An optimizer reads those that it has.
constexpr protocol::HyperParams kHyper = {
    .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 1e-2, .momentum = 0.9};

// The arrays of a pass and what the measured side calls.
class PassRun {
 public:
  PassRun(const AdamFixture& fixture, const AdamPass& pass)
      : pass_(pass),
        pool_(fixture.Pool(pass.threads)),
        params_(fixture.params),
        scalars_(cpu_adam::MakeStepScalars(pass.optimizer, kHyper, /*t=*/10,
                                           /*grad_scale=*/1.0f)) {
    const Laying flat = FlatLaying(pass, params_);
    if (pass.hash == AdamPass::Hash::kOn) {
      Laying blocks = flat;
      blocks.shapes = BlockShapes(pass);
      AllocateBlocks(fixture.huge->Allocate(blocks));
    } else {
      AllocateFlat(fixture.huge->Allocate(flat));
    }
    PutData();
    streams_ = fixture.huge->Allocate(flat);  // over the same sources
  }

  absl::StatusOr<Sample> Run() {
    const auto began = Clock::now();
    Update(partitions_);
    return MakeSample(began);
  }

  // What the daemon does with blocks that go to disk: it digests what it has updated while it is warm.
  absl::StatusOr<Sample> RunAndHash() {
    const auto began = Clock::now();
    const auto threads = static_cast<size_t>(pool_.threads());
    std::atomic<uint64_t> digest = 0;
    cpu_adam::RunOnAll(pool_, [&](int task) {
      const size_t blocks = partitions_.size(), t = static_cast<size_t>(task);
      for (size_t b = blocks * t / threads; b < blocks * (t + 1) / threads; ++b) {
        digest ^= UpdateAndHash(partitions_[b], states_[b]);
      }
    });
    return MakeSample(began);
  }

  const std::vector<BenchStream>& streams() const { return streams_; }

 private:
  void Update(const std::vector<PartitionUpdate>& partitions) {
    FOREBAY_CHECK(cpu_adam::UpdateAll(pool_, pass_.optimizer, pass_.format->format, partitions) ==
                  0);
    if (pass_.optimizer != protocol::Optimizer::kLamb) return;
    for (const PartitionUpdate& partition : partitions) FinishLamb(partition);
  }

  // In `warm` elements at a time, whose pages are digested before the next are touched. A last block
  // that is not whole has planes within pages and is hashed when all of it is updated.
  uint64_t UpdateAndHash(const PartitionUpdate& block, std::span<const std::byte> states) const {
    const StateFormat format = pass_.format->format;
    const uint64_t warm = block.n == kBlockElems ? kTileElems : block.n;
    nvme::PageDigests digests(states);
    for (uint64_t begin = 0; begin < block.n; begin += warm) {
      const cpu_adam::Gradient grad = {
          static_cast<const std::byte*>(block.grad.data) + begin * ElemBytes(block.grad.type),
          block.grad.type};
      cpu_adam::UpdateTo(pass_.optimizer, format, block.scalars, warm, grad,
                         cpu_adam::Advance(block.from, format, begin),
                         cpu_adam::Advance(block.to, format, begin));
      if (warm < block.n) AddPages(begin, begin + warm, digests);
    }
    if (warm == block.n) digests.Add(0, digests.pages());
    return digests.Checksum(nvme::Identity{});
  }

  // Those that elements [begin, end) of a whole block complete.
  void AddPages(uint64_t begin, uint64_t end, nvme::PageDigests& digests) const {
    uint64_t plane_begin = 0;
    for (size_t s = 1; s < shapes_.size(); ++s) {
      const auto page_of = [&](uint64_t elem) {
        return (plane_begin + elem / kStreamGroupElems * shapes_[s].group_bytes) /
               protocol::kPageBytes;
      };
      digests.Add(page_of(begin), page_of(end));
      plane_begin += kBlockElems / kStreamGroupElems * shapes_[s].group_bytes;
    }
  }

  // Sums over the whole partition, then its masters.
  void FinishLamb(const PartitionUpdate& partition) {
    const StateFormat format = pass_.format->format;
    std::vector<cpu_adam::LambSums> sums(static_cast<size_t>(pool_.threads()));
    OnParts(partition, [&](size_t part, uint64_t n, const StatePlanes& planes) {
      sums[part] = cpu_adam::SumLamb(format, scalars_, n, planes);
    });
    for (size_t part = 1; part < sums.size(); ++part) sums[0].Merge(sums[part]);
    const float trust = cpu_adam::TrustRatio(sums[0]);
    OnParts(partition, [&](size_t, uint64_t n, const StatePlanes& planes) {
      cpu_adam::ApplyLamb(format, scalars_, trust, n, planes);
    });
  }

  // Runs body(part, elements, planes) for one part of the updated planes on each thread.
  template <class Body>
  void OnParts(const PartitionUpdate& partition, const Body& body) {
    const auto parts = static_cast<uint64_t>(pool_.threads());
    const auto cut = [&](uint64_t part) {
      if (part == parts) return uint64_t{partition.n};
      return partition.n * part / parts / cpu_adam::kCutElems * cpu_adam::kCutElems;
    };
    cpu_adam::RunOnAll(pool_, [&](int task) {
      const auto part = static_cast<uint64_t>(task);
      body(part, cut(part + 1) - cut(part),
           cpu_adam::Advance(partition.to, pass_.format->format, cut(part)));
    });
  }

  Sample MakeSample(Clock::time_point began) const {
    const std::chrono::duration<double> took = Clock::now() - began;
    uint64_t elems = 0;
    for (const PartitionUpdate& partition : partitions_) elems += partition.n;
    const PassBytes bytes = BytesOf(PassShapes(pass_), elems);
    return {.value = static_cast<double>(bytes.read + bytes.written) / took.count() / kGiga,
            .bytes_read = bytes.read,
            .bytes_written = bytes.written};
  }

  void AddPartition(const BenchStream& grad, uint64_t begin, uint64_t n, const StatePlanes& from,
                    const StatePlanes& to) {
    const std::byte* const grad_at = grad.from + begin * ElemBytes(pass_.format->grad);
    partitions_.push_back({.scalars = scalars_,
                           .n = n,
                           .grad = {grad_at, pass_.format->grad},
                           .from = from,
                           .to = to});
  }

  void AllocateFlat(const std::vector<BenchStream>& streams) {
    std::vector<std::byte*> from, to;
    for (size_t s = 1; s < streams.size(); ++s) {
      from.push_back(SourceOf(streams[s]));
      to.push_back(streams[s].to);
    }
    for (uint64_t p = 0; p < pass_.partitions; ++p) {
      const uint64_t begin = p * PartitionSpan(pass_, params_);
      const auto at = [&](const std::vector<std::byte*>& arrays) {
        return cpu_adam::Advance(PlanesOf(pass_, arrays), pass_.format->format, begin);
      };
      AddPartition(streams[0], begin, PartitionElems(pass_, params_), at(from), at(to));
    }
    Clear(streams);
  }

  void AllocateBlocks(const std::vector<BenchStream>& streams) {
    for (uint64_t begin = 0; begin < params_; begin += kBlockElems) {
      const uint64_t n = std::min(kBlockElems, params_ - begin);
      states_.emplace_back();
      const StatePlanes from = BlockPlanes(SourceOf(streams[1]), streams[2].from, begin, n);
      const StatePlanes to = BlockPlanes(streams[1].to, streams[2].to, begin, n);
      AddPartition(streams[0], begin, n, from, to);
    }
    Clear(streams);
  }

  // The planes of the block of elements `begin` to `begin + n` one behind the other; the last call
  // for a block says which bytes of it are hashed.
  StatePlanes BlockPlanes(std::byte* weights, std::byte* states, uint64_t begin, uint64_t n) {
    const auto bytes_of = [](const StreamShape& shape, uint64_t elems) {
      return RoundUp(elems, kStreamGroupElems) / kStreamGroupElems * shape.group_bytes;
    };
    const StreamShape all = BlockShapes(pass_)[2];
    std::byte* const first = states + bytes_of(all, begin);
    std::vector<std::byte*> arrays = {weights + bytes_of(shapes_[0], begin)};
    std::byte* next = first;
    for (size_t s = 1; s < shapes_.size(); ++s) {
      arrays.push_back(next);
      next += bytes_of(shapes_[s], n);
    }
    states_.back() = {first, next};
    return PlanesOf(pass_, arrays);
  }

  static void Clear(const std::vector<BenchStream>& streams) {
    for (const BenchStream& stream : streams) {
      if (stream.from != nullptr) std::memset(stream.from, 0, stream.bytes);
    }
  }

  // Moments are what one update makes of zeros, whatever their format.
  void PutData() {
    const Pattern pattern(pass_.data, PartitionElems(pass_, params_));
    std::vector<PartitionUpdate> sources = partitions_;
    for (PartitionUpdate& source : sources) {
      pattern.Put(*pass_.format, source);
      source.to = source.from;
    }
    Update(sources);
    if (pass_.data != AdamPass::Data::kDenormal) return;
    for (const PartitionUpdate& source : sources) {
      auto* const v = static_cast<float*>(source.from.moments[1]);
      for (uint64_t i = 0; i < source.n; ++i) {
        if (i % pattern.elems % kDenormalEvery == 0) v[i] = 1e-39f;
      }
    }
  }

  AdamPass pass_;
  std::vector<StreamShape> shapes_ = StateShapes(pass_);
  cpu_adam::WorkerPool& pool_;
  uint64_t params_;
  cpu_adam::StepScalars scalars_;
  std::vector<BenchStream> streams_;
  std::vector<PartitionUpdate> partitions_;         // with hash=on: blocks
  std::vector<std::span<const std::byte>> states_;  // with hash=on: what is written of each
};

}  // namespace

const std::vector<AdamFormat> kAdamFormats = {
    // format name, parameter, format, gradient, beside the weights, bytes of a moment, of its scales
    {"fp32", "fp32", StateFormat::kFp32, DType::kFloat32, Beside::kNothing, 4, 0},
    {"fp32", "bf16", StateFormat::kFp32Bf16, DType::kBFloat16, Beside::kMaster, 4, 0},
    {"fp32", "fp16", StateFormat::kFp32Fp16, DType::kFloat16, Beside::kMaster, 4, 0},
    {"exact", "bf16", StateFormat::kExact, DType::kBFloat16, Beside::kRemainder, 4, 0},
    {"bf16", "bf16", StateFormat::kBf16, DType::kBFloat16, Beside::kRemainder, 2, 0},
    {"int8", "bf16", StateFormat::kInt8, DType::kBFloat16, Beside::kRemainder, 1, 4},
};

uint64_t MemoryFor(const AdamPass& pass, uint64_t params) {
  return BenchMemory::BytesFor(FlatLaying(pass, params));
}

absl::StatusOr<BenchResult> MeasurePass(const AdamFixture& fixture, const BenchCase& what,
                                        const AdamPass& pass) {
  PassRun run(fixture, pass);
  MeasuredSide side{.run = [&run] { return run.Run(); },
                    .streams = run.streams(),
                    .laying = FlatLaying(pass, fixture.params),
                    .threads = pass.threads};
  if (pass.hash == AdamPass::Hash::kOn) {
    side.shown = {{"unhashed", BenchLoop::Role::kShown, side.run}};
    side.run = [&run] { return run.RunAndHash(); };
  }
  return MeasureBesideLoops(fixture, what, std::move(side));
}

}  // namespace forebay::tools
