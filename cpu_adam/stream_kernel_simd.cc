// SPDX-License-Identifier: Apache-2.0
// The streaming passes for every instruction set that has a fused multiply-add. Includes its contract
// and Highway alone; the bits are those of internal/stream_scalar.cc.

#include "cpu_adam/internal/disabled_targets.h"
#include "cpu_adam/internal/kernel_table.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/stream_kernel_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace forebay::cpu_adam::internal::HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<D>;
using DU = hn::RebindToUnsigned<D>;
using DU16Half = hn::Rebind<uint16_t, D>;
using DU16 = hn::Repartition<uint16_t, D>;
using DI16 = hn::RebindToSigned<DU16>;
using V = hn::Vec<D>;
using VU = hn::Vec<DU>;

constexpr size_t kLineBytes = 64;
// Number of parts of an array that one pass interleaves: a CPU reads few streams slower than many.
constexpr size_t kInterleave = 4;

// 16-bit elements as float32: bfloat16 as raw bits, binary16 under its own type.
template <class Float>
HWY_INLINE hn::Vec<Float> WidenAt(Float df, const uint16_t* from) {
  const hn::RebindToUnsigned<Float> du;
  const hn::Rebind<uint16_t, Float> du16;
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from))));
}

template <class Float>
HWY_INLINE hn::Vec<Float> WidenAt(Float df, const hwy::float16_t* from) {
  return hn::PromoteTo(df, hn::LoadU(hn::Rebind<hwy::float16_t, Float>(), from));
}

HWY_INLINE V LoadFloats(const float* from) { return hn::LoadU(D(), from); }
template <class Half>
HWY_INLINE V LoadFloats(const Half* from) {
  return WidenAt(D(), from);
}

#if !HWY_HAVE_SCALABLE

using DD = hn::ScalableTag<double>;
constexpr size_t kDoubles = HWY_MAX_BYTES / sizeof(double);
constexpr size_t kSumVectors = kSumLanes / kDoubles;

HWY_INLINE hn::Vec<DD> LoadDoubles(const float* from) {
  return hn::PromoteTo(DD(), hn::LoadU(hn::Rebind<float, DD>(), from));
}

template <class Half>
HWY_INLINE hn::Vec<DD> LoadDoubles(const Half* from) {
  return hn::PromoteTo(DD(), WidenAt(hn::Rebind<float, DD>(), from));
}

// Adds to each lane the squares of `rows` rows of kSumLanes elements.
template <class T>
HWY_INLINE void AddRows(const T* from, size_t rows, double* lanes) {
  const DD d;
  hn::Vec<DD> sums[kSumVectors];
  for (size_t k = 0; k < kSumVectors; ++k) sums[k] = hn::Load(d, lanes + k * kDoubles);
  for (size_t row = 0; row < rows; ++row) {
    for (size_t k = 0; k < kSumVectors; ++k) {
      const auto value = LoadDoubles(from + row * kSumLanes + k * kDoubles);
      sums[k] = hn::MulAdd(value, value, sums[k]);  // the product is exact: fused or not
    }
  }
  for (size_t k = 0; k < kSumVectors; ++k) hn::Store(sums[k], d, lanes + k * kDoubles);
}

