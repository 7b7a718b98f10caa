// One figure beside one limit, taken in alternation: on a shared machine only such ratios count.
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

// One round of either side.
struct Sample {
  double value = 0;
  uint64_t bytes_read = 0;  // by the measured side, in this round
  uint64_t bytes_written = 0;
};

using Sampler = std::function<absl::StatusOr<Sample>()>;

struct BenchResult {
  BenchCase what;
  double value = 0;  // median
  double limit = 0;  // median
  double share = 0;  // value / limit for rates, limit / value for times
  uint32_t samples = 0;
  double spread = 0;  // interquartile range of the values over their median
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
};

// One unrecorded round of both sides, then `samples` rounds that alternate between them.
absl::StatusOr<BenchResult> MeasureCase(const BenchCase& what, uint32_t samples,
                                        const Sampler& value, const Sampler& limit);

nlohmann::ordered_json ToJson(const BenchResult& result);
std::string ResultsText(const std::vector<BenchResult>& results);

// The benches; each returns its cases.
struct BenchOptions;
absl::StatusOr<std::vector<BenchResult>> BenchFetch(const BenchOptions& options);
absl::StatusOr<std::vector<BenchResult>> BenchUpdate(const BenchOptions& options);

}  // namespace forebay::tools
