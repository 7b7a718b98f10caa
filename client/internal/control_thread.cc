// SPDX-License-Identifier: Apache-2.0
#include "client/internal/control_thread.h"

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <signal.h>
#include <sys/socket.h>

#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/internal/command_port.h"
#include "client/internal/start_thread.h"
#include "protocol/descriptor.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/rpc_stream.h"
#include "protocol/wire.h"

namespace forebay::client::internal {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// Restores the process's action for SIGPIPE, which kj sets to ignore for the whole process when its loop is created. The
// control thread blocks every signal, so it does not need that action.
class SigpipeKeeper {
 public:
  SigpipeKeeper() { ::sigaction(SIGPIPE, nullptr, &before_); }
  SigpipeKeeper(const SigpipeKeeper&) = delete;
  SigpipeKeeper& operator=(const SigpipeKeeper&) = delete;
  ~SigpipeKeeper() { ::sigaction(SIGPIPE, &before_, nullptr); }

 private:
  struct sigaction before_ {};
};

// Creates the loop of kj, one thread at a time: two threads that save and restore the action for SIGPIPE at once would leave
// SIGPIPE ignored. (A process that forks meanwhile cannot connect in its child.)
kj::AsyncIoContext MakeIo() {
  static protocol::Mutex mutex;
  const protocol::MutexLock lock(mutex);
  const SigpipeKeeper keeper;
  return kj::setupAsyncIo();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ControlThread>> ControlThread::Start(protocol::UniqueFd socket) {
  ASSIGN_OR_RETURN(protocol::UniqueFd wake_fd, protocol::MakeDoorbell());
  ASSIGN_OR_RETURN(protocol::UniqueFd gone_fd, protocol::MakeDoorbell());
  std::unique_ptr<ControlThread> control(
      new ControlThread(std::move(socket), std::move(wake_fd), std::move(gone_fd)));
  ASSIGN_OR_RETURN(control->thread_,
                   StartThread("control thread", [raw = control.get()] { raw->Loop(); }));
  return control;
}

ControlThread::ControlThread(protocol::UniqueFd socket, protocol::UniqueFd wake_fd,
                             protocol::UniqueFd gone_fd)
    : socket_(std::move(socket)), wake_fd_(std::move(wake_fd)), gone_fd_(std::move(gone_fd)) {}

ControlThread::~ControlThread() {
  if (!thread_.joinable()) return;
  Post({.kind = Request::Kind::kStop, .id = 0, .what = {}, .start = {}, .state = {}});
  thread_.join();
}

uint64_t ControlThread::calls() const {
  const protocol::MutexLock lock(mutex_);
  return calls_;
}

absl::Status ControlThread::Run(const std::string& what, const WaitLimits& limits,
                                StartCall start) {
  auto state = std::make_shared<CallState>();
  uint64_t id = 0;
  {
    const protocol::MutexLock lock(mutex_);
    if (ended_) return DaemonGoneError();
    id = ++calls_;
  }
  Post({.kind = Request::Kind::kStart,
        .id = id,
        .what = what,
        .start = std::move(start),
        .state = state});
  while (true) {
    {
      const protocol::MutexLock lock(state->mutex);
      const auto pause = std::min(limits.deadline.Remaining(), kInterruptPeriod);
      if (!state->done) state->ended.wait_for(state->mutex, pause);
      if (state->done) return state->status;
    }
    const bool interrupted = limits.Interrupted();
    if (!interrupted && !limits.deadline.Expired()) continue;
    Post({.kind = Request::Kind::kCancel, .id = id, .what = {}, .start = {}, .state = {}});
    if (interrupted)
      return MakeError(ErrorId::kInterrupted, absl::StrCat(what, " was interrupted"));
    return MakeError(ErrorId::kTimeout, absl::StrCat(what, " took longer than its limit"),
                     "see `forebay status` for what the daemon waits for");
  }
}

void ControlThread::Post(Request request) {
  const std::shared_ptr<CallState> state = request.state;
  bool ended = false;
  {
    const protocol::MutexLock lock(mutex_);
    ended = ended_;
    if (!ended) requests_.push_back(std::move(request));
  }
  if (ended && state != nullptr) Finish(*state, DaemonGoneError());
  protocol::RingDoorbell(wake_fd_.get());
}

std::deque<ControlThread::Request> ControlThread::DrainRequests() {
  protocol::DrainDoorbell(wake_fd_.get());
  const protocol::MutexLock lock(mutex_);
  return std::exchange(requests_, {});
}

void ControlThread::Finish(CallState& state, absl::Status status) {
  const protocol::MutexLock lock(state.mutex);
  state.status = std::move(status);
  state.done = true;
  state.ended.notify_all();
}

void ControlThread::Loop() {
  try {
    Serve();
  } catch (const kj::Exception&) {
    // The event loop could not be created, or failed: calls report that the connection is lost.
  }
  protocol::RingDoorbell(gone_fd_.get());
  std::deque<Request> left;
  {
    const protocol::MutexLock lock(mutex_);
    ended_ = true;
    left = std::exchange(requests_, {});
  }
  for (const Request& request : left) {
    if (request.state != nullptr) Finish(*request.state, DaemonGoneError());
  }
}

void ControlThread::Serve() {
  kj::AsyncIoContext io = MakeIo();
  const int socket = socket_.get();
  auto stream = io.lowLevelProvider->wrapUnixSocketFd(
      socket_.Release(),
      kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP | kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC);
  // A forked child may have it too.
  KJ_DEFER((void)::shutdown(socket, SHUT_RDWR));
  capnp::TwoPartyVatNetwork network(*stream, protocol::kFdsPerMessageMax,
                                    capnp::rpc::twoparty::Side::CLIENT, protocol::AnswerLimits());
  auto rpc = capnp::makeRpcClient(network);
  Peer peer{.node = protocol::BootstrapOf<schema::Node>(rpc), .session = nullptr, .admin = nullptr};
  const auto watch_end =
      network.onDisconnect()
          .then([this] { protocol::RingDoorbell(gone_fd_.get()); },
                [this](kj::Exception&&) { protocol::RingDoorbell(gone_fd_.get()); })
          .eagerlyEvaluate(nullptr);
  kj::UnixEventPort::FdObserver wake(io.unixEventPort, wake_fd_.get(),
                                     kj::UnixEventPort::FdObserver::OBSERVE_READ);
  struct Running {
    kj::Promise<void> promise;
    std::shared_ptr<CallState> state;
  };
  std::map<uint64_t, Running> running;
  std::vector<uint64_t> finished;  // erased in the next iteration: a promise cannot erase itself
  for (bool stop = false; !stop;) {
    std::deque<Request> requests = DrainRequests();
    for (const uint64_t id : std::exchange(finished, {})) running.erase(id);
    for (Request& request : requests) {
      switch (request.kind) {
        case Request::Kind::kStart: {
          const uint64_t id = request.id;
          auto promise = kj::evalNow([&] { return request.start(peer); })
                             .then(
                                 [state = request.state, id, &finished] {
                                   finished.push_back(id);
                                   Finish(*state, absl::OkStatus());
                                 },
                                 [state = request.state, what = request.what, id,
                                  &finished](kj::Exception&& exception) {
                                   finished.push_back(id);
                                   Finish(*state, protocol::StatusOf(exception, what));
                                 })
                             .eagerlyEvaluate(nullptr);
          running.emplace(id, Running{.promise = std::move(promise), .state = request.state});
          break;
        }
        case Request::Kind::kCancel:
          running.erase(request.id);
          break;
        case Request::Kind::kStop:
          stop = true;
          break;
      }
    }
    if (!stop) wake.whenBecomesReadable().wait(io.waitScope);
  }
  for (auto& [id, call] : running) Finish(*call.state, DaemonGoneError());
}

}  // namespace forebay::client::internal
