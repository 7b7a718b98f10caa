// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/hostfile.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr char kSlots[] = "slots=";
constexpr char kLineHint[] = "a line is: worker-1 slots=4";

// Accepts only digits. SimpleAtoi alone would also accept signs and spaces.
bool ParseNumber(const std::string& text, int* number) {
  return !text.empty() && std::ranges::all_of(text, absl::ascii_isdigit) &&
         absl::SimpleAtoi(text, number);
}

std::vector<std::string> Words(const std::string& line) {
  return absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
}

// Parses the words of a line. `where` names the file and the line in errors, "hosts:3".
absl::StatusOr<HostSlots> ParseLine(const std::vector<std::string>& words,
                                    const std::string& where) {
  const std::string line = absl::StrJoin(words, " ");
  if (words.size() == 1 && !words[0].starts_with(kSlots)) {
    return MakeError(ErrorId::kConfig, absl::StrCat(where, ": host ", line, " has no slots"),
                     kLineHint);
  }
  HostSlots host;
  const std::string& slots = words.back();
  if (words.size() != 2 || !slots.starts_with(kSlots) ||
      !ParseNumber(slots.substr(std::string_view(kSlots).size()), &host.slots_listed)) {
    return MakeError(ErrorId::kConfig,
                     absl::StrCat(where, ": \"", line, "\" is no \"HOST slots=N\""), kLineHint);
  }
  host.host = words[0];
  if (host.host.front() == '-') {  // ssh would take it for an option
    return MakeError(ErrorId::kConfig,
                     absl::StrCat(where, ": a host's name begins with \"-\": ", host.host),
                     kLineHint);
  }
  if (host.slots_listed < 1 || host.slots_listed > kSlotsMax) {
    return MakeError(ErrorId::kConfig,
                     absl::StrCat(where, ": host ", host.host, " has ", host.slots_listed,
                                  " slots, not 1 to ", kSlotsMax),
                     "slots are ranks on the host; put \"#\" in front of a host to leave it out");
  }
  host.slots.resize(static_cast<size_t>(host.slots_listed));
  std::iota(host.slots.begin(), host.slots.end(), 0);
  return host;
}

using Selected = std::map<std::string, std::set<int>>;

// Parses "worker-1:0,2" into `selected`. `option` names the option in errors, "--include".
absl::Status Select(const std::string& part, const std::vector<HostSlots>& hosts,
                    const std::string& option, Selected& selected) {
  const size_t colon = part.find(':');
  const std::string name(absl::StripAsciiWhitespace(part.substr(0, colon)));
  const auto host = std::ranges::find(hosts, name, &HostSlots::host);
  if (host == hosts.end()) {
    return MakeError(
        ErrorId::kOption, absl::StrCat(option, ": host \"", name, "\" is not in the hostfile"),
        absl::StrCat(option, " worker-0@worker-1:0,2 names hosts of the hostfile and their slots"));
  }
  std::set<int>& slots = selected[name];
  if (colon == std::string::npos) {
    slots.insert(host->slots.begin(), host->slots.end());
    return absl::OkStatus();
  }
  const std::vector<std::string> words = absl::StrSplit(part.substr(colon + 1), ',');
  for (const std::string& word : words) {
    const std::string number(absl::StripAsciiWhitespace(word));
    int slot = 0;
    if (!ParseNumber(number, &slot) || slot >= host->slots_listed) {
      return MakeError(ErrorId::kOption,
                       absl::StrCat(option, ": host ", name, " has no slot \"", number, "\""),
                       absl::StrCat("its slots are 0 to ", host->slots_listed - 1));
    }
    slots.insert(slot);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<HostSlots>> ParseHostfile(const std::string& text,
                                                     const std::string& path) {
  std::vector<HostSlots> hosts;
  std::map<std::string, int> lines;
  int number = 0;
  const std::vector<std::string> all_lines = absl::StrSplit(text, '\n');
  for (const std::string& line : all_lines) {
    ++number;
    const std::vector<std::string> words = Words(line.substr(0, line.find('#')));
    if (words.empty()) continue;
    const std::string where = absl::StrCat(path, ":", number);
    ASSIGN_OR_RETURN(HostSlots host, ParseLine(words, where));
    const auto [first, is_new] = lines.emplace(host.host, number);
    if (!is_new) {
      return MakeError(
          ErrorId::kConfig,
          absl::StrCat(where, ": host ", host.host, " stands in line ", first->second, " already"),
          "one line a host, with all its slots");
    }
    if (hosts.size() == kHostsMax) {
      return MakeError(ErrorId::kLimit, absl::StrCat(where, ": more than ", kHostsMax, " hosts"));
    }
    hosts.push_back(std::move(host));
  }
  if (hosts.empty()) {
    return MakeError(ErrorId::kConfig, absl::StrCat(path, ": there is no host in it"), kLineHint);
  }
  return hosts;
}

absl::StatusOr<std::vector<HostSlots>> SelectHosts(std::vector<HostSlots> hosts,
                                                   const HostSelection& selection) {
  const bool is_include = !selection.include.empty();
  if (!is_include && selection.exclude.empty()) return hosts;
  const std::string option = is_include ? "--include" : "--exclude";
  const std::string& text = is_include ? selection.include : selection.exclude;
  Selected selected;
  const std::vector<std::string> parts = absl::StrSplit(text, '@');
  for (const std::string& part : parts) RETURN_IF_ERROR(Select(part, hosts, option, selected));
  for (HostSlots& host : hosts) {
    const std::set<int>& slots = selected[host.host];
    std::erase_if(host.slots, [&](int slot) { return slots.contains(slot) != is_include; });
  }
  std::erase_if(hosts, [](const HostSlots& host) { return host.slots.empty(); });
  if (hosts.empty()) {
    return MakeError(ErrorId::kOption, absl::StrCat(option, " ", text, " leaves no slot"),
                     "exclude fewer hosts or slots");
  }
  return hosts;
}

absl::StatusOr<std::vector<HostSlots>> ReadHostfile(const std::string& path,
                                                    const HostSelection& selection) {
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) {
    return MakeError(ErrorId::kConfig, protocol::ErrnoText(absl::StrCat("hostfile ", path), errno),
                     "--hostfile names a file with a line \"HOST slots=N\" for each host");
  }
  ASSIGN_OR_RETURN(std::vector<HostSlots> hosts, ParseHostfile(text, path));
  return SelectHosts(std::move(hosts), selection);
}

}  // namespace forebay::tools