template <class T>
HWY_NOINLINE double SumChunkInDouble(const T* from, size_t n) {
  HWY_ALIGN double lanes[kSumLanes] = {};
  const size_t rows = n / kSumLanes;
  AddRows(from, rows, lanes);
  if (const size_t rest = n % kSumLanes; rest != 0) {
    HWY_ALIGN T last[kSumLanes] = {};  // zeros add nothing: no lane is -0
    for (size_t i = 0; i < rest; ++i) last[i] = from[rows * kSumLanes + i];
    AddRows(last, 1, lanes);
  }
  for (size_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

// Lanes of one run in float32. Until they are stored, their order depends on the element type.
template <class T>
struct FloatLanes {
  static constexpr size_t kVectors = kSumLanes * sizeof(float) / HWY_MAX_BYTES;
  V sums[kVectors];

  HWY_INLINE FloatLanes() {  // written out: one of the compiler's own is not for this target
    HWY_UNROLL(8)
    for (V& sum : sums) sum = hn::Zero(D());
  }

  HWY_INLINE void AddRow(const T* row) {
    HWY_UNROLL(8)
    for (size_t k = 0; k < kVectors; ++k) {
      const V value = LoadFloats(row + k * hn::Lanes(D()));
      sums[k] = hn::MulAdd(value, value, sums[k]);
    }
  }

  HWY_INLINE void Store(float* lanes) const {
    HWY_UNROLL(8)
    for (size_t k = 0; k < kVectors; ++k) hn::Store(sums[k], D(), lanes + k * hn::Lanes(D()));
  }
};

// Even and odd elements of bfloat16 apart: they are widened where they are.
template <>
struct FloatLanes<uint16_t> {
  static constexpr size_t kVectors = kSumLanes * sizeof(float) / HWY_MAX_BYTES;
  V sums[kVectors];

  HWY_INLINE FloatLanes() {  // written out: one of the compiler's own is not for this target
    HWY_UNROLL(8)
    for (V& sum : sums) sum = hn::Zero(D());
  }

  HWY_INLINE void AddRow(const uint16_t* row) {
    const DU du;
    HWY_UNROLL(8)
    for (size_t k = 0; k < kVectors; k += 2) {
      const VU both = hn::BitCast(du, hn::LoadU(DU16(), row + k * hn::Lanes(du)));
      const V even = hn::BitCast(D(), hn::ShiftLeft<16>(both));
      const V odd = hn::BitCast(D(), hn::And(both, hn::Set(du, 0xFFFF0000u)));
      sums[k] = hn::MulAdd(even, even, sums[k]);
      sums[k + 1] = hn::MulAdd(odd, odd, sums[k + 1]);
    }
  }

  HWY_INLINE void Store(float* lanes) const {
    HWY_UNROLL(8)
    for (size_t k = 0; k < kVectors; k += 2) {
      hn::StoreInterleaved2(sums[k], sums[k + 1], D(), lanes + k * hn::Lanes(D()));
    }
  }
};

// Adds the lanes of one run of up to kSumRunElems elements to the 8 sums of a chunk.
template <class T>
HWY_INLINE void AddSquares(const T* from, size_t n, double* sums) {
  const DD d;
  FloatLanes<T> run;
  const size_t rows = n / kSumLanes;
  for (size_t row = 0; row < rows; ++row) run.AddRow(from + row * kSumLanes);
  if (const size_t rest = n % kSumLanes; rest != 0) {
    HWY_ALIGN T last[kSumLanes] = {};  // zeros add nothing
    for (size_t i = 0; i < rest; ++i) last[i] = from[rows * kSumLanes + i];
    run.AddRow(last);
  }
  HWY_ALIGN float lanes[kSumLanes];
  run.Store(lanes);
  for (size_t j = 0; j < 8; j += kDoubles) {
    const auto first = hn::Add(LoadDoubles(lanes + j), LoadDoubles(lanes + j + 16));
    const auto second = hn::Add(LoadDoubles(lanes + j + 8), LoadDoubles(lanes + j + 24));
    hn::Store(hn::Add(hn::Load(d, sums + j), hn::Add(first, second)), d, sums + j);
  }
}

// The sum of a chunk out of those of its runs.
template <class T>
HWY_INLINE double SumOfRuns(const double* sums, const T* from, size_t n) {
  const double first = (sums[0] + sums[4]) + (sums[2] + sums[6]);
  const double sum = first + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  if (HWY_LIKELY(sum >= kFloatSumMin && sum <= kFloatSumMax)) return sum;
  return SumChunkInDouble(from, n);
}

template <class T>
HWY_INLINE double SumChunk(const T* from, size_t n) {
  HWY_ALIGN double sums[8] = {};
  size_t begin = 0;
  for (; begin + kSumRunElems <= n; begin += kSumRunElems) {
    AddSquares(from + begin, kSumRunElems, sums);
  }
  if (begin < n) AddSquares(from + begin, n - begin, sums);
  return SumOfRuns(sums, from, n);
}

// Chunks `stride_elems` elements from each other, interleaved.
template <class T>
void SumChunksInterleaved(const T* from, size_t stride_elems, size_t stride_chunks,
                          double* chunk_sums) {
  HWY_ALIGN double sums[kInterleave][8] = {};
  for (size_t begin = 0; begin < kSumChunkElems; begin += kSumRunElems) {
    for (size_t p = 0; p < kInterleave; ++p) {
      AddSquares(from + p * stride_elems + begin, kSumRunElems, sums[p]);
    }
  }
  for (size_t p = 0; p < kInterleave; ++p) {
    chunk_sums[p * stride_chunks] = SumOfRuns(sums[p], from + p * stride_elems, kSumChunkElems);
  }
}

template <class T>
void SumChunks(size_t n, const T* from, double* chunk_sums) {
  const size_t stride_chunks = n / kSumChunkElems / kInterleave;
  const size_t stride_elems = stride_chunks * kSumChunkElems;
  for (size_t c = 0; c < stride_chunks; ++c) {
    SumChunksInterleaved(from + c * kSumChunkElems, stride_elems, stride_chunks, chunk_sums + c);
  }
  for (size_t begin = kInterleave * stride_elems; begin < n; begin += kSumChunkElems) {
    const size_t elems = HWY_MIN(kSumChunkElems, n - begin);
    chunk_sums[begin / kSumChunkElems] = SumChunk(from + begin, elems);
  }
}

void SimdChunkSquareSums(size_t n, Gradient g, double* chunk_sums) {
  if (g.type == DType::kFloat32) {
    SumChunks(n, static_cast<const float*>(g.data), chunk_sums);
  } else if (g.type == DType::kFloat16) {
    SumChunks(n, static_cast<const hwy::float16_t*>(g.data), chunk_sums);
  } else {
    SumChunks(n, static_cast<const uint16_t*>(g.data), chunk_sums);
  }
}

// Copies n elements from `from` to `to` and to the aligned `warm`. kStream: `to` is aligned to a vector.
template <bool kStream, class T>
HWY_INLINE void CopyTwice(size_t n, const T* from, T* to, T* warm) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto value = hn::LoadU(d, from + i);
    hn::Store(value, d, warm + i);
    if constexpr (kStream) {
      hn::Stream(value, d, to + i);
    } else {
      hn::StoreU(value, d, to + i);
    }
  }
  for (; i < n; ++i) {
    warm[i] = from[i];
    to[i] = warm[i];
  }
}

