// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_harness.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
double Quantile(const std::vector<double>& sorted, double q) {
  const double place = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(place);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (place - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

absl::StatusOr<BenchResult> MeasureCase(const BenchCase& what, uint32_t samples,
                                        const Sampler& value, const Sampler& limit) {
  ASSIGN_OR_RETURN(BenchResult result,
                   MeasureCase(what, samples, value, {{"limit", BenchLoop::Role::kLimit, limit}}));
  result.more.clear();
  return result;
}

absl::StatusOr<BenchResult> MeasureCase(const BenchCase& what, uint32_t samples,
                                        const Sampler& value, const std::vector<BenchLoop>& loops) {
  RETURN_IF_ERROR(value().status());
  for (const BenchLoop& loop : loops) RETURN_IF_ERROR(loop.run().status());
  BenchResult result{.what = what, .samples = samples};
  std::vector<double> values;
  std::vector<std::vector<double>> beside(loops.size());
  for (uint32_t i = 0; i < samples; ++i) {
    ASSIGN_OR_RETURN(const Sample sample, value());
    values.push_back(sample.value);
    result.bytes_read += sample.bytes_read;
    result.bytes_written += sample.bytes_written;
    for (size_t l = 0; l < loops.size(); ++l) {
      ASSIGN_OR_RETURN(const Sample bare, loops[l].run());
      beside[l].push_back(bare.value);
    }
  }
  std::ranges::sort(values);
  result.value = Quantile(values, 0.5);
  result.spread = (Quantile(values, 0.75) - Quantile(values, 0.25)) / result.value;
  const bool rate = what.measure == Measure::kRate;
  for (size_t l = 0; l < loops.size(); ++l) {
    std::ranges::sort(beside[l]);
    const double median = Quantile(beside[l], 0.5);
    result.more[loops[l].name] = median;
    if (loops[l].role != BenchLoop::Role::kLimit) continue;
    if (result.limit == 0 || (median > result.limit) == rate) result.limit = median;
  }
  result.share = rate ? result.value / result.limit : result.limit / result.value;
  return result;
}

nlohmann::ordered_json ToJson(const BenchResult& result) {
  nlohmann::ordered_json line = {{"bench", result.what.bench},
                                 {"case", result.what.name},
                                 {"value", result.value},
                                 {"unit", result.what.unit},
                                 {"limit", result.limit},
                                 {"limit_what", result.what.limit_what},
                                 {"share", result.share},
                                 {"samples", result.samples},
                                 {"spread", result.spread},
                                 {"bytes_read", result.bytes_read},
                                 {"bytes_written", result.bytes_written}};
  line.update(result.more);
  return line;
}

std::string ResultsText(const std::vector<BenchResult>& results) {
  Table table({"CASE", "VALUE", "LIMIT", "UNIT", "SHARE", "SAMPLES", "SPREAD", "READ", "WRITTEN",
               "LIMIT FROM"});
  for (const BenchResult& result : results) {
    table.Add({result.what.name, absl::StrFormat("%.3g", result.value),
               absl::StrFormat("%.3g", result.limit), result.what.unit,
               absl::StrFormat("%.2f", result.share), absl::StrCat(result.samples),
               Percent(result.spread), protocol::FormatBytes(result.bytes_read),
               protocol::FormatBytes(result.bytes_written), result.what.limit_what});
  }
  return table.Text();
}

}  // namespace forebay::tools
