// SPDX-License-Identifier: Apache-2.0
#include "daemon/config.h"

#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr uint64_t kBlockElemsMax = uint64_t{1} << 26;
constexpr uint32_t kWorkersMax = 1024;
constexpr int kCpuMax = 65535;
constexpr int kNiceMax = 19;
constexpr uint64_t kLeaseMsMax = 3'600'000;
constexpr uint64_t kSwapDeadlineMsMin = 1000;
constexpr uint64_t kSwapDeadlineMsMax = 3'600'000;

// A key of older releases. It has no effect, and its value is not read. The next release removes it.
constexpr std::string_view kEnduranceKey = "swap.endurance";

// Place of a value in the settings, for messages.
struct Place {
  std::string text;  // "forebay.toml:12" or "--set"
  std::string key;
};

absl::Status Bad(const Place& place, std::string_view what, std::string_view hint = {}) {
  return MakeError(ErrorId::kConfig,
                   absl::StrCat(place.text, ": ", place.key, ": ", std::string(what)), hint);
}

absl::StatusOr<std::string> TextOf(const toml::node& node, const Place& place) {
  const auto text = node.value_exact<std::string>();
  if (!text.has_value()) return Bad(place, "is not a string");
  if (text->find('\0') != text->npos) return Bad(place, "has a zero byte in it");
  return *text;
}

absl::StatusOr<uint64_t> SizeOf(const toml::node& node, const Place& place) {
  if (const auto number = node.value_exact<int64_t>()) {
    if (*number < 0) return Bad(place, "is negative");
    return static_cast<uint64_t>(*number);
  }
  constexpr std::string_view kHint = "write 4096, \"64MiB\" or \"2GiB\"";
  if (!node.is_string()) return Bad(place, "is not a size", kHint);
  ASSIGN_OR_RETURN(const std::string text, TextOf(node, place));
  const auto bytes = protocol::ParseBytes(text);
  if (bytes.ok()) return *bytes;
  return Bad(place, std::string(bytes.status().message()), kHint);
}

struct Range {
  uint64_t from;
  uint64_t to;
};

absl::StatusOr<uint64_t> NumberOf(const toml::node& node, const Place& place, Range range) {
  const auto number = node.value_exact<int64_t>();
  if (!number.has_value()) return Bad(place, "is not a whole number");
  if (*number < 0 || static_cast<uint64_t>(*number) < range.from ||
      static_cast<uint64_t>(*number) > range.to) {
    return Bad(place, absl::StrCat(*number, " is not in ", range.from, " to ", range.to));
  }
  return static_cast<uint64_t>(*number);
}

// Calls `take` for each element of a list, or for the value itself.
absl::Status ForEach(const toml::node& node,
                     const std::function<absl::Status(const toml::node&)>& take) {
  const toml::array* array = node.as_array();
  if (array == nullptr) return take(node);
  for (const toml::node& element : *array) RETURN_IF_ERROR(take(element));
  return absl::OkStatus();
}

// Functions that read the value of a key into the configuration. The templates read into one field.

template <auto kField>
absl::Status SetText(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(config.*kField, TextOf(node, place));
  return absl::OkStatus();
}

template <auto kField, uint64_t kFrom, uint64_t kTo>
absl::Status SetNumber(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(const uint64_t number, NumberOf(node, place, {kFrom, kTo}));
  using Field = std::remove_reference_t<decltype(config.*kField)>;
  config.*kField = Field(number);
  return absl::OkStatus();
}

// `kHintForZero`: what to write instead of 0.
template <auto kField, const auto& kHintForZero>
absl::Status SetSize(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(config.*kField, SizeOf(node, place));
  return config.*kField > 0 ? absl::OkStatus() : Bad(place, "is 0", kHintForZero);
}

