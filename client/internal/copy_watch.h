// SPDX-License-Identifier: Apache-2.0
// Notices between two calls of a session that copies on the device have ended.
#pragma once

#include <condition_variable>
#include <functional>
#include <thread>
#include <utility>

#include "protocol/os/mutex.h"

namespace forebay::client::internal {

// Looks at copies in flight on a thread. The thread starts with the first copy that outlives the call that began it: if all
// copies end at once, as on the host, no thread starts.
//
// Threads  Any.
class CopyWatch {
 public:
  // `look` is called under `session_mutex`. It returns false if no copy is in flight.
  CopyWatch(protocol::Mutex& session_mutex, std::function<bool()> look)
      : session_mutex_(session_mutex), look_(std::move(look)) {}
  CopyWatch(const CopyWatch&) = delete;
  CopyWatch& operator=(const CopyWatch&) = delete;
  ~CopyWatch() { Stop(); }

  void Begin();  // starts to look, until no copy is in flight
  void Stop();   // ends the thread for good; call without `session_mutex`

 private:
  void Loop();

  protocol::Mutex& session_mutex_;
  const std::function<bool()> look_;
  protocol::Mutex mutex_;
  std::condition_variable_any changed_;
  bool wanted_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace forebay::client::internal
