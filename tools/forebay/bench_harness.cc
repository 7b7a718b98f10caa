#include "tools/forebay/bench_harness.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "protocol/status_macros.h"
#include "protocol/units.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

// `sorted` is not empty; q in [0, 1].
double Quantile(const std::vector<double>& sorted, double q) {
  const double place = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(place);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (place - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

}  // namespace

absl::StatusOr<BenchResult> MeasureCase(const BenchCase& what, uint32_t samples,
                                        const Sampler& value, const Sampler& limit) {
  RETURN_IF_ERROR(value().status());
  RETURN_IF_ERROR(limit().status());
  BenchResult result{.what = what, .samples = samples};
  std::vector<double> values;
  std::vector<double> limits;
  for (uint32_t i = 0; i < samples; ++i) {
    ASSIGN_OR_RETURN(const Sample sample, value());
    ASSIGN_OR_RETURN(const Sample bare, limit());
    values.push_back(sample.value);
    limits.push_back(bare.value);
    result.bytes_read += sample.bytes_read;
    result.bytes_written += sample.bytes_written;
  }
  std::ranges::sort(values);
  std::ranges::sort(limits);
  result.value = Quantile(values, 0.5);
  result.limit = Quantile(limits, 0.5);
  result.spread = (Quantile(values, 0.75) - Quantile(values, 0.25)) / result.value;
  result.share =
      what.measure == Measure::kRate ? result.value / result.limit : result.limit / result.value;
  return result;
}

nlohmann::ordered_json ToJson(const BenchResult& result) {
  return {{"bench", result.what.bench},
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
}

std::string ResultsText(const std::vector<BenchResult>& results) {
  Table table({"CASE", "VALUE", "LIMIT", "UNIT", "SHARE", "SAMPLES", "SPREAD", "READ", "WRITTEN",
               "LIMIT IS"});
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