template <auto kField>
absl::Status SetSizes(const toml::node& node, const Place& place, Config& config) {
  (config.*kField).clear();
  return ForEach(node, [&](const toml::node& element) -> absl::Status {
    ASSIGN_OR_RETURN(const uint64_t bytes, SizeOf(element, place));
    if (bytes == 0) return Bad(place, "is 0");
    (config.*kField).push_back(bytes);
    return absl::OkStatus();
  });
}

// `kWords`: pairs of a word and its value.
template <auto kField, const auto& kWords>
absl::Status SetWord(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(const std::string text, TextOf(node, place));
  for (const auto& [word, value] : kWords) {
    if (text != word) continue;
    config.*kField = value;
    return absl::OkStatus();
  }
  const auto append = [](std::string* known, const auto& pair) { known->append(pair.first); };
  return Bad(place,
             absl::StrCat("\"", text, "\" is none of ", absl::StrJoin(kWords, ", ", append)));
}

absl::Status SetSocketPath(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(config.socket_path, TextOf(node, place));
  return config.socket_path.empty() ? Bad(place, "is empty") : absl::OkStatus();
}

absl::Status SetMode(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(const std::string text, TextOf(node, place));
  const bool octal = !text.empty() && text.size() <= 4 &&
                     std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '7'; });
  if (!octal) return Bad(place, absl::StrCat("\"", text, "\" is not octal, as \"0660\" is"));
  config.socket_mode = static_cast<uint32_t>(std::stoul(text, nullptr, 8)) & 0777;
  return absl::OkStatus();
}

absl::Status SetSwapPaths(const toml::node& node, const Place& place, Config& config) {
  config.swap_paths.clear();
  return ForEach(node, [&](const toml::node& element) -> absl::Status {
    ASSIGN_OR_RETURN(std::string path, TextOf(element, place));
    if (path.empty()) return Bad(place, "has an empty path");
    config.swap_paths.push_back(std::move(path));
    return absl::OkStatus();
  });
}

absl::Status SetLedger(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(config.swap_ledger_bytes, SizeOf(node, place));
  const uint64_t bytes = config.swap_ledger_bytes;
  if (bytes > 0 && bytes <= nvme::Volume::kLedgerBytesMax) return absl::OkStatus();
  return Bad(place, absl::StrCat(bytes, " is not in 1 to ", nvme::Volume::kLedgerBytesMax),
             "leave it out for a 4096th of the capacity");
}

// "4" or "0-3".
absl::Status AddCpus(std::string_view text, const Place& place, std::vector<int>& cpus) {
  const size_t dash = text.find('-');
  int first = 0;
  int last = 0;
  const bool ok =
      absl::SimpleAtoi(std::string(text.substr(0, dash)), &first) &&
      absl::SimpleAtoi(std::string(text.substr(dash == text.npos ? 0 : dash + 1)), &last);
  if (!ok || first < 0 || first > last || last > kCpuMax) {
    return Bad(place,
               absl::StrCat("\"", std::string(text), "\" is neither a CPU (0 to ", kCpuMax,
                            ") nor a range of them"),
               "write \"0-3,8\" or [0, 1, 2, 3, 8]");
  }
  for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  return absl::OkStatus();
}

absl::Status SetCpus(const toml::node& node, const Place& place, Config& config) {
  config.update_cpus.clear();
  return ForEach(node, [&](const toml::node& element) -> absl::Status {
    if (const auto number = element.value_exact<int64_t>()) {
      return AddCpus(absl::StrCat(*number), place, config.update_cpus);
    }
    ASSIGN_OR_RETURN(const std::string text, TextOf(element, place));
    const std::vector<std::string> parts = absl::StrSplit(text, ',');
    for (const std::string& part : parts) {
      RETURN_IF_ERROR(AddCpus(part, place, config.update_cpus));
    }
    return absl::OkStatus();
  });
}

absl::Status SetBlockElems(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(config.block_elems,
                   NumberOf(node, place, {protocol::kStatesAlignElems, kBlockElemsMax}));
  if (config.block_elems % protocol::kStatesAlignElems == 0) return absl::OkStatus();
  return Bad(place, absl::StrCat(config.block_elems, " is not a multiple of ",
                                 protocol::kStatesAlignElems));
}

