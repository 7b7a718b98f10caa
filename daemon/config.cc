// SPDX-License-Identifier: Apache-2.0
#include "daemon/config.h"

#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
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

constexpr std::array kKeys = {
    ConfigKey{"socket.path", "path", "where clients connect"},
    ConfigKey{"socket.mode", "octal string", "permissions of the socket, \"0660\""},
    ConfigKey{"socket.operators", "group", "who sees the jobs of all users, beside root"},
    ConfigKey{"dram.limit", "size",
              "memory for everything; by default half of the control group or machine"},
    ConfigKey{"dram.job_percent", "number", "1 to 100: what one job may take of the limit"},
    ConfigKey{"dram.uid_quota", "size",
              "what the jobs of one user, but root, may take together; all by default"},
    ConfigKey{"swap.uid_quota", "size", "the same of swap"},
    ConfigKey{"swap.paths", "list of paths", "directories or block devices; none: no swap"},
    ConfigKey{"swap.capacity", "size or list of sizes", "reserved on each path"},
    ConfigKey{"swap.staging", "size", "memory between swap and the update"},
    ConfigKey{"swap.deadline", "milliseconds",
              "how long a transfer is waited for; then it fails with E_SWAP_TIMEOUT; 60000 by "
              "default"},
    ConfigKey{"swap.limit_rate", "size or list of sizes",
              "bytes a second of each path at most, for benches of a slower disk; none by default"},
    ConfigKey{"swap.ledger", "size",
              "room for a ledger of durable jobs, twice on the first and twice on the last path, "
              "when swap is made anew; by default 1 MiB, or a 4096th of the capacity (above 4 GiB) "
              "up to 1 GiB, or a 256th of it (below 256 MiB)"},
    ConfigKey{"swap.life", "kept | unlinked",
              "unlinked: the space is free however the daemon ends"},
    ConfigKey{"swap.probe", "once | never",
              "once: kept paths are measured at their first start, in at most 10 s"},
    ConfigKey{
        "jobs.durability", "memory | epoch=N | step",
        "of jobs that do not say: what a power cut or the daemon's death can undo: all steps, "
        "at most N, none that was answered; memory by default"},
    ConfigKey{"jobs.at_stop", "free | durable",
              "of jobs of durability memory: durable gives them the swap of level epoch, and makes "
              "their newest step durable when the daemon stops; free by default"},
    ConfigKey{"io.engine", "auto | io_uring | threads", "how swap is read and written"},
    ConfigKey{"update.workers", "number",
              "threads of the update; one per physical core by default"},
    ConfigKey{"update.cpus", "list of CPUs",
              "where those threads run, \"0-3,8\"; everywhere by default"},
    ConfigKey{"update.numa_node", "number", "the same, as the CPUs of a NUMA node"},
    ConfigKey{"update.nice", "number",
              "0 to 19: the higher, the less those threads get beside other processes; 5 by "
              "default"},
    ConfigKey{"update.target", "best | name", "instruction set of the kernels"},
    ConfigKey{"update.block_elems", "number", "elements of a block, a multiple of 64"},
    ConfigKey{"reader.lease_max", "milliseconds",
              "how long a reader's lease may delay an update before its session ends; 10000 by "
              "default"},
    ConfigKey{"log.level", "debug | info | warning | error", "what is logged to stderr"},
    ConfigKey{"memlock", "required | best_effort",
              "whether memory that cannot be locked is refused"},
    ConfigKey{"pidfd", "required | best_effort",
              "whether a kernel is refused that does not tell when a client's process ends"},
};

// Place of a value in the settings, for messages.
struct Place {
  std::string text;  // "forebay.toml:12" or "--set"
  std::string key;
};

absl::Status Bad(const Place& place, std::string_view what, std::string_view hint = {}) {
  return MakeError(ErrorId::kConfig,
                   absl::StrCat(place.text, ": ", place.key, ": ", std::string(what)), hint);
}

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

// Parses one of a few words.
template <typename Value>
absl::StatusOr<Value> WordOf(const toml::node& node, const Place& place,
                             std::initializer_list<std::pair<std::string_view, Value>> words) {
  ASSIGN_OR_RETURN(const std::string text, TextOf(node, place));
  std::string known;
  for (const auto& [word, value] : words) {
    if (text == word) return value;
    absl::StrAppend(&known, known.empty() ? "" : ", ", std::string(word));
  }
  return Bad(place, absl::StrCat("\"", text, "\" is none of ", known));
}