// `Raw` holds the bits of an element, T gives them their meaning.
template <class T, class Raw>
void CopyChunks(size_t n, const Raw* from, Raw* to, double* chunk_sums) {
  HWY_ALIGN Raw warm[kSumChunkElems];
  const bool stream = reinterpret_cast<uintptr_t>(to) % HWY_MAX_BYTES == 0;
  for (size_t begin = 0; begin < n; begin += kSumChunkElems) {
    const size_t elems = HWY_MIN(kSumChunkElems, n - begin);
    if (stream) {
      CopyTwice<true>(elems, from + begin, to + begin, warm);
    } else {
      CopyTwice<false>(elems, from + begin, to + begin, warm);
    }
    chunk_sums[begin / kSumChunkElems] = SumChunk(reinterpret_cast<const T*>(warm), elems);
  }
  hwy::FlushStream();
}

void SimdCopyWithSquareSums(size_t n, Gradient g, void* dst, double* chunk_sums) {
  if (g.type == DType::kFloat32) {
    CopyChunks<float>(n, static_cast<const float*>(g.data), static_cast<float*>(dst), chunk_sums);
    return;
  }
  const auto* from = static_cast<const uint16_t*>(g.data);
  auto* to = static_cast<uint16_t*>(dst);
  if (g.type == DType::kFloat16) {
    CopyChunks<hwy::float16_t>(n, from, to, chunk_sums);
  } else {
    CopyChunks<uint16_t>(n, from, to, chunk_sums);
  }
}

