// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/message_relay.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <future>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/layout_codec.h"
#include "protocol/os/memfd.h"
#include "protocol/os/send_descriptor.h"
#include "protocol/wire.h"

namespace forebay::daemon {
namespace {

using protocol::UniqueFd;

constexpr size_t kWordBytes = 8;
constexpr uint32_t kSegmentsMax = 512;
constexpr size_t kFdsMax = 253;  // SCM_MAX_FD: most descriptors of a message

enum class Sender { kClient, kDaemon };

// One direction of a connection: a buffer of bytes to forward, and the position of the end of the current message.
//
// Source  https://capnproto.org/encoding.html, "Serialization over a stream".
class Direction {
 public:
  Direction(int from, int to, Sender sender) : from_(from), to_(to), sender_(sender) {}

  // Moves what can be moved without waiting.
  void Pump() {
    while (true) {
      if (may_read() && !Read()) return End();
      if (!must_write()) return;  // nothing to read now, or the sender has ended
      if (!Write()) return End();
      if (must_write()) return;
    }
  }

  bool must_write() const { return writable_ && written_ < size_; }
  bool may_read() const { return !ended_ && !must_write(); }
  bool done() const { return ended_ && !must_write(); }

 private:
  enum class Part : uint8_t { kFirstWord, kTable, kBody };

  void End() {
    ended_ = true;
    writable_ = false;
  }

  // Fills the buffer up to the end of the message. Returns false if the sender broke the framing.
  bool Read() {
    while (size_ < buffer_.size()) {
      if (wanted_ == 0 && part_ == Part::kBody) {
        if (size_ > 0) break;  // the message ends here
        part_ = Part::kFirstWord;
        wanted_ = kWordBytes;
      }
      const size_t room = std::min<uint64_t>(wanted_, buffer_.size() - size_);
      const ssize_t got = Receive(std::span(buffer_).subspan(size_, room));
      if (got < 0) break;
      if (got == 0) {
        ended_ = true;
        return true;
      }
      size_ += static_cast<size_t>(got);
      wanted_ -= static_cast<uint64_t>(got);
      if (wanted_ == 0 && !BeginNextPart()) return false;
    }
    // The header stays in the buffer until it is complete, because HeaderNumber() reads it from the buffer.
    writable_ = part_ == Part::kBody && size_ > 0;
    return true;
  }

  bool BeginNextPart() {
    if (part_ == Part::kBody) return true;
    const uint32_t segments = HeaderNumber(0);  // number of segments - 1
    if (segments >= kSegmentsMax) return false;
    if (part_ == Part::kFirstWord) {
      part_ = Part::kTable;
      wanted_ = (segments + 1) / 2 * kWordBytes;
      if (wanted_ > 0) return true;
    }
    part_ = Part::kBody;
    for (uint32_t i = 0; i <= segments; ++i) wanted_ += HeaderNumber(i + 1) * kWordBytes;
    return wanted_ <=
           (sender_ == Sender::kClient ? protocol::kRequestBytesMax : protocol::kAnswerBytesMax);
  }

  uint32_t HeaderNumber(size_t index) const {
    uint32_t number = 0;
    std::memcpy(&number, buffer_.data() + index * sizeof(number), sizeof(number));
    return number;
  }

  // Receives bytes, and stores or closes the descriptors that come with them. Returns the number of bytes; 0 at the end, -1 if
  // no bytes wait.
  ssize_t Receive(std::span<std::byte> into) {
    iovec piece{.iov_base = into.data(), .iov_len = into.size()};
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(kFdsMax * sizeof(int))> control;
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const bool first = part_ == Part::kFirstWord && size_ == 0;
    ssize_t got = 0;
    do {
      got = ::recvmsg(from_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got < 0) return errno == EAGAIN ? -1 : 0;
    for (cmsghdr* one = CMSG_FIRSTHDR(&message); one != nullptr; one = CMSG_NXTHDR(&message, one)) {
      if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(one) + i * sizeof(int), sizeof(int));
        KeepOrClose(UniqueFd(fd), first);
      }
    }
    return got;
  }

  void KeepOrClose(UniqueFd fd, bool first) {
    const bool known =
        sender_ == Sender::kDaemon || protocol::IsSealedMemfd(fd.get(), protocol::kLayoutBytesMax);
    if (first && known && !fd_.valid()) {
      fd_ = std::move(fd);
      return;
    }
    const linger none{};
    // Fails without effect for other files.
    (void)::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
  }

