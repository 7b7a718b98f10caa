// SPDX-License-Identifier: Apache-2.0
// The thread of one UCX worker, and the sessions whose bytes it moves.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/exec/loop_queue.h"
#include "protocol/os/idle_core.h"
#include "protocol/remote_wire.h"
#include "protocol/ucx/ucx_worker.h"

namespace forebay::gateway {

using Clock = std::chrono::steady_clock;

// Interface of a session on the data plane. All functions are called on the data thread.
class DataSession {
 public:
  virtual ~DataSession() = default;

  // Takes a message that has this session's number and secret.
  virtual void OnMessage(const protocol::RemoteHeader& header, protocol::UcxArrival& arrival) = 0;
  // Does all work that is possible without waiting. Returns true if any work was done.
  virtual bool Poll() = 0;
  // PrepareSleep(), EndSleep() and wait_fd() behave like those of ClientChannel and ServerChannel. If wait_fd() is -1, the
  // session waits for messages alone.
  virtual bool PrepareSleep() = 0;
  virtual void EndSleep() = 0;
  virtual int wait_fd() const = 0;
  virtual void OnTick(Clock::time_point now) = 0;
};

struct SessionKey {
  uint64_t number = 0;
  protocol::RemoteSecret secret = {};
};

inline constexpr size_t kDataCallsMax = 4096;

// Threads  Create(), the destructor, Post() and Run() are called on other threads. Everything else is called on the data
//          thread.
class DataThread {
 public:
  using Call = absl::AnyInvocable<void()>;

  // Errors  those of UcxWorker::Create; E_LIMIT.
  static absl::StatusOr<std::unique_ptr<DataThread>> Create(const protocol::UcxOptions& options,
                                                            std::chrono::milliseconds tick);

  DataThread(const DataThread&) = delete;
  DataThread& operator=(const DataThread&) = delete;
  ~DataThread();  // drops all sessions

  std::span<const std::byte> address() const { return worker_->address(); }

  void Post(Call call);
  // Waits until the thread has run `call`, and returns its result.
  absl::Status Run(absl::AnyInvocable<absl::Status()> call);

  protocol::UcxWorker& worker() { return *worker_; }
  void Add(const SessionKey& key, std::unique_ptr<DataSession> session);
  // Removes the session at the end of the thread's turn. Ignores an unknown number.
  void Remove(uint64_t number);
  DataSession* Find(uint64_t number);  // nullptr if no session has this number

 private:
  struct Entry {
    protocol::RemoteSecret secret;
    std::unique_ptr<DataSession> session;
  };

  DataThread(std::unique_ptr<protocol::UcxWorker> worker,
             std::unique_ptr<daemon::LoopQueue<Call>> calls, std::chrono::milliseconds tick);

  void OnArrival(protocol::UcxArrival& arrival);
  bool Turn();
  bool PrepareSleep();
  void Sleep();
  void Loop();

  std::unique_ptr<protocol::UcxWorker> worker_;
  std::unique_ptr<daemon::LoopQueue<Call>> calls_;
  const std::chrono::milliseconds tick_;
  std::map<uint64_t, Entry> sessions_;
  std::vector<uint64_t> removed_;
  Clock::time_point next_tick_;
  protocol::IdleCore idle_core_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace forebay::gateway