#else  // vectors of unknown length cannot be stored in an array, but a processor with SVE has NEON too

inline const StreamKernels& OfKnownLength() {
  const StreamKernels* const neon = StreamKernelsOf(HWY_NEON);
  return neon != nullptr ? *neon : kScalarStreamKernels;
}

void SimdChunkSquareSums(size_t n, Gradient g, double* chunk_sums) {
  OfKnownLength().chunk_square_sums(n, g, chunk_sums);
}

void SimdCopyWithSquareSums(size_t n, Gradient g, void* dst, double* chunk_sums) {
  OfKnownLength().copy_with_square_sums(n, g, dst, chunk_sums);
}

#endif  // HWY_HAVE_SCALABLE

// Whether each of n signed integers, sign aside, is below `limit`: the bits of infinity.
template <class DInt, class T = hn::TFromD<DInt>>
HWY_INLINE bool AllBelow(DInt d, size_t n, const T* from, T sign_off, T limit) {
  const size_t lanes = hn::Lanes(d);
  const auto mask = hn::Set(d, sign_off);
  auto largest0 = hn::Zero(d), largest1 = hn::Zero(d);
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    largest0 = hn::Max(largest0, hn::And(hn::LoadU(d, from + i), mask));
    largest1 = hn::Max(largest1, hn::And(hn::LoadU(d, from + i + lanes), mask));
  }
  bool below = hn::AllTrue(d, hn::Lt(hn::Max(largest0, largest1), hn::Set(d, limit)));
  for (; i < n; ++i) below = below && (from[i] & sign_off) < limit;
  return below;
}

bool SimdAllFinite(size_t n, Gradient g) {
  if (g.type == DType::kFloat32) {
    return AllBelow(DI(), n, static_cast<const int32_t*>(g.data), 0x7FFFFFFF, 0x7F800000);
  }
  const int16_t infinity = g.type == DType::kFloat16 ? 0x7C00 : 0x7F80;
  return AllBelow(DI16(), n, static_cast<const int16_t*>(g.data), int16_t{0x7FFF}, infinity);
}

HWY_INLINE float WidenOne(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  hwy::CopySameSize(&wide, &value);
  return value;
}
HWY_INLINE float WidenOne(float value) { return value; }
HWY_INLINE float WidenOne(const hwy::float16_t& half) {
  return hn::GetLane(WidenAt(hn::CappedTag<float, 1>(), &half));
}

template <bool kAdd, class T>
HWY_INLINE V SumAt(const T* src, const float* dst) {
  const V value = LoadFloats(src);
  if constexpr (kAdd) return hn::Add(hn::LoadU(D(), dst), value);
  return value;
}

template <bool kAdd, class T>
void AddRun(size_t n, const T* src, float* dst) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const V v0 = SumAt<kAdd>(src + i, dst + i);
    const V v1 = SumAt<kAdd>(src + i + lanes, dst + i + lanes);
    const V v2 = SumAt<kAdd>(src + i + 2 * lanes, dst + i + 2 * lanes);
    const V v3 = SumAt<kAdd>(src + i + 3 * lanes, dst + i + 3 * lanes);
    hn::StoreU(v0, d, dst + i);
    hn::StoreU(v1, d, dst + i + lanes);
    hn::StoreU(v2, d, dst + i + 2 * lanes);
    hn::StoreU(v3, d, dst + i + 3 * lanes);
  }
  for (; i < n; ++i) dst[i] = kAdd ? dst[i] + WidenOne(src[i]) : WidenOne(src[i]);
}

