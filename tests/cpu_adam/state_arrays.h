// SPDX-License-Identifier: Apache-2.0
// Guarded arrays for every plane that an optimizer and a format can have, with data.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "cpu_adam/update_kernel.h"
#include "gtest/gtest.h"
#include "tests/cpu_adam/planes.h"

namespace forebay::testing {

class StateArrays {
 public:
  StateArrays(size_t n, size_t offset)
      : weights(n, offset),
        weights16(n, offset),
        remainder(n, offset),
        master(n, offset),
        moments{{n, offset}, {n, offset}, {n, offset}},
        moments16{{n, offset}, {n, offset}, {n, offset}},
        codes{{Whole(n), offset}, {Whole(n), offset}, {Whole(n), offset}},
        scales{{Groups(n), offset}, {Groups(n), offset}, {Groups(n), offset}} {}

  void Assign(const AdamData& data) {
    const size_t n = weights.size();
    weights.Assign(data.w);
    master.Assign(data.w);
    for (size_t i = 0; i < n; ++i) {
      weights16.data()[i] = RoundToBf16(data.w[i]);
      remainder.data()[i] = RemainderOf(data.w[i]);
    }
    const std::vector<float>* const sources[] = {&data.m, &data.v, &data.v};
    std::mt19937 random(7);
    for (size_t m = 0; m < protocol::kMomentsMax; ++m) {
      moments[m].Assign(*sources[m]);
      for (size_t i = 0; i < n; ++i) moments16[m].data()[i] = TopHalf((*sources[m])[i]);
      for (size_t i = 0; i < codes[m].size(); ++i) {
        codes[m].data()[i] = static_cast<uint8_t>(i % kZeroesEach == 0 ? 0 : random());
      }
      for (size_t i = 0; i < scales[m].size(); ++i) {
        scales[m].data()[i] = i % 5 == 3 ? 0.0f : 1e-5f * static_cast<float>(1 + random() % 9);
      }
    }
  }

  cpu_adam::StatePlanes Planes(protocol::StateFormat format) {
    cpu_adam::StatePlanes planes;
    planes.weights = format.weights == protocol::DType::kFloat32
                         ? static_cast<void*>(weights.data())
                         : weights16.data();
    planes.remainder = remainder.data();
    planes.master = master.data();
    for (size_t m = 0; m < protocol::kMomentsMax; ++m) {
      planes.moments[m] = moments[m].data();
      if (format.format == protocol::Format::kBf16) planes.moments[m] = moments16[m].data();
      if (format.format == protocol::Format::kInt8) {
        planes.moments[m] = codes[m].data();
        planes.scales[m] = scales[m].data();
      }
    }
    planes.first_elem = 12345;
    return planes;
  }

  void ExpectGuards() const {
    EXPECT_TRUE(weights.GuardsIntact() && weights16.GuardsIntact() && remainder.GuardsIntact() &&
                master.GuardsIntact());
    for (size_t m = 0; m < protocol::kMomentsMax; ++m) {
      EXPECT_TRUE(moments[m].GuardsIntact() && moments16[m].GuardsIntact() &&
                  codes[m].GuardsIntact() && scales[m].GuardsIntact())
          << "moment " << m;
    }
  }

  // Compares all arrays. Arrays that the format or optimizer does not use still hold their initial values.
  void ExpectEquals(StateArrays& other) {
    EXPECT_TRUE(SameBits(weights.Copy(), other.weights.Copy()));
    EXPECT_EQ(weights16.Copy(), other.weights16.Copy());
    EXPECT_EQ(remainder.Copy(), other.remainder.Copy());
    EXPECT_TRUE(SameBits(master.Copy(), other.master.Copy()));
    for (size_t m = 0; m < protocol::kMomentsMax; ++m) {
      EXPECT_TRUE(SameBits(moments[m].Copy(), other.moments[m].Copy())) << "moment " << m;
      EXPECT_EQ(moments16[m].Copy(), other.moments16[m].Copy()) << "moment " << m;
      EXPECT_EQ(codes[m].Copy(), other.codes[m].Copy()) << "moment " << m;
      EXPECT_TRUE(SameBits(scales[m].Copy(), other.scales[m].Copy())) << "moment " << m;
    }
  }

  GuardedArray<float> weights;
  GuardedArray<uint16_t> weights16;
  GuardedArray<int16_t> remainder;
  GuardedArray<float> master;
  GuardedArray<float> moments[protocol::kMomentsMax];
  GuardedArray<uint16_t> moments16[protocol::kMomentsMax];
  GuardedArray<uint8_t> codes[protocol::kMomentsMax];
  GuardedArray<float> scales[protocol::kMomentsMax];

 private:
  static constexpr size_t kZeroesEach = 13;
  static size_t Groups(size_t n) { return (n + protocol::kScaleElems - 1) / protocol::kScaleElems; }
  static size_t Whole(size_t n) { return Groups(n) * protocol::kScaleElems; }
};

}  // namespace forebay::testing
