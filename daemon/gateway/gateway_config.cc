// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/gateway_config.h"

#include <sys/stat.h>
#include <toml++/toml.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/wire.h"

namespace forebay::gateway {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr size_t kTokenCharsMin = 16;
constexpr int64_t kKeepaliveMsMin = 500;
constexpr int64_t kKeepaliveMsMax = 600'000;
constexpr char kHint[] = "the gateway.toml that comes with forebay-gateway has every key";

absl::Status Bad(const std::string& place, const std::string& key, const std::string& what) {
  return MakeError(ErrorId::kConfig, absl::StrCat(place, ": ", key, ": ", what), kHint);
}

class Reader {
 public:
  Reader(std::string file, GatewayConfig& config) : file_(std::move(file)), config_(config) {}

  absl::Status Read(const toml::table& table, const std::string& prefix) {
    for (const auto& [name, node] : table) {
      const std::string key = absl::StrCat(prefix, std::string(name.str()));
      const std::string place = absl::StrCat(file_, ":", name.source().begin.line);
      if (node.is_table() && (key == "daemon" || key == "tls" || key == "ucx")) {
        RETURN_IF_ERROR(Read(*node.as_table(), absl::StrCat(key, ".")));
      } else if (node.is_table() && key == "principal") {
        RETURN_IF_ERROR(ReadPrincipals(*node.as_table()));
      } else {
        RETURN_IF_ERROR(Set(key, node, place));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Set(const std::string& key, const toml::node& node, const std::string& place) {
    const std::pair<const char*, std::string*> texts[] = {
        {"bind", &config_.bind},
        {"tokens", &config_.tokens},
        {"daemon.socket", &config_.daemon_socket},
        {"tls.certificate", &config_.certificate},
        {"tls.key", &config_.key},
        {"tls.client_ca", &config_.client_ca},
        {"ucx.tls", &config_.ucx_tls},
        {"ucx.net_devices", &config_.ucx_net_devices}};
    for (const auto& [name, value] : texts) {
      if (key != name) continue;
      const auto text = node.value_exact<std::string>();
      if (!text || text->empty()) return Bad(place, key, "is not a text");
      *value = *text;
      return absl::OkStatus();
    }
    if (key == "keepalive") {
      ASSIGN_OR_RETURN(const int64_t ms,
                       NumberOf(key, node, place, {kKeepaliveMsMin, kKeepaliveMsMax}));
      config_.keepalive = std::chrono::milliseconds(ms);
      return absl::OkStatus();
    }
    if (key == "session_wait") {
      ASSIGN_OR_RETURN(const int64_t ms,
                       NumberOf(key, node, place, {0, protocol::kSessionWaitMsMax}));
      config_.session_wait = std::chrono::milliseconds(ms);
      return absl::OkStatus();
    }
    if (key == "ucx.rma") return SetReads(key, node, place);
    return MakeError(ErrorId::kConfig, absl::StrCat(place, ": unknown key ", key), kHint);
  }

  absl::Status SetReads(const std::string& key, const toml::node& node, const std::string& place) {
    const std::string word = node.value_or(std::string());
    if (word == "auto") {
      config_.reads = ReadPolicy::kAuto;
    } else if (word == "on") {
      config_.reads = ReadPolicy::kOn;
    } else if (word == "off") {
      config_.reads = ReadPolicy::kOff;
    } else {
      return Bad(place, key, "is none of auto, on, off");
    }
    return absl::OkStatus();
  }

  struct Range {
    int64_t from;
    int64_t to;
  };
  static absl::StatusOr<int64_t> NumberOf(const std::string& key, const toml::node& node,
                                          const std::string& place, Range range) {
    const auto number = node.value_exact<int64_t>();
    if (!number || *number < range.from || *number > range.to) {
      return Bad(place, key, absl::StrCat("is not a number from ", range.from, " to ", range.to));
    }
    return *number;
  }

  absl::Status ReadPrincipals(const toml::table& table) {
    for (const auto& [name, node] : table) {
      const std::string place = absl::StrCat(file_, ":", name.source().begin.line);
      const std::string key = absl::StrCat("principal.", std::string(name.str()));
      if (!node.is_table()) return Bad(place, key, "is not a section");
      Principal principal{.name = std::string(name.str())};
      for (const auto& [field, value] : *node.as_table()) {
        const std::string where = absl::StrCat(file_, ":", field.source().begin.line);
        const std::string full = absl::StrCat(key, ".", std::string(field.str()));
        if (field.str() == "uid") {  // uid 0 is not allowed: root's jobs have no quota
          ASSIGN_OR_RETURN(const int64_t uid, NumberOf(full, value, where, {1, UINT32_MAX - 1}));
          principal.uid = static_cast<uint32_t>(uid);
        } else if (field.str() == "sessions") {
          ASSIGN_OR_RETURN(const int64_t sessions,
                           NumberOf(full, value, where, {1, kSessionsOfPrincipalMax}));
          principal.sessions_max = static_cast<uint32_t>(sessions);
        } else {
          return MakeError(ErrorId::kConfig, absl::StrCat(where, ": unknown key ", full), kHint);
        }
      }
      if (principal.uid == 0) return Bad(place, key, "has no uid");
      config_.principals.emplace(principal.name, principal);
    }
    return absl::OkStatus();
  }

  const std::string file_;
  GatewayConfig& config_;
};

absl::Status Missing(const std::string& path, const std::string& what) {
  return MakeError(ErrorId::kConfig, absl::StrCat(path, ": ", what), kHint);
}

absl::Status Check(const std::string& path, const GatewayConfig& config) {
  if (config.bind.empty()) {
    return Missing(path, "bind is not set: the address and port to listen on");
  }
  if (config.certificate.empty() || config.key.empty()) {
    return Missing(path, "tls.certificate and tls.key are not both set");
  }
  if (config.client_ca.empty() == config.tokens.empty()) {
    return Missing(path, absl::StrCat("bind is ", config.bind, ", and ",
                                      config.tokens.empty() ? "neither" : "both of",
                                      " tls.client_ca and tokens say", " who may connect"));
  }
  if (config.principals.empty()) return Missing(path, "there is no [principal.NAME]");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GatewayConfig> LoadGatewayConfig(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, "the settings"));
  GatewayConfig config;
  try {
    RETURN_IF_ERROR(Reader(path, config).Read(toml::parse(text), ""));
  } catch (const toml::parse_error& error) {
    return MakeError(ErrorId::kConfig, absl::StrCat(path, ":", error.source().begin.line, ": ",
                                                    std::string(error.description())));
  }
  RETURN_IF_ERROR(Check(path, config));
  return config;
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path, std::string_view what) {
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.good() || file.eof()) {
    if (!text.empty()) return text;
  }
  return MakeError(ErrorId::kConfig,
                   absl::StrCat(path, ": ", std::string(what), " cannot be read: ",
                                text.empty() && errno == 0 ? "empty" : std::strerror(errno)),
                   "name a file that this process may read");
}

absl::StatusOr<std::string> ReadSecretFile(const std::string& path, std::string_view what) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && (info.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return MakeError(
        ErrorId::kConfig,
        absl::StrCat(path, ": others than its owner have access to ", std::string(what)),
        absl::StrCat("chmod 600 ", path));
  }
  return ReadTextFile(path, what);
}

absl::StatusOr<std::map<std::string, std::string>> ParseTokens(const std::string& text,
                                                               const std::string& path) {
  std::map<std::string, std::string> tokens;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipWhitespace());
    if (words.empty() || words[0].starts_with('#')) continue;
    const std::string place = absl::StrCat(path, ":", number);
    if (words.size() != 2) {
      return MakeError(ErrorId::kConfig, absl::StrCat(place, ": is not of the form NAME TOKEN"));
    }
    if (words[1].size() < kTokenCharsMin) {
      return MakeError(ErrorId::kConfig,
                       absl::StrCat(place, ": the token of ", words[0], " has ", words[1].size(),
                                    " characters, at least ", kTokenCharsMin, " are needed"),
                       "make one with: openssl rand -hex 32");
    }
    if (!tokens.emplace(words[1], words[0]).second) {
      return MakeError(ErrorId::kConfig, absl::StrCat(place, ": the token of another name"));
    }
  }
  return tokens;
}

std::optional<std::string> NameOfToken(const std::map<std::string, std::string>& tokens,
                                       std::string_view token) {
  std::optional<std::string> name;
  for (const auto& [known, owner] : tokens) {
    unsigned differences = known.size() == token.size() ? 0 : 1;
    for (size_t i = 0; i < known.size(); ++i) {
      const char given = i < token.size() ? token[i] : '\0';
      differences |= static_cast<unsigned>(known[i] ^ given);
    }
    if (differences == 0) name = owner;
  }
  return name;
}

}  // namespace forebay::gateway