template <bool kAdd>
void AddTyped(size_t n, Gradient g, float* dst) {
  if (g.type == DType::kFloat32) {
    AddRun<kAdd>(n, static_cast<const float*>(g.data), dst);
  } else if (g.type == DType::kFloat16) {
    AddRun<kAdd>(n, static_cast<const hwy::float16_t*>(g.data), dst);
  } else {
    AddRun<kAdd>(n, static_cast<const uint16_t*>(g.data), dst);
  }
}

void SimdAddGradient(size_t n, Gradient g, AddMode mode, float* dst) {
  mode == AddMode::kAdd ? AddTyped<true>(n, g, dst) : AddTyped<false>(n, g, dst);
}

#if !HWY_HAVE_SCALABLE

HWY_INLINE Gradient ElemsFrom(Gradient g, size_t begin) {
  const size_t width = g.type == DType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
  return {static_cast<const uint8_t*>(g.data) + begin * width, g.type};
}

template <bool kNonTemporal>
HWY_INLINE void CopyOut(size_t n, const float* from, float* to) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    if constexpr (kNonTemporal) {
      hn::Stream(hn::Load(d, from + i), d, to + i);
    } else {
      hn::StoreU(hn::Load(d, from + i), d, to + i);
    }
  }
  for (; i < n; ++i) to[i] = from[i];
}

// The sum of one chunk is computed in the cache, from one source after another, and written to memory once.
template <bool kStream>
void AddChunks(size_t n, const Gradient* src, size_t count, AddMode mode, float* dst,
               double* chunk_sums) {
  HWY_ALIGN float tile[kSumChunkElems];
  for (size_t begin = 0; begin < n; begin += kSumChunkElems) {
    const size_t elems = HWY_MIN(kSumChunkElems, n - begin);
    size_t s = 0;
    if (mode == AddMode::kAdd) {
      SimdAddGradient(elems, {dst + begin, DType::kFloat32}, AddMode::kSet, tile);
    } else {
      SimdAddGradient(elems, ElemsFrom(src[s++], begin), AddMode::kSet, tile);
    }
    for (; s < count; ++s) SimdAddGradient(elems, ElemsFrom(src[s], begin), AddMode::kAdd, tile);
    chunk_sums[begin / kSumChunkElems] = SumChunk(tile, elems);
    CopyOut<kStream>(elems, tile, dst + begin);
  }
  hwy::FlushStream();
}

void SimdAddGradients(size_t n, const Gradient* src, size_t count, AddMode mode, float* dst,
                      double* chunk_sums) {
  if (reinterpret_cast<uintptr_t>(dst) % kLineBytes == 0) {
    AddChunks<true>(n, src, count, mode, dst, chunk_sums);
  } else {
    AddChunks<false>(n, src, count, mode, dst, chunk_sums);
  }
}

#else

void SimdAddGradients(size_t n, const Gradient* src, size_t count, AddMode mode, float* dst,
                      double* chunk_sums) {
  OfKnownLength().add_gradients(n, src, count, mode, dst, chunk_sums);
}

#endif  // HWY_HAVE_SCALABLE

extern const StreamKernels kStreamKernels;
const StreamKernels kStreamKernels = {
    SimdChunkSquareSums, SimdCopyWithSquareSums, SimdAllFinite, SimdAddGradient, SimdAddGradients,
};

#endif  // a target with vectors

}  // namespace forebay::cpu_adam::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu_adam/internal/per_target.h"

namespace forebay::cpu_adam::internal {

FOREBAY_TABLE_OF_TARGET(StreamKernels, StreamKernelsOf, kStreamKernels)

}  // namespace forebay::cpu_adam::internal
#endif  // HWY_ONCE