  // Writes bytes of the buffer. Returns false if the receiver has closed the connection.
  bool Write() {
    iovec piece{.iov_base = buffer_.data() + written_, .iov_len = size_ - written_};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    const ssize_t wrote =
        protocol::SendWithDescriptor(to_, message, fd_.get(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (wrote < 0) return errno == EAGAIN;
    fd_.Reset();
    written_ += static_cast<size_t>(wrote);
    if (written_ == size_) {
      size_ = 0;
      written_ = 0;
      writable_ = false;
    }
    return true;
  }

  const int from_;
  const int to_;
  const Sender sender_;
  Part part_ = Part::kBody;
  uint64_t wanted_ = 0;  // bytes of this part that have not arrived
  bool ended_ = false;   // the sender has closed the connection
  bool writable_ = false;
  UniqueFd fd_;  // sent with the first byte of the buffer
  size_t size_ = 0;
  size_t written_ = 0;
  std::array<std::byte, 16 << 10> buffer_;
};

void Relay(int client, int daemon) {
  Direction requests(client, daemon, Sender::kClient);
  Direction answers(daemon, client, Sender::kDaemon);
  while (true) {
    requests.Pump();
    answers.Pump();
    if (answers.done()) return;
    if (requests.done()) ::shutdown(daemon, SHUT_WR);
    const auto events = [](const Direction& reads, const Direction& writes) {
      return static_cast<short>((reads.may_read() ? POLLIN : 0) |
                                (writes.must_write() ? POLLOUT : 0));
    };
    std::array<pollfd, 2> fds = {
        pollfd{.fd = client, .events = events(requests, answers), .revents = 0},
        pollfd{.fd = daemon, .events = events(answers, requests), .revents = 0}};
    if (fds[0].events == 0) fds[0].fd = -1;  // ignores a hang-up of the client
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;
    const bool closed = (fds[1].revents & POLLHUP) != 0;
    if (closed && answers.must_write() && (fds[0].revents & POLLOUT) == 0) return;
  }
}

}  // namespace

bool ConnectionCounts::AddBelow(Limit limit) {
  const protocol::MutexLock lock(mutex_);
  uint32_t& count = counts_[limit.uid];
  if (count >= limit.max) return false;
  ++count;
  return true;
}

void ConnectionCounts::Remove(uint32_t uid) {
  const protocol::MutexLock lock(mutex_);
  const auto found = counts_.find(uid);
  if (--found->second == 0) counts_.erase(found);
  removed_.notify_all();
}

bool ConnectionCounts::WaitUntilNone(std::chrono::milliseconds limit) {
  const protocol::MutexLock lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!counts_.empty()) {
    if (removed_.wait_until(mutex_, deadline) == std::cv_status::timeout) return counts_.empty();
  }
  return true;
}

absl::StatusOr<UniqueFd> StartRelay(UniqueFd& client, uint32_t uid,
                                    const std::shared_ptr<ConnectionCounts>& counts) {
  std::array<int, 2> ends{};
  int error = 0;
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    error = errno;
  } else {
    UniqueFd ours(ends[0]);
    const auto socket = std::make_shared<UniqueFd>(std::move(client));
    try {
      std::thread([socket, end = std::make_shared<UniqueFd>(ends[1]), uid, counts]() mutable {
        ::pthread_setname_np(::pthread_self(), "forebay-relay");
        Relay(socket->get(), end->get());
        end->Reset();
        socket->Reset();  // may block: closes descriptors that were not received
        counts->Remove(uid);
      }).detach();
      return ours;
    } catch (const std::system_error& no_thread) {
      error = no_thread.code().value();
      client = std::move(*socket);
    }
  }
  counts->Remove(uid);
  return protocol::MakeError(protocol::ErrorId::kLimit,
                             protocol::ErrnoText("start a relay for a connection", error),
                             "raise LimitNOFILE= or TasksMax= of the service");
}

absl::Status CloseUnread(UniqueFd socket) {
  const auto table_is_own = std::make_shared<std::promise<void>>();
  std::promise<void> closed_here;
  try {
    std::thread([number = static_cast<unsigned>(socket.get()), table_is_own,
                 closed = closed_here.get_future()] {
      // The thread now has its own table of descriptors, which holds only the socket.
      ::syscall(SYS_close_range, number + 1, ~0U, CLOSE_RANGE_UNSHARE);
      if (number > 0) ::syscall(SYS_close_range, 0U, number - 1, CLOSE_RANGE_UNSHARE);
      table_is_own->set_value();
      closed.wait();
    }).detach();
  } catch (const std::system_error& no_thread) {
    return protocol::MakeError(
        protocol::ErrorId::kLimit,
        protocol::ErrnoText("start a thread that closes a connection", no_thread.code().value()),
        "raise TasksMax= of the service");
  }
  table_is_own->get_future().wait();
  socket.Reset();
  closed_here.set_value();
  return absl::OkStatus();
}

}  // namespace forebay::daemon
