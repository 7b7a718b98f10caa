// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/data_thread.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <utility>

#include "protocol/doorbell.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::gateway {
namespace {

using protocol::RemoteHeader;
using protocol::RemoteSecret;

// Time for which the thread looks for work before it sleeps, if a core is idle. A wake-up takes as long.
constexpr std::chrono::microseconds kSpin{50};

// Compares in a time that does not depend on the differences.
bool IsSame(const RemoteSecret& one, const RemoteSecret& other) {
  unsigned differences = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    differences |= std::to_integer<unsigned>(one[i] ^ other[i]);
  }
  return differences == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DataThread>> DataThread::Create(const protocol::UcxOptions& options,
                                                               std::chrono::milliseconds tick) {
  ASSIGN_OR_RETURN(auto worker, protocol::UcxWorker::Create(options));
  ASSIGN_OR_RETURN(auto calls, daemon::LoopQueue<Call>::Create(kDataCallsMax));
  std::unique_ptr<DataThread> thread(new DataThread(std::move(worker), std::move(calls), tick));
  thread->thread_ = std::thread([raw = thread.get()] { raw->Loop(); });
  return thread;
}

DataThread::DataThread(std::unique_ptr<protocol::UcxWorker> worker,
                       std::unique_ptr<daemon::LoopQueue<Call>> calls,
                       std::chrono::milliseconds tick)
    : worker_(std::move(worker)), calls_(std::move(calls)), tick_(tick) {
  worker_->SetHandler([this](protocol::UcxArrival& arrival) { OnArrival(arrival); });
}

DataThread::~DataThread() {
  Post([this] { stop_ = true; });
  thread_.join();
  sessions_.clear();
}

void DataThread::Post(Call call) { FOREBAY_CHECK(calls_->Push(std::move(call))); }

absl::Status DataThread::Run(absl::AnyInvocable<absl::Status()> call) {
  std::promise<absl::Status> ended;
  std::future<absl::Status> outcome = ended.get_future();
  Post([&ended, call = std::move(call)]() mutable { ended.set_value(call()); });
  return outcome.get();
}

void DataThread::Add(const SessionKey& key, std::unique_ptr<DataSession> session) {
  const bool is_new =
      sessions_.emplace(key.number, Entry{.secret = key.secret, .session = std::move(session)})
          .second;
  FOREBAY_CHECK(is_new);
}

void DataThread::Remove(uint64_t number) { removed_.push_back(number); }

DataSession* DataThread::Find(uint64_t number) {
  const auto found = sessions_.find(number);
  return found == sessions_.end() ? nullptr : found->second.session.get();
}

// Passes the message to its session. A message of no session is dropped.
void DataThread::OnArrival(protocol::UcxArrival& arrival) {
  RemoteHeader header;
  if (arrival.header().size() != sizeof(header)) return;
  std::memcpy(static_cast<void*>(&header), arrival.header().data(), sizeof(header));
  if (header.magic != protocol::kRemoteMagic) return;
  const auto found = sessions_.find(header.session);
  if (found == sessions_.end() || !IsSame(found->second.secret, header.secret)) return;
  found->second.session->OnMessage(header, arrival);
}

bool DataThread::Turn() {
  bool did = false;
  protocol::DrainDoorbell(calls_->fd());
  calls_->DrainAll([&did](Call& call) {
    call();
    did = true;
  });
  did = worker_->Progress() || did;
  for (auto& [number, entry] : sessions_) did = entry.session->Poll() || did;
  const Clock::time_point now = Clock::now();
  if (now >= next_tick_) {
    next_tick_ = now + tick_;
    for (auto& [number, entry] : sessions_) entry.session->OnTick(now);
  }
  for (const uint64_t number : std::exchange(removed_, {})) sessions_.erase(number);
  return did;
}

bool DataThread::PrepareSleep() {
  bool may_sleep = true;
  for (auto& [number, entry] : sessions_) may_sleep = entry.session->PrepareSleep() && may_sleep;
  return may_sleep && worker_->PrepareSleep();
}

void DataThread::Sleep() {
  if (PrepareSleep()) {
    std::vector<pollfd> fds = {{.fd = worker_->fd(), .events = POLLIN, .revents = 0},
                               {.fd = calls_->fd(), .events = POLLIN, .revents = 0}};
    for (const auto& [number, entry] : sessions_) {
      fds.push_back({.fd = entry.session->wait_fd(), .events = POLLIN, .revents = 0});
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(next_tick_ - Clock::now()).count();
    (void)::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(left, 0, 1000)));
  }
  for (auto& [number, entry] : sessions_) entry.session->EndSleep();
}

void DataThread::Loop() {
  Clock::time_point idle_since = Clock::now();
  while (!stop_) {
    if (Turn()) {
      idle_since = Clock::now();
    } else if (!idle_core_.Any() || Clock::now() - idle_since > kSpin) {
      Sleep();
    }
  }
}

}  // namespace forebay::gateway
