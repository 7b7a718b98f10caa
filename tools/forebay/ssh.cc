// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/ssh.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "protocol/os/status_macros.h"

namespace forebay::tools {
namespace {

using protocol::UniqueFd;

constexpr size_t kReadMax = 1 << 20;
constexpr int kStdinBytesMax = 1 << 20;  // capacity that an unprivileged pipe may have

void SetNonBlocking(const UniqueFd& fd) { ::fcntl(fd.get(), F_SETFL, O_NONBLOCK); }

std::vector<std::string> CommandWords(const SshOptions& options) {
  std::vector<std::string> words = absl::StrSplit(options.command, ' ', absl::SkipEmpty());
  if (options.port.has_value()) words.insert(words.end(), {"-p", absl::StrCat(*options.port)});
  return words;
}

// Command line of ssh. The user's words come first, because ssh uses the first value that it gets for an option.
std::vector<std::string> SshWords(const SshOptions& options, const std::string& host,
                                  const std::string& remote_command) {
  std::vector<std::string> words = CommandWords(options);
  for (const std::string& setting : std::vector<std::string>{
           "BatchMode=yes", absl::StrCat("ConnectTimeout=", options.limit.count()),
           "ServerAliveInterval=15", "ServerAliveCountMax=4",  // detects a node without power
           "ControlMaster=no"}) {  // a shared connection would hold the pipes open
    words.insert(words.end(), {"-o", setting});
  }
  words.insert(words.end(), {"-T", host, remote_command});
  return words;
}

}  // namespace

std::string ShellCommand(const std::vector<std::string>& words) {
  return absl::StrJoin(words, " ", [](std::string* out, const std::string& word) {
    absl::StrAppend(out, "'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
  });
}

std::string AddressOf(const SshOptions& options, const std::string& host) {
  constexpr std::string_view kHostname = "hostname ";
  std::vector<std::string> words = CommandWords(options);
  words.insert(words.end(), {"-G", host});
  absl::StatusOr<Pipe> output = MakePipe();
  if (output.ok()) {
    ProcessOptions process;
    process.arguments = words;
    process.null_stdin = true;
    process.stdout_fd = output->write_end.get();
    process.stderr_fd = output->write_end.get();
    absl::StatusOr<Process> ssh = Process::Start(process);
    output->write_end.Reset();
    SetNonBlocking(output->read_end);
    std::string text;
    if (ssh.ok() && ssh->WaitFor(options.limit) == 0) ReadAvailable(output->read_end.get(), text);
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    for (const std::string& line : lines) {
      if (line.starts_with(kHostname)) return line.substr(kHostname.size());
    }
  }
  return host.substr(host.find('@') + 1);
}

absl::StatusOr<RemoteForebay> RemoteForebay::Start(const SshOptions& options,
                                                   const std::string& host,
                                                   const std::vector<std::string>& arguments,
                                                   RemoteStdin stdin_use) {
  std::vector<std::string> words = {options.program};
  if (words[0].empty()) {
    std::error_code ignored;
    words[0] = std::filesystem::read_symlink("/proc/self/exe", ignored);
  }
  words.insert(words.end(), arguments.begin(), arguments.end());
  ASSIGN_OR_RETURN(Pipe in, MakePipe());
  ASSIGN_OR_RETURN(Pipe out, MakePipe());
  ASSIGN_OR_RETURN(Pipe err, MakePipe());
  ProcessOptions process;
  process.arguments = SshWords(options, host, absl::StrCat("exec ", ShellCommand(words)));
  process.own_group = true;
  process.null_stdin = stdin_use == RemoteStdin::kNull;
  if (!process.null_stdin) process.stdin_fd = in.read_end.get();
  process.stdout_fd = out.write_end.get();
  process.stderr_fd = err.write_end.get();
  process.signal_mask.emplace();
  sigemptyset(&*process.signal_mask);
  ASSIGN_OR_RETURN(Process ssh, Process::Start(process));
  ::fcntl(in.write_end.get(), F_SETPIPE_SZ, kStdinBytesMax);
  for (const UniqueFd* end : {&in.write_end, &out.read_end, &err.read_end}) SetNonBlocking(*end);
  return RemoteForebay{std::move(ssh), std::move(in.write_end), std::move(out.read_end),
                       std::move(err.read_end)};
}

bool ReadAvailable(int fd, std::string& text) {
  const size_t end = text.size() + kReadMax;
  while (text.size() < end) {
    const ssize_t got = ReadSome(fd, text);
    if (got <= 0) return got < 0 && errno == EAGAIN;
  }
  return true;
}

void LineSplitter::Add(std::string_view bytes, const Sink& sink) {
  rest_ += bytes;
  size_t begin = 0;
  for (size_t end; (end = rest_.find_first_of("\r\n", begin)) != std::string::npos;) {
    const bool is_bar = rest_[end] == '\r';  // progress bars end lines with a carriage return
    if (!is_bar || end > begin) sink(std::string_view(rest_).substr(begin, end - begin));
    begin = end + 1;
    if (is_bar && begin < rest_.size() && rest_[begin] == '\n') ++begin;
  }
  rest_.erase(0, begin);
  if (rest_.size() > kLineMax) Finish(sink);
}

void LineSplitter::Finish(const Sink& sink) {
  if (!rest_.empty()) sink(rest_);
  rest_.clear();
}

}  // namespace forebay::tools
