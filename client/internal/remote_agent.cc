// SPDX-License-Identifier: Apache-2.0
#include "client/internal/remote_agent.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/environment.h"
#include "protocol/error.h"
#include "protocol/os/pidfd.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

constexpr std::string_view kScheme = "ucx://";
constexpr char kProgram[] = "forebay-gateway";
constexpr int kFirstFreeFd = 10;  // above those of the agent
constexpr int kSocketFd = 3;
constexpr int kLifetimeFd = 4;
constexpr int kWeightsFd = 5;
constexpr int kGradArenaFd = 6;
constexpr int kLoaderFailed = 127;
constexpr int kEndLimitMs = 3000;
constexpr size_t kLogCharsMax = 2000;

// Possible paths of the program: in the folder of this library, in the bin folder of an installation in /usr, of one in
// /usr/local or of a wheel, as seen from that folder; then in the folders of PATH.
std::vector<std::string> Candidates() {
  std::vector<std::string> paths;
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&Candidates), &info) != 0 &&
      info.dli_fname != nullptr) {
    const std::string library = info.dli_fname;
    const size_t slash = library.rfind('/');
    const std::string folder = slash == library.npos ? "." : library.substr(0, slash);
    for (const char* from : {"/", "/../bin/", "/../../bin/", "/../../../../bin/"}) {
      paths.push_back(absl::StrCat(folder, from, kProgram));
    }
  }
  for (const std::string& folder : ProgramFolders()) {
    paths.push_back(absl::StrCat(folder, "/", kProgram));
  }
  return paths;
}

absl::StatusOr<std::string> FindProgram() {
  const std::string named = GatewayProgram();
  const std::vector<std::string> paths = named.empty() ? Candidates() : std::vector{named};
  for (const std::string& path : paths) {
    if (::access(path.c_str(), X_OK) == 0) return path;
  }
  return MakeError(
      ErrorId::kUnsupported,
      absl::StrCat("there is no program ", kProgram,
                   ", which reaches a daemon on "
                   "another node; looked for ",
                   absl::StrJoin(paths, ", ")),
      "install the package forebay-gateway on this node (docs/guide/multi-node.md), or "
      "name it in FOREBAY_GATEWAY");
}

// Errors  E_OPTION  it is not HOST:PORT, where an IPv6 address is in brackets.
absl::Status CheckAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  const std::string host = address.substr(0, colon);
  const std::string port = colon == address.npos ? "" : address.substr(colon + 1);
  uint32_t number = 0;
  const bool has_port = std::ranges::all_of(port, absl::ascii_isdigit) &&
                        absl::SimpleAtoi(port, &number) && number > 0 && number <= UINT16_MAX;
  const bool is_in_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  const bool has_host = is_in_brackets || (!host.empty() && host.find_first_of(":[]") == host.npos);
  if (has_host && has_port) return absl::OkStatus();
  return MakeError(
      ErrorId::kOption,
      absl::StrCat("the address ucx://", address, has_host ? " has no port" : " is no HOST:PORT"),
      "give it as ucx://HOST:PORT, with the port of `bind` in the gateway's settings, an IPv6 "
      "address as ucx://[ADDRESS]:PORT");
}

UniqueFd Above(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, kFirstFreeFd)); }

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Arguments of posix_spawn, destroyed with the object.
struct Spawn {
  Spawn() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
  }
  Spawn(const Spawn&) = delete;
  Spawn& operator=(const Spawn&) = delete;
  ~Spawn() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
  posix_spawn_file_actions_t actions{};
  posix_spawnattr_t attributes{};
};

}  // namespace

std::optional<std::string> RemoteAddress(std::string_view socket) {
  if (!socket.starts_with(kScheme)) return std::nullopt;
  return std::string(socket.substr(kScheme.size()));
}

