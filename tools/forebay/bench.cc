#include "tools/forebay/bench.h"

#include <array>
#include <cstdio>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/status_macros.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {
namespace {

struct Entry {
  std::string_view name;
  absl::StatusOr<std::vector<BenchResult>> (*run)(const BenchOptions& options);
};

constexpr std::array kBenches = {Entry{"fetch", BenchFetch}, Entry{"update", BenchUpdate}};

}  // namespace

std::string BenchNames() {
  std::string names;
  for (const Entry& entry : kBenches) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(entry.name));
  }
  return names;
}

absl::Status Bench(const BenchOptions& options, bool as_json) {
  for (const Entry& entry : kBenches) {
    if (entry.name != options.what) continue;
    ASSIGN_OR_RETURN(const std::vector<BenchResult> results, entry.run(options));
    if (as_json) {
      for (const BenchResult& result : results) std::printf("%s\n", ToJson(result).dump().c_str());
    } else {
      std::printf("%s", ResultsText(results).c_str());
    }
    return absl::OkStatus();
  }
  return protocol::MakeError(protocol::ErrorId::kOption,
                             absl::StrCat("no bench is called ", options.what),
                             absl::StrCat("one of: ", BenchNames()));
}

}  // namespace forebay::tools
