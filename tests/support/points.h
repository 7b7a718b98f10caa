// SPDX-License-Identifier: Apache-2.0
// Points of a training at which a test ends the daemon.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "daemon/core/node/node_state.h"
#include "gtest/gtest.h"
#include "tests/support/job_cases.h"

namespace forebay::testing {

// Turns after which a daemon ends, of the turns that a training takes up to step `steps`. By default turn 0, and a random turn
// of each other of 20 equal parts; FOREBAY_SEED sets the seed. Every `stride`-th turn if FOREBAY_EVERY_POINT is set or if these
// are no more than 20. `T` is a Training.
template <typename T>
std::vector<uint64_t> PointsOf(const JobCase& with, const daemon::NodeState::Options& options,
                               uint64_t steps, uint64_t stride = 1) {
  constexpr uint64_t kParts = 20;
  T run(with, options);
  run.AttachAll();
  uint64_t count = 0;
  for (; run.answered_ < steps; ++count) run.Turn();
  std::vector<uint64_t> points;
  if (std::getenv("FOREBAY_EVERY_POINT") != nullptr || count / stride <= kParts) {
    for (uint64_t point = 0; point < count; point += stride) points.push_back(point);
    return points;
  }
  const char* const given = std::getenv("FOREBAY_SEED");
  std::mt19937_64 random(given != nullptr ? std::strtoull(given, nullptr, 10) : 14);
  points.push_back(0);
  for (uint64_t part = 1; part < kParts; ++part) {
    const uint64_t begin = count * part / kParts;
    points.push_back(begin + random() % (count * (part + 1) / kParts - begin));
  }
  return points;
}

// Calls `body(run, point)` for each point of a training of three steps (PointsOf()): `run` is a new training that has taken
// `point` turns. `prepare(run)` is called before the first turn. Ends at the first failure. Returns the number of points.
template <typename T, typename Body, typename Prepare = void (*)(T&)>
size_t AtEachPoint(
    const JobCase& with, const daemon::NodeState::Options& options, Body body,
    Prepare prepare = [](T&) {}) {
  constexpr uint64_t kSteps = 3;
  const uint64_t stride = with.place == Place::kSumsOnSwap ? 9 : 1;
  const std::vector<uint64_t> points = PointsOf<T>(with, options, kSteps, stride);
  for (const uint64_t point : points) {
    SCOPED_TRACE(::testing::Message() << "point " << point);
    T run(with, options);
    run.AttachAll();
    prepare(run);
    for (uint64_t turns = 0; turns < point; ++turns) run.Turn();
    body(run, point);
    if (::testing::Test::HasFailure()) break;
  }
  return points.size();
}

}  // namespace forebay::testing