// Calls `take` for each element of a list, or for the value itself.
absl::Status ForEach(const toml::node& node,
                     const std::function<absl::Status(const toml::node&)>& take) {
  const toml::array* array = node.as_array();
  if (array == nullptr) return take(node);
  for (const toml::node& element : *array) RETURN_IF_ERROR(take(element));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> QuotaOf(const toml::node& node, const Place& place) {
  ASSIGN_OR_RETURN(const uint64_t bytes, SizeOf(node, place));
  if (bytes == 0) return Bad(place, "is 0", "leave it out for no quota");
  return bytes;
}

absl::Status SetDram(const toml::node& node, const Place& place, Config& config) {
  if (place.key == "dram.job_percent") {
    ASSIGN_OR_RETURN(const uint64_t percent, NumberOf(node, place, {1, 100}));
    config.dram_job_percent = static_cast<uint32_t>(percent);
    return absl::OkStatus();
  }
  if (place.key == "dram.uid_quota") {
    ASSIGN_OR_RETURN(config.dram_uid_bytes, QuotaOf(node, place));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(config.dram_limit_bytes, SizeOf(node, place));
  if (config.dram_limit_bytes > 0) return absl::OkStatus();
  return Bad(place, "is 0", "leave it out for half of the memory");
}

std::vector<uint64_t>* SizesByPath(std::string_view key, Config& config) {
  if (key == "swap.capacity") return &config.swap_capacity_bytes;
  return key == "swap.limit_rate" ? &config.swap_limit_rate : nullptr;
}

absl::Status SetSwap(const toml::node& node, const Place& place, Config& config) {
  if (place.key == "swap.paths") {
    config.swap_paths.clear();
    return ForEach(node, [&](const toml::node& element) -> absl::Status {
      ASSIGN_OR_RETURN(std::string path, TextOf(element, place));
      if (path.empty()) return Bad(place, "has an empty path");
      config.swap_paths.push_back(std::move(path));
      return absl::OkStatus();
    });
  }
  if (std::vector<uint64_t>* const sizes = SizesByPath(place.key, config); sizes != nullptr) {
    sizes->clear();
    return ForEach(node, [&](const toml::node& element) -> absl::Status {
      ASSIGN_OR_RETURN(const uint64_t bytes, SizeOf(element, place));
      if (bytes == 0) return Bad(place, "is 0");
      sizes->push_back(bytes);
      return absl::OkStatus();
    });
  }
  if (place.key == "swap.uid_quota") {
    ASSIGN_OR_RETURN(config.swap_uid_bytes, QuotaOf(node, place));
    return absl::OkStatus();
  }
  if (place.key == "swap.staging") {
    ASSIGN_OR_RETURN(config.swap_staging_bytes, SizeOf(node, place));
    if (config.swap_staging_bytes > 0) return absl::OkStatus();
    return Bad(place, "is 0", "leave it out for two blocks per worker and four more");
  }
  if (place.key == "swap.ledger") {
    ASSIGN_OR_RETURN(config.swap_ledger_bytes, SizeOf(node, place));
    const uint64_t bytes = config.swap_ledger_bytes;
    if (bytes > 0 && bytes <= nvme::Volume::kLedgerBytesMax) return absl::OkStatus();
    return Bad(place, absl::StrCat(bytes, " is not in 1 to ", nvme::Volume::kLedgerBytesMax),
               "leave it out for a 4096th of the capacity");
  }
  if (place.key == "swap.deadline") {
    ASSIGN_OR_RETURN(const uint64_t deadline_ms,
                     NumberOf(node, place, {kSwapDeadlineMsMin, kSwapDeadlineMsMax}));
    config.swap_deadline = std::chrono::milliseconds(deadline_ms);
    return absl::OkStatus();
  }
  if (place.key == "swap.probe") {
    ASSIGN_OR_RETURN(config.swap_probe,
                     WordOf<bool>(node, place, {{"once", true}, {"never", false}}));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(
      config.swap_life,
      WordOf<nvme::FileLife>(
          node, place, {{"kept", nvme::FileLife::kKept}, {"unlinked", nvme::FileLife::kUnlinked}}));
  return absl::OkStatus();
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

absl::Status SetUpdate(const toml::node& node, const Place& place, Config& config) {
  if (place.key == "update.workers") {
    ASSIGN_OR_RETURN(const uint64_t workers, NumberOf(node, place, {0, kWorkersMax}));
    config.workers = static_cast<uint32_t>(workers);
  } else if (place.key == "update.cpus") {
    return SetCpus(node, place, config);
  } else if (place.key == "update.numa_node") {
    ASSIGN_OR_RETURN(const uint64_t numa_node, NumberOf(node, place, {0, kCpuMax}));
    config.update_numa_node = static_cast<int>(numa_node);
  } else if (place.key == "update.nice") {
    ASSIGN_OR_RETURN(const uint64_t nice, NumberOf(node, place, {0, kNiceMax}));
    config.update_nice = static_cast<int>(nice);
  } else if (place.key == "update.target") {
    ASSIGN_OR_RETURN(config.update_target, TextOf(node, place));
  } else {
    ASSIGN_OR_RETURN(config.block_elems,
                     NumberOf(node, place, {protocol::kStatesAlignElems, kBlockElemsMax}));
    if (config.block_elems % protocol::kStatesAlignElems != 0) {
      return Bad(place, absl::StrCat(config.block_elems, " is not a multiple of ",
                                     protocol::kStatesAlignElems));
    }
  }
  return absl::OkStatus();
}

absl::Status SetMode(const toml::node& node, const Place& place, Config& config) {
  ASSIGN_OR_RETURN(const std::string text, TextOf(node, place));
  const bool octal = !text.empty() && text.size() <= 4 &&
                     std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '7'; });
  if (!octal) return Bad(place, absl::StrCat("\"", text, "\" is not octal, as \"0660\" is"));
  config.socket_mode = static_cast<uint32_t>(std::stoul(text, nullptr, 8)) & 0777;
  return absl::OkStatus();
}

absl::Status SetKey(const toml::node& node, const Place& place, Config& config) {
  const std::string& key = place.key;
  if (key == kEnduranceKey) {
    config.sets_endurance = true;
    return absl::OkStatus();
  }
  if (std::ranges::none_of(kKeys, [&](const ConfigKey& known) { return known.name == key; })) {
    return MakeError(ErrorId::kConfig,
                     absl::StrCat(place.text, ": unknown key ", absl::Utf8SafeCEscape(key)),
                     HintForUnknown(key));
  }
  if (key.starts_with("dram.")) return SetDram(node, place, config);
  if (key.starts_with("swap.")) return SetSwap(node, place, config);
  if (key.starts_with("update.")) return SetUpdate(node, place, config);
  if (key == "socket.mode") return SetMode(node, place, config);
  if (key == "socket.operators") {
    ASSIGN_OR_RETURN(config.socket_operators, TextOf(node, place));
  } else if (key == "socket.path") {
    ASSIGN_OR_RETURN(config.socket_path, TextOf(node, place));
    if (config.socket_path.empty()) return Bad(place, "is empty");
  } else if (key == "jobs.durability") {
    ASSIGN_OR_RETURN(const std::string text, TextOf(node, place));
    const auto durability = protocol::ParseDurability(text);
    if (!durability.ok()) {
      return Bad(place, std::string(durability.status().message()),
                 protocol::HintOf(durability.status()));
    }
    config.durability = *durability;
  } else if (key == "jobs.at_stop") {
    ASSIGN_OR_RETURN(config.durable_at_stop,
                     WordOf<bool>(node, place, {{"free", false}, {"durable", true}}));
  } else if (key == "reader.lease_max") {
    ASSIGN_OR_RETURN(const uint64_t lease_ms, NumberOf(node, place, {1, kLeaseMsMax}));
    config.reader_lease_max = std::chrono::milliseconds(lease_ms);
  } else if (key == "io.engine") {
    ASSIGN_OR_RETURN(config.io_engine,
                     WordOf<nvme::EngineChoice>(node, place,
                                                {{"auto", nvme::EngineChoice::kAuto},
                                                 {"io_uring", nvme::EngineChoice::kUring},
                                                 {"threads", nvme::EngineChoice::kThreads}}));
  } else if (key == "log.level") {
    ASSIGN_OR_RETURN(config.log_level, WordOf<LogLevel>(node, place,
                                                        {{"debug", LogLevel::kDebug},
                                                         {"info", LogLevel::kInfo},
                                                         {"warning", LogLevel::kWarning},
                                                         {"error", LogLevel::kError}}));
  } else if (key == "pidfd") {
    ASSIGN_OR_RETURN(config.pidfd,
                     WordOf<PidfdPolicy>(node, place,
                                         {{"required", PidfdPolicy::kRequired},
                                          {"best_effort", PidfdPolicy::kBestEffort}}));
  } else {
    ASSIGN_OR_RETURN(config.lock, WordOf<pinned_mem::LockPolicy>(
                                      node, place,
                                      {{"required", pinned_mem::LockPolicy::kRequired},
                                       {"best_effort", pinned_mem::LockPolicy::kBestEffort}}));
  }
  return absl::OkStatus();
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

std::span<const ConfigKey> ConfigKeys() { return kKeys; }

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
