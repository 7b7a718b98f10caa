// SPDX-License-Identifier: Apache-2.0
// Notices between two calls of a session that copies on the device have ended.
#pragma once

#include <condition_variable>
#include <functional>
#include <thread>
#include <utility>

#include "protocol/os/mutex.h"

namespace forebay::client::internal {

// A thread that begins with the first copy which outlives the call that began it: where copies end at
// once, as on the host, there is none.
//
// Threads  Any.
class CopyWatch {
 public:
  // `look` is called under `session_mutex`; false: nothing is under way any more.
  CopyWatch(protocol::Mutex& session_mutex, std::function<bool()> look)
      : session_mutex_(session_mutex), look_(std::move(look)) {}
  CopyWatch(const CopyWatch&) = delete;
  CopyWatch& operator=(const CopyWatch&) = delete;
  ~CopyWatch() { Stop(); }

  void Begin();  // to look, until nothing is under way
  void Stop();   // for good; without `session_mutex`

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