absl::StatusOr<std::unique_ptr<RemoteAgent>> RemoteAgent::Start(const std::string& address,
                                                                const RemoteArenas* arenas) {
  RETURN_IF_ERROR(CheckAddress(address));
  ASSIGN_OR_RETURN(const std::string program, FindProgram());
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return MakeError(ErrorId::kLimit, ErrnoText("socketpair", errno),
                     "raise the limit of open files (ulimit -n)");
  }
  UniqueFd own(ends[0]);
  const UniqueFd theirs(ends[1]);
  const UniqueFd theirs_above = Above(theirs.get());
  const UniqueFd self = protocol::OpenPidfd(::getpid());
  const UniqueFd self_above = self.valid() ? Above(self.get()) : UniqueFd();
  UniqueFd log(::memfd_create("forebay-agent-log", MFD_CLOEXEC));
  const UniqueFd log_above = log.valid() ? Above(log.get()) : UniqueFd();
  const UniqueFd weights_above = arenas == nullptr ? UniqueFd() : Above(arenas->weights.get());
  const UniqueFd grad_above = arenas == nullptr ? UniqueFd() : Above(arenas->grad_arena.get());
  const bool has_arenas = weights_above.valid() && grad_above.valid();
  if (!theirs_above.valid() || !log_above.valid() || (arenas != nullptr && !has_arenas)) {
    return MakeError(ErrorId::kLimit, ErrnoText("descriptors for the agent", errno),
                     "raise the limit of open files (ulimit -n)");
  }
  std::vector<std::string> words = {
      program,    "connect",      "--address",   address,
      "--folder", RemoteFolder(), "--socket-fd", absl::StrCat(kSocketFd)};
  Spawn spawn;
  ::posix_spawn_file_actions_addopen(&spawn.actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&spawn.actions, log_above.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&spawn.actions, log_above.get(), STDERR_FILENO);
  ::posix_spawn_file_actions_adddup2(&spawn.actions, theirs_above.get(), kSocketFd);
  if (self_above.valid()) {
    ::posix_spawn_file_actions_adddup2(&spawn.actions, self_above.get(), kLifetimeFd);
    words.insert(words.end(), {"--lifetime-fd", absl::StrCat(kLifetimeFd)});
  }
  if (has_arenas) {
    ::posix_spawn_file_actions_adddup2(&spawn.actions, weights_above.get(), kWeightsFd);
    ::posix_spawn_file_actions_adddup2(&spawn.actions, grad_above.get(), kGradArenaFd);
    words.insert(words.end(), {"--weights-fd", absl::StrCat(kWeightsFd), "--grad-arena-fd",
                               absl::StrCat(kGradArenaFd)});
  }
  sigset_t none;
  sigset_t all;
  sigemptyset(&none);
  sigfillset(&all);
  ::posix_spawnattr_setsigmask(&spawn.attributes, &none);
  ::posix_spawnattr_setsigdefault(&spawn.attributes, &all);
  ::posix_spawnattr_setpgroup(&spawn.attributes, 0);  // Ctrl-C is for the trainer
  ::posix_spawnattr_setflags(
      &spawn.attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  std::vector<std::string> environment = AgentEnvironment();
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, program.c_str(), &spawn.actions, &spawn.attributes,
                                  Pointers(words).data(), Pointers(environment).data());
  if (error != 0) {
    return MakeError(ErrorId::kUnsupported, ErrnoText(absl::StrCat("start ", program), error),
                     "name the program forebay-gateway in FOREBAY_GATEWAY");
  }
  return std::unique_ptr<RemoteAgent>(new RemoteAgent(pid, std::move(own), std::move(log)));
}

bool RemoteAgent::HasEnded(int wait_ms) {
  if (exit_status_) return true;
  const UniqueFd process = protocol::OpenPidfd(pid_);
  pollfd entry{.fd = process.get(), .events = POLLIN, .revents = 0};
  (void)::poll(&entry, 1, wait_ms);
  int status = 0;
  const pid_t waited = ::waitpid(pid_, &status, WNOHANG);
  if (waited == pid_) exit_status_ = status;
  if (waited < 0) exit_status_ = 0;  // somebody else has waited for it
  return exit_status_.has_value();
}

RemoteAgent::~RemoteAgent() {
  socket_.Reset();
  if (HasEnded(kEndLimitMs)) return;
  (void)::kill(pid_, SIGKILL);
  (void)HasEnded(kEndLimitMs);
}

absl::Status RemoteAgent::WhyItEnded(const absl::Status& otherwise) {
  constexpr int kDeathMs = 1000;  // an agent's socket closes shortly before waitpid sees its death
  if (!HasEnded(kDeathMs)) return otherwise;
  std::string text(kLogCharsMax, '\0');
  const ssize_t got = ::pread(log_.get(), text.data(), text.size(), 0);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  if (const absl::Status own = protocol::ParseError(text); !own.ok()) return own;
  text = std::string(absl::StripAsciiWhitespace(text));
  if (WIFEXITED(*exit_status_) && WEXITSTATUS(*exit_status_) == kLoaderFailed) {
    return MakeError(ErrorId::kUnsupported,
                     absl::StrCat("forebay-gateway cannot be started: ", text),
                     "install UCX 1.13 or newer on this node: apt install libucx0 (Debian 12)");
  }
  const std::string how = WIFSIGNALED(*exit_status_)
                              ? absl::StrCat("signal ", WTERMSIG(*exit_status_))
                              : absl::StrCat("status ", WEXITSTATUS(*exit_status_));
  return MakeError(ErrorId::kRemote,
                   absl::StrCat("the process between this one and the gateway ended with ", how,
                                text.empty() ? "" : ": ", text));
}

}  // namespace forebay::client::internal
