// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/status_all.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

using json = nlohmann::ordered_json;
using protocol::FormatBytes;
using Clock = std::chrono::steady_clock;

constexpr size_t kOutputMax = 64 << 20;  // bytes from one host
constexpr std::string_view kErrorStart = "error[";

struct Question {
  std::string host;
  RemoteForebay remote;
  std::string out = {};
  std::string err = {};
  std::optional<int> ended = {};
  bool is_late = false;
};

// Reads the output of a host. Returns false once its command has ended.
bool Read(Question& one) {
  if (one.ended.has_value()) return false;
  const std::optional<int> ended = one.remote.ssh.WaitFor(std::chrono::milliseconds(0));
  for (const auto& [fd, text] :
       {std::pair(&one.remote.stdout_fd, &one.out), std::pair(&one.remote.stderr_fd, &one.err)}) {
    while (fd->valid()) {
      const size_t before = text->size();
      if (!ReadAvailable(fd->get(), *text)) fd->Reset();
      if (text->size() == before || text->size() > kOutputMax) break;
    }
  }
  one.ended = ended;
  return !ended.has_value();
}

void AwaitAll(std::vector<Question>& questions, std::chrono::milliseconds limit) {
  const Clock::time_point end = Clock::now() + limit;
  while (true) {
    std::vector<pollfd> watched;
    for (Question& one : questions) {
      if (!Read(one)) continue;
      for (const int fd :
           {one.remote.stdout_fd.get(), one.remote.stderr_fd.get(), one.remote.ssh.pidfd()}) {
        if (fd >= 0) watched.push_back({fd, POLLIN, 0});
      }
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    if (watched.empty() || left.count() <= 0) break;
    ::poll(watched.data(), watched.size(), static_cast<int>(left.count()));
  }
  for (Question& one : questions) {
    one.is_late = !one.ended.has_value();
    if (one.is_late) one.remote.ssh.Signal(SIGKILL);
  }
}

// Returns the line that explains the failure: the first error line of Forebay, or the last line if there is none.
std::string Reason(const Question& one, std::chrono::seconds limit) {
  if (one.is_late) return absl::StrCat("no answer within ", 2 * limit.count(), " s");
  std::string last;
  const std::vector<std::string> lines = absl::StrSplit(one.err, absl::ByAnyChar("\r\n"));
  for (const std::string& line : lines) {
    const std::string text(absl::StripAsciiWhitespace(line));
    if (text.starts_with(kErrorStart)) return text;
    if (!text.empty()) last = text;
  }
  return last.empty() ? absl::StrCat("ssh: ", DescribeWaitStatus(*one.ended)) : last;
}

// Parses the JSON at the end of the output. A login shell may print lines before the JSON.
json ParseOutput(const std::string& text) {
  const size_t before = text.starts_with('{') ? 0 : text.find("\n{");
  if (before == std::string::npos) return nullptr;
  json parsed = json::parse(text.substr(before), nullptr, /*allow_exceptions=*/false);
  return parsed.is_object() ? parsed : json();
}

// Returns 0 if the field is missing or is no number. The daemon of another version may answer so.
uint64_t Number(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<uint64_t>() : 0;
}

std::string Text(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

json Member(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() ? *found : json();
}

std::string OfBoth(uint64_t used, uint64_t whole) {
  return whole == 0 ? "-" : absl::StrCat(FormatBytes(used), " of ", FormatBytes(whole));
}

std::string SwapOf(const json& paths) {
  uint64_t used = 0;
  uint64_t capacity = 0;
  for (const json& path : paths) {
    used += Number(path, "used_bytes");
    capacity += Number(path, "capacity_bytes");
  }
  return OfBoth(used, capacity);
}

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string HealthOf(const json& job) {
  for (const char* key : {"failed", "swap_wait"}) {
    if (const std::string text = Text(job, key); !text.empty()) return FirstLine(text);
  }
  return Number(job, "making_bytes") > 0 ? "creating" : "ok";
}

std::string HealthOfSwap(const json& paths) {
  std::vector<std::string> names;
  for (const json& path : paths) {
    if (Number(path, "errors") > 0 || Number(path, "late_now") > 0) {
      names.push_back(Text(path, "path"));
    }
  }
  return names.empty() ? "ok" : absl::StrCat("swap has errors: ", absl::StrJoin(names, ", "));
}

}  // namespace

absl::StatusOr<std::vector<HostStatus>> AskAllHosts(const StatusAllOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<HostSlots> hosts,
                   ReadHostfile(options.hostfile, options.selection));
  std::vector<std::string> arguments = {"status", "--json"};
  if (!options.socket.empty()) arguments.insert(arguments.end(), {"--socket", options.socket});
  std::vector<Question> questions;
  for (const HostSlots& host : hosts) {
    ASSIGN_OR_RETURN(RemoteForebay remote,
                     RemoteForebay::Start(options.ssh, host.host, arguments, RemoteStdin::kNull));
    questions.push_back({.host = host.host, .remote = std::move(remote)});
  }
  AwaitAll(questions, 2 * options.ssh.limit);
  std::vector<HostStatus> answers;
  for (const Question& one : questions) {
    HostStatus answer{.host = one.host, .status = nullptr, .error = {}};
    if (!one.is_late && *one.ended == 0) answer.status = ParseOutput(one.out);
    if (answer.status.is_null()) answer.error = Reason(one, options.ssh.limit);
    answers.push_back(std::move(answer));
  }
  return answers;
}

std::string StatusAllText(const std::vector<HostStatus>& hosts) {
  Table nodes({"HOST", "VERSION", "UP", "DRAM", "SWAP", "JOBS", "HEALTH"});
  Table jobs({"HOST", "JOB", "RANKS", "STEP", "DURABLE STEP", "WEIGHTS+STATES", "HEALTH"});
  std::string without;
  for (const HostStatus& one : hosts) {
    if (one.status.is_null()) {
      absl::StrAppend(&without, one.host, " does not answer: ", one.error, "\n");
      continue;
    }
    const json memory = Member(one.status, "memory");
    const json swap = Member(one.status, "swap");
    const json of_host = Member(one.status, "jobs");
    nodes.Add({one.host, Text(Member(one.status, "info"), "version"),
               absl::StrCat(Number(one.status, "uptime_seconds"), " s"),
               OfBoth(Number(memory, "used_bytes"), Number(memory, "limit_bytes")), SwapOf(swap),
               absl::StrCat(of_host.size()), HealthOfSwap(swap)});
    for (const json& job : of_host) {
      const bool is_durable = Text(job, "durability") != "memory";
      jobs.Add({one.host, Text(job, "name"),
                absl::StrCat(Number(job, "sessions"), "/", Number(job, "world_size")),
                absl::StrCat(Number(job, "committed_step")),
                is_durable ? absl::StrCat(Number(job, "durable_step")) : "-",
                FormatBytes(Number(job, "state_bytes")), HealthOf(job)});
    }
  }
  std::vector<std::string> parts;
  if (!nodes.empty()) parts.push_back(nodes.Text());
  if (!jobs.empty()) parts.push_back(jobs.Text());
  if (!without.empty()) parts.push_back(without);
  return absl::StrJoin(parts, "\n");
}

json StatusAllJson(const std::vector<HostStatus>& hosts) {
  json nodes = json::array();
  for (const HostStatus& one : hosts) {
    nodes.push_back({{"host", one.host}, {"status", one.status}, {"error", one.error}});
  }
  return {{"nodes", nodes}};
}

}  // namespace forebay::tools
