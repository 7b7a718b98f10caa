// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/descriptor_store.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "protocol/error.h"

namespace forebay::tools {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

// Limits of systemd: NOTIFY_BUFFER_MAX, NOTIFY_FD_MAX (the limit of SCM_RIGHTS, unix(7)), FDNAME_MAX.
constexpr size_t kTextBytesMax = 4096;
constexpr size_t kFdsPerMessageMax = 253;
constexpr size_t kNameBytesMax = 255;
constexpr std::string_view kUnnamed = "stored";

struct Message {
  std::string text;
  std::vector<UniqueFd> fds;
};

std::vector<UniqueFd> FdsOf(msghdr& header) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    std::vector<int> numbers((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(numbers.data(), CMSG_DATA(part), numbers.size() * sizeof(int));
    for (const int number : numbers) fds.emplace_back(number);
  }
  return fds;
}

// Returns the next message in the socket's queue. A truncated message is returned without text and descriptors.
std::optional<Message> Receive(int socket) {
  std::array<char, kTextBytesMax> text;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kFdsPerMessageMax * sizeof(int))> control;
  iovec data{.iov_base = text.data(), .iov_len = text.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t size = -1;
  do {
    size = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (size < 0 && errno == EINTR);
  if (size < 0) return std::nullopt;
  Message message{.text = std::string(text.data(), static_cast<size_t>(size)),
                  .fds = FdsOf(header)};
  if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) return Message{};
  return message;
}

bool IsName(std::string_view name) {
  return name.size() <= kNameBytesMax && std::ranges::all_of(name, [](char c) {
           return absl::ascii_isprint(static_cast<unsigned char>(c)) && c != ':';
         });
}

}  // namespace

DescriptorStore::DescriptorStore(std::string socket_path, uint32_t capacity, UniqueFd socket)
    : socket_path_(std::move(socket_path)), capacity_(capacity), socket_(std::move(socket)) {}

absl::StatusOr<DescriptorStore> DescriptorStore::Create(const std::string& socket_path,
                                                        uint32_t capacity) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_path.size() >= sizeof(address.sun_path)) {
    return MakeError(ErrorId::kOption, absl::StrCat("socket path is too long: ", socket_path),
                     "set XDG_RUNTIME_DIR or TMPDIR to a shorter path");
  }
  std::memcpy(address.sun_path, socket_path.c_str(), socket_path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid() ||
      ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return MakeError(ErrorId::kOption, ErrnoText(absl::StrCat("bind ", socket_path), errno));
  }
  return DescriptorStore(socket_path, capacity, std::move(socket));
}

// FDSTORE is set even if the capacity is 0: it overrides a value that this process has from its own service manager.
std::vector<std::string> DescriptorStore::environment() const {
  return {absl::StrCat("NOTIFY_SOCKET=", socket_path_), absl::StrCat("FDSTORE=", capacity_)};
}

void DescriptorStore::Drain() {
  while (std::optional<Message> message = Receive(socket_.get())) {
    Handle(message->text, std::move(message->fds));
  }
}

// Handles one message. BARRIER=1 needs no code: the service waits until the descriptor that it has sent is closed. It is closed
// at the end of this call, when all earlier messages are handled.
void DescriptorStore::Handle(const std::string& text, std::vector<UniqueFd> fds) {
  bool stores = false;
  bool removes = false;
  std::string name(kUnnamed);
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (const std::string& line : lines) {
    if (line == "READY=1") is_ready_ = true;
    if (line == "FDSTORE=1") stores = true;
    if (line == "FDSTOREREMOVE=1") removes = true;
    if (line.starts_with("FDNAME=")) name = line.substr(line.find('=') + 1);
  }
  if (!IsName(name)) return;
  if (removes) {
    std::erase_if(kept_, [&name](const Kept& one) { return one.name == name; });
  } else if (stores) {
    for (UniqueFd& fd : fds) {
      if (kept_.size() >= capacity_) return;
      kept_.push_back({.name = name, .fd = std::move(fd)});
    }
  }
}

void DescriptorStore::NextProcess() {
  Drain();
  is_ready_ = false;
}

std::vector<PassedDescriptor> DescriptorStore::kept() const {
  std::vector<PassedDescriptor> descriptors;
  for (const Kept& one : kept_) descriptors.push_back({.name = one.name, .fd = one.fd.get()});
  std::ranges::reverse(descriptors);
  return descriptors;
}

}  // namespace forebay::tools