absl::Status SetDurability(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(const std::string text, TextOf(node, place));
  const auto durability = protocol::ParseDurability(text);
  if (!durability.ok()) {
    return Bad(place, std::string(durability.status().message()),
               protocol::HintOf(durability.status()));
  }
  config.durability = *durability;
  return absl::OkStatus();
}

constexpr char kNoLimit[] = "leave it out for half of the memory";
constexpr char kNoQuota[] = "leave it out for no quota";
constexpr char kNoStaging[] = "leave it out for two blocks per worker and four more";

constexpr std::pair<std::string_view, nvme::FileLife> kLives[] = {
    {"kept", nvme::FileLife::kKept}, {"unlinked", nvme::FileLife::kUnlinked}};
constexpr std::pair<std::string_view, bool> kProbes[] = {{"once", true}, {"never", false}};
constexpr std::pair<std::string_view, bool> kStops[] = {{"free", false}, {"durable", true}};
constexpr std::pair<std::string_view, nvme::EngineChoice> kEngines[] = {
    {"auto", nvme::EngineChoice::kAuto},
    {"io_uring", nvme::EngineChoice::kUring},
    {"threads", nvme::EngineChoice::kThreads}};
constexpr std::pair<std::string_view, LogLevel> kLogLevels[] = {{"debug", LogLevel::kDebug},
                                                                {"info", LogLevel::kInfo},
                                                                {"warning", LogLevel::kWarning},
                                                                {"error", LogLevel::kError}};
constexpr std::pair<std::string_view, pinned_mem::LockPolicy> kLocks[] = {
    {"required", pinned_mem::LockPolicy::kRequired},
    {"best_effort", pinned_mem::LockPolicy::kBestEffort}};
constexpr std::pair<std::string_view, PidfdPolicy> kPidfds[] = {
    {"required", PidfdPolicy::kRequired}, {"best_effort", PidfdPolicy::kBestEffort}};

struct Key : ConfigKey {
  absl::Status (*set)(const toml::node& node, const Place& place, Config& config);
};

