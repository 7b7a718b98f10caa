// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/path_rates.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "absl/strings/str_format.h"
#include "daemon/exec/path_record.h"
#include "nvme/find_volume.h"
#include "protocol/error.h"
#include "protocol/units.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

using nvme::PathRates;

constexpr std::string_view kName = "rates";

void SaveRates(const std::string& path, const std::string& state_folder, const PathRates& rates) {
  const std::optional<RecordPlace> place = RecordPlaceOf(path, state_folder);
  if (!place) {
    spdlog::info("swap path {}: measured again at the next start: STATE_DIRECTORY is not set",
                 path);
    return;
  }
  SaveRecord(
      *place, kName,
      "# What this swap path gives: bytes a second, bytes, requests at once, seconds. Forebay "
      "measures it\n# again where this file is deleted.\n",
      absl::StrFormat("read = %.0f.0\nwrite = %.0f.0\nmixed = %.0f.0\n"
                      "request_bytes = %d\ndepth = %d\nread_seconds = %.9f\n",
                      rates.read, rates.write, rates.mixed, rates.request_bytes, rates.depth,
                      rates.read_seconds));
}

// True if the paths may hold durable jobs that this start would recover. A probe creates the volume from scratch, so such paths
// must not be probed.
bool MayHaveJobs(const SwapSpaceOptions& options) {
  if (options.mode == nvme::OpenMode::kReclaim) return false;
  const auto found = nvme::FindVolume(options.paths);
  if (found.ok() && !found->has_value()) return false;
  spdlog::info("swap: not measured: it may have durable jobs");
  return true;
}

}  // namespace

std::optional<PathRates> LoadRates(const std::string& path, const std::string& state_folder) {
  const std::optional<RecordPlace> place = RecordPlaceOf(path, state_folder);
  if (!place) return std::nullopt;
  const std::optional<toml::table> found = LoadRecord(*place, kName);
  if (!found) return std::nullopt;
  const toml::table& table = *found;
  PathRates rates{.read = table["read"].value_or(0.0),
                  .write = table["write"].value_or(0.0),
                  .mixed = table["mixed"].value_or(0.0),
                  .request_bytes = table["request_bytes"].value_or<uint32_t>(0),
                  .depth = table["depth"].value_or<uint32_t>(0),
                  .read_seconds = table["read_seconds"].value_or(0.0)};
  const auto is_rate = [](double rate) { return rate > 0 && rate < 1e15; };
  const bool is_whole = is_rate(rates.read) && is_rate(rates.write) && is_rate(rates.mixed) &&
                        rates.request_bytes > 0 && rates.depth > 0 && is_rate(rates.read_seconds);
  if (is_whole) return rates;
  spdlog::warn("{} is not whole", place->File(kName));
  return std::nullopt;
}

std::vector<std::optional<PathRates>> RatesOf(const SwapSpaceOptions& options,
                                              const nvme::EngineOptions& engine,
                                              std::chrono::nanoseconds probe_limit) {
  std::vector<std::optional<PathRates>> rates;
  for (const nvme::PathOptions& path : options.paths) {
    rates.push_back(LoadRates(path.path, options.state_folder));
  }
  const bool is_known = std::ranges::all_of(rates, [](const auto& one) { return one.has_value(); });
  if (is_known || probe_limit.count() == 0 || MayHaveJobs(options)) return rates;
  spdlog::info("swap: measuring {}", options.paths.size() == 1 ? "the path" : "all paths");
  const auto probed = nvme::ProbePaths({.paths = options.paths,
                                        .mode = nvme::OpenMode::kReclaim,
                                        .life = options.life,
                                        .ledger_bytes_max = options.ledger_bytes_max},
                                       engine, probe_limit);
  if (!probed.ok()) {
    // Paths that cannot be opened are no warning here: the start of the daemon reports them.
    const bool is_io = protocol::IdOf(probed.status()) == protocol::ErrorId::kSwapIo;
    spdlog::log(is_io ? spdlog::level::warn : spdlog::level::debug, "swap: not measured: {}",
                std::string(probed.status().message()));
    return rates;
  }
  for (size_t i = 0; i < rates.size(); ++i) {
    const std::string& path = options.paths[i].path;
    rates[i] = (*probed)[i];
    if (!rates[i]) {
      spdlog::info("swap path {} ({}) is too small or too slow to be measured", i, path);
      continue;
    }
    spdlog::info(
        "swap path {} ({}): {:.2f} GB/s read, {:.2f} written, {:.2f} both, with {} requests of {}",
        i, path, rates[i]->read * 1e-9, rates[i]->write * 1e-9, rates[i]->mixed * 1e-9,
        rates[i]->depth, protocol::FormatBytes(rates[i]->request_bytes));
    SaveRates(path, options.state_folder, *rates[i]);
  }
  return rates;
}

}  // namespace forebay::daemon
