// SPDX-License-Identifier: Apache-2.0
// Measures a result and a limit in alternation, and their ratio. On a shared machine only such ratios count.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace forebay::tools {

enum class Measure { kRate, kTime };

struct BenchCase {
  std::string bench;  // "update"
  std::string name;   // "update/opt=adamw/format=fp32/place=nvme"
  std::string unit;   // "GB/s"
  std::string limit_what;
  Measure measure = Measure::kRate;
};

// Measurement of one round of the measured side or of a loop.
struct Sample {
  double value = 0;
  uint64_t bytes_read = 0;  // bytes that the measured side read in this round
  uint64_t bytes_written = 0;
};

// Interpolates linearly between two neighbouring values. `sorted` is not empty; q in [0, 1].
double Quantile(const std::vector<double>& sorted, double q);

using Sampler = std::function<absl::StatusOr<Sample>()>;

// A loop that runs once in each round, next to the measured side. The median of the loop is a candidate for the limit, or is
// only shown with the result.
struct BenchLoop {
  enum class Role { kLimit, kShown };
  std::string name;  // key in the JSON line
  Role role = Role::kLimit;
  Sampler run;
};

struct BenchResult {
  BenchCase what;
  double value = 0;  // median
  double limit = 0;  // median of the limit; of several loops the best median
  double share = 0;  // value / limit for rates, limit / value for times
  uint32_t samples = 0;
  double spread = 0;  // interquartile range of the values over their median
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  nlohmann::ordered_json more = {};  // fields of this bench; medians of its loops
};

// Runs `value` and `limit` in alternation: one unrecorded round, then `samples` recorded rounds.
absl::StatusOr<BenchResult> MeasureCase(const BenchCase& what, uint32_t samples,
                                        const Sampler& value, const Sampler& limit);

// Alternates the measured side with any number of loops. At least one loop is a limit. `more` of the result has the median of
// each loop.
absl::StatusOr<BenchResult> MeasureCase(const BenchCase& what, uint32_t samples,
                                        const Sampler& value, const std::vector<BenchLoop>& loops);

nlohmann::ordered_json ToJson(const BenchResult& result);
std::string ResultsText(const std::vector<BenchResult>& results);

// Receives each result as soon as its case is measured.
using Report = std::function<absl::Status(const BenchResult& result)>;

// The benches of `forebay bench`; each reports its cases one by one.
struct BenchOptions;
absl::Status BenchAdam(const BenchOptions& options, const Report& report);
absl::Status BenchCopies(const BenchOptions& options, const Report& report);
absl::Status BenchDisk(const BenchOptions& options, const Report& report);
absl::Status BenchStep(const BenchOptions& options, const Report& report);

}  // namespace forebay::tools
