// SPDX-License-Identifier: Apache-2.0
#include "client/environment.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "protocol/error.h"

extern "C" char** environ;

namespace forebay::client {

namespace {

// Empty where it is not set.
std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

std::string SocketPath(std::string_view request) {
  if (!request.empty()) return std::string(request);
  const std::string from_environment = Variable("FOREBAY_SOCKET");
  return from_environment.empty() ? kDefaultSocket : from_environment;
}

std::string RunToken(std::string_view request) {
  if (!request.empty()) return std::string(request);
  const std::string from_environment = Variable("FOREBAY_RUN");
  return from_environment.empty() ? ProcessToken() : from_environment;
}

absl::StatusOr<Timeout> DaemonWait(std::optional<Timeout> request) {
  constexpr double kLongest = 1e9;
  if (request.has_value()) return *request;
  const std::string from_environment = Variable("FOREBAY_DAEMON_WAIT");
  if (from_environment.empty()) return kDaemonWait;
  double seconds = 0;
  if (!absl::SimpleAtod(from_environment, &seconds) || !(seconds >= 0)) {
    return protocol::MakeError(
        protocol::ErrorId::kOption,
        absl::StrCat("FOREBAY_DAEMON_WAIT is \"", from_environment, "\", no number of seconds"),
        "set it to 60, or to inf for no limit");
  }
  if (seconds >= kLongest) return kNoTimeout;
  return std::chrono::duration_cast<Timeout>(std::chrono::duration<double>(seconds));
}

bool SaysDaemonWait() { return !Variable("FOREBAY_DAEMON_WAIT").empty(); }

absl::StatusOr<Timeout> FirstDaemonWait(std::optional<Timeout> request) {
  return request.has_value() || SaysDaemonWait() ? DaemonWait(request) : Timeout(0);
}

std::string GatewayProgram() { return Variable("FOREBAY_GATEWAY"); }

std::string RemoteFolder() {
  const std::string from_environment = Variable("FOREBAY_REMOTE");
  return from_environment.empty() ? "/etc/forebay/remote" : from_environment;
}

std::vector<std::string> ProgramFolders() {
  return absl::StrSplit(Variable("PATH"), ':', absl::SkipEmpty());
}

std::vector<std::string> AgentEnvironment() {
  std::vector<std::string> all;
  for (char** variable = environ; *variable != nullptr; ++variable) all.emplace_back(*variable);
  if (Variable("UCX_LOG_LEVEL").empty()) all.emplace_back("UCX_LOG_LEVEL=fatal");
  all.emplace_back("UCX_WARN_UNUSED_ENV_VARS=n");
  return all;
}

std::string NvtxTool() { return Variable("NVTX_INJECTION64_PATH"); }

std::string ProcessToken() {
  constexpr int kFieldsAfterName = 20;  // up to and with the start time
  std::ifstream file("/proc/self/stat");
  const std::string stat((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The name of the program stands in parentheses and may hold anything.
  const size_t name_end = stat.rfind(')');
  std::istringstream fields(name_end == std::string::npos ? "" : stat.substr(name_end + 1));
  std::string field;
  for (int i = 0; i < kFieldsAfterName; ++i) fields >> field;
  return absl::StrCat("pid-", ::getpid(), "-", field);
}

}  // namespace forebay::client