constexpr Key kKeys[] = {
    {{"socket.path", "path", "where clients connect"}, SetSocketPath},
    {{"socket.mode", "octal string", "permissions of the socket, \"0660\""}, SetMode},
    {{"socket.operators", "group", "who sees the jobs of all users, beside root"},
     SetText<&Config::socket_operators>},
    {{"dram.limit", "size",
      "memory for everything; by default half of the control group or machine"},
     SetSize<&Config::dram_limit_bytes, kNoLimit>},
    {{"dram.job_percent", "number", "1 to 100: what one job may take of the limit"},
     SetNumber<&Config::dram_job_percent, 1, 100>},
    {{"dram.uid_quota", "size",
      "what the jobs of one user, but root, may take together; all by default"},
     SetSize<&Config::dram_uid_bytes, kNoQuota>},
    {{"swap.uid_quota", "size", "the same of swap"}, SetSize<&Config::swap_uid_bytes, kNoQuota>},
    {{"swap.paths", "list of paths", "directories or block devices; none: no swap"}, SetSwapPaths},
    {{"swap.capacity", "size or list of sizes", "reserved on each path"},
     SetSizes<&Config::swap_capacity_bytes>},
    {{"swap.staging", "size", "memory between swap and the update"},
     SetSize<&Config::swap_staging_bytes, kNoStaging>},
    {{"swap.deadline", "milliseconds",
      "how long a transfer is waited for; then it fails with E_SWAP_TIMEOUT; 60000 by default"},
     SetNumber<&Config::swap_deadline, kSwapDeadlineMsMin, kSwapDeadlineMsMax>},
    {{"swap.limit_rate", "size or list of sizes",
      "bytes a second of each path at most, for benches of a slower disk; none by default"},
     SetSizes<&Config::swap_limit_rate>},
    {{"swap.ledger", "size",
      "room for a ledger of durable jobs, twice on the first and twice on the last path, when "
      "swap is made anew; by default 1 MiB, or a 4096th of the capacity (above 4 GiB) up to 1 "
      "GiB, or a 256th of it (below 256 MiB)"},
     SetLedger},
    {{"swap.life", "kept | unlinked", "unlinked: the space is free however the daemon ends"},
     SetWord<&Config::swap_life, kLives>},
    {{"swap.probe", "once | never",
      "once: kept paths are measured at their first start, in at most 10 s"},
     SetWord<&Config::swap_probe, kProbes>},
    {{"jobs.durability", "memory | epoch=N | step",
      "of jobs that do not say: what a power cut or the daemon's death can undo: all steps, at "
      "most N, none that was answered; memory by default"},
     SetDurability},
    {{"jobs.at_stop", "free | durable",
      "of jobs of durability memory: durable gives them the swap of level epoch, and makes their "
      "newest step durable when the daemon stops; free by default"},
     SetWord<&Config::durable_at_stop, kStops>},
    {{"io.engine", "auto | io_uring | threads", "how swap is read and written"},
     SetWord<&Config::io_engine, kEngines>},
    {{"update.workers", "number", "threads of the update; one per physical core by default"},
     SetNumber<&Config::workers, 0, kWorkersMax>},
    {{"update.cpus", "list of CPUs", "where those threads run, \"0-3,8\"; everywhere by default"},
     SetCpus},
    {{"update.numa_node", "number", "the same, as the CPUs of a NUMA node"},
     SetNumber<&Config::update_numa_node, 0, kCpuMax>},
    {{"update.nice", "number",
      "0 to 19: the higher, the less those threads get beside other processes; 5 by default"},
     SetNumber<&Config::update_nice, 0, kNiceMax>},
    {{"update.target", "best | name", "instruction set of the kernels"},
     SetText<&Config::update_target>},
    {{"update.block_elems", "number", "elements of a block, a multiple of 64"}, SetBlockElems},
    {{"reader.lease_max", "milliseconds",
      "how long a reader's lease may delay an update before its session ends; 10000 by default"},
     SetNumber<&Config::reader_lease_max, 1, kLeaseMsMax>},
    {{"log.level", "debug | info | warning | error", "what is logged to stderr"},
     SetWord<&Config::log_level, kLogLevels>},
    {{"memlock", "required | best_effort", "whether memory that cannot be locked is refused"},
     SetWord<&Config::lock, kLocks>},
    {{"pidfd", "required | best_effort",
      "whether a kernel is refused that does not tell when a client's process ends"},
     SetWord<&Config::pidfd, kPidfds>},
};

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// Returns a hint with the nearest key. Returns an empty text if the nearest key differs by more than a few letters.
std::string HintForUnknown(std::string_view key) {
  const auto distance = [&](const ConfigKey& known) { return EditDistance(key, known.name); };
  const ConfigKey& nearest = std::ranges::min(kKeys, {}, distance);
  if (distance(nearest) > 1 + nearest.name.size() / 4) return "";
  return absl::StrCat("did you mean ", std::string(nearest.name), "?");
}

absl::Status SetKey(const toml::node& node, const Place& place, Config& config) {
  if (place.key == kEnduranceKey) {
    config.sets_endurance = true;
    return absl::OkStatus();
  }
  const Key* const key = std::ranges::find(kKeys, place.key, &Key::name);
  if (key != std::end(kKeys)) return key->set(node, place, config);
  return MakeError(ErrorId::kConfig,
                   absl::StrCat(place.text, ": unknown key ", absl::Utf8SafeCEscape(place.key)),
                   HintForUnknown(place.key));
}

// Every leaf of the table under its dotted key.
absl::Status Walk(const toml::table& table, const std::string& prefix, const std::string& file,
                  Config& config) {
  for (const auto& [name, node] : table) {
    const std::string key = absl::StrCat(prefix, std::string(name.str()));
    const Place place{absl::StrCat(file, ":", name.source().begin.line), key};
    const bool is_section =
        node.is_table() && std::ranges::any_of(kKeys, [&](const ConfigKey& known) {
          return known.name.starts_with(absl::StrCat(key, "."));
        });
    if (is_section) {
      RETURN_IF_ERROR(Walk(*node.as_table(), absl::StrCat(key, "."), file, config));
    } else {
      RETURN_IF_ERROR(SetKey(node, place, config));
    }
  }
  return absl::OkStatus();
}

std::string ParseErrorText(const toml::parse_error& error, const std::string& file) {
  return absl::StrCat(file, ":", error.source().begin.line, ": ", std::string(error.description()));
}

}  // namespace

std::vector<ConfigKey> ConfigKeys() { return {std::begin(kKeys), std::end(kKeys)}; }

absl::Status LoadConfigFile(const std::string& path, Config& config) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {  // a folder reads as an empty file
    return MakeError(ErrorId::kConfig, absl::StrCat(path, ": is a directory"), "name a TOML file");
  }
  if (::access(path.c_str(), R_OK) != 0) {
    return MakeError(ErrorId::kConfig, absl::StrCat(path, ": ", std::strerror(errno)),
                     "name a file that the daemon may read; daemon/forebay.toml has every key");
  }
  try {
    const toml::table table = toml::parse_file(path);
    return Walk(table, "", path, config);
  } catch (const toml::parse_error& error) {
    return MakeError(ErrorId::kConfig, ParseErrorText(error, path));
  }
}

absl::Status ApplySetting(std::string_view setting, Config& config) {
  const size_t equals = setting.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    return MakeError(ErrorId::kConfig,
                     absl::StrCat("--set ", std::string(setting), ": not of the form key=value"));
  }
  const Place place{"--set", std::string(setting.substr(0, equals))};
  const std::string value(setting.substr(equals + 1));
  try {  // as in the file: numbers, quoted strings, lists
    const toml::table table = toml::parse(absl::StrCat("value = ", value));
    return SetKey(*table.get("value"), place, config);
  } catch (const toml::parse_error&) {
    // The value is not TOML: the code below takes it as a string, or as a list of strings.
  }
  toml::array list;
  const std::vector<std::string> parts = absl::StrSplit(value, ',');
  for (const std::string& part : parts) list.push_back(part);
  if (list.size() > 1) return SetKey(list, place, config);
  return SetKey(toml::value<std::string>(value), place, config);
}

absl::Status CheckConfig(const Config& config) {
  if (!config.update_cpus.empty() && config.update_numa_node >= 0) {
    return MakeError(ErrorId::kConfig, "update.cpus and update.numa_node are both set",
                     "leave one of them out");
  }
  const size_t paths = config.swap_paths.size();
  const size_t capacities = config.swap_capacity_bytes.size();
  if (paths == 0 && capacities == 0) return absl::OkStatus();
  if (paths == 0) {
    return MakeError(ErrorId::kConfig, "swap.capacity is set, swap.paths is not",
                     "name a directory or a block device in swap.paths");
  }
  if (capacities == 0) {
    return MakeError(ErrorId::kConfig, "swap.paths is set, swap.capacity is not",
                     "give the size to reserve on each path, as 256GiB");
  }
  for (const auto& [key, sizes] : {std::pair("swap.capacity", capacities),
                                   {"swap.limit_rate", config.swap_limit_rate.size()}}) {
    if (sizes <= 1 || sizes == paths) continue;
    return MakeError(ErrorId::kConfig,
                     absl::StrCat("sizes in ", key, ": ", sizes, "; paths in swap.paths: ", paths),
                     "give one size for all paths, or one per path");
  }
  return absl::OkStatus();
}

}  // namespace forebay::daemon
