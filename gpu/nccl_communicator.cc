// SPDX-License-Identifier: Apache-2.0
#include "gpu/nccl_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory_resource>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/internal/nccl_library.h"
#include "protocol/error.h"
#include "protocol/os/clock.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"

namespace forebay::gpu {
namespace {

using nccl::Library;
using nccl::ncclComm_t;
using nccl::ncclResult_t;
using protocol::Deadline;
using protocol::DType;
using protocol::ErrorId;
using protocol::MakeError;

constexpr std::chrono::milliseconds kLook{20};  // period of the look at calls in flight
// pause between looks at a call that NCCL continues in the background
constexpr std::chrono::microseconds kPause{100};

nccl::ncclDataType_t TypeOf(DType dtype) {
  if (dtype == DType::kFloat16) return nccl::kFloat16;
  return dtype == DType::kBFloat16 ? nccl::kBFloat16 : nccl::kFloat32;
}

nccl::ncclRedOp_t OperationOf(Reduction reduction) {
  return reduction == Reduction::kMean ? nccl::kAverage : nccl::kSum;
}

nccl::cudaStream_t HandleOf(const Stream& stream) {
  return reinterpret_cast<nccl::cudaStream_t>(stream.handle());
}

}  // namespace

// Every call of NCCL holds the mutex, with the device's context current.
class NcclCommunicator::State {
 public:
  State(Options options, std::shared_ptr<CudaDevice> device, std::shared_ptr<const Library> library)
      : options_(std::move(options)), device_(std::move(device)), library_(std::move(library)) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    {
      const protocol::MutexLock lock(mutex_);
      stopped_ = true;
      changed_.notify_all();
    }
    if (watch_.joinable()) watch_.join();
    const protocol::MutexLock lock(mutex_);
    // Waits for collectives that still run. Those that take too long are aborted.
    while (!under_way_.empty()) {
      LookLocked().IgnoreError();
      changed_.wait_for(mutex_, kPause);
    }
    if (comm_ == nullptr) return;
    WithDevice([this, comm = comm_] { return library_->ncclCommDestroy(comm); }, "ncclCommDestroy")
        .IgnoreError();
  }

  absl::Status Start(const nccl::ncclUniqueId& id) {
    const protocol::MutexLock lock(mutex_);
    nccl::ncclConfig_t config{.size = sizeof(nccl::ncclConfig_t),
                              .magic = nccl::kConfigMagic,
                              .version = nccl::kConfigVersion,
                              .blocking = 0};
    ncclComm_t made = nullptr;
    const auto start = [&] {
      return library_->ncclCommInitRankConfig(&made, static_cast<int>(options_.size), id,
                                              static_cast<int>(options_.rank), &config);
    };
    const absl::Status begun = WithDevice(start, "ncclCommInitRankConfig");
    comm_ = made;
    const absl::Status started = begun.ok() ? WaitUntilReadyLocked("starting NCCL") : begun;
    if (!started.ok()) return FailLocked(started);
    watch_ = std::thread([this] { Watch(); });
    return absl::OkStatus();
  }

  // `call` begins collectives on the stream.
  template <typename Call>
  absl::Status Begin(Stream& stream, std::string_view name, const Call& call) {
    const protocol::MutexLock lock(mutex_);
    RETURN_IF_ERROR(LookLocked());
    const absl::Status begun =
        WithDevice([&, comm = comm_] { return call(*library_, comm); }, name);
    if (!begun.ok()) return FailLocked(begun);
    if (is_grouping_) {
      grouped_ = &stream;
      return absl::OkStatus();
    }
    return FollowLocked(stream);
  }

  absl::Status BeginGroup() {
    const protocol::MutexLock lock(mutex_);
    RETURN_IF_ERROR(LookLocked());
    const absl::Status begun =
        WithDevice([&] { return library_->ncclGroupStart(); }, "ncclGroupStart");
    if (!begun.ok()) return FailLocked(begun);
    is_grouping_ = true;
    grouped_ = nullptr;
    return absl::OkStatus();
  }
  absl::Status EndGroup() {
    const protocol::MutexLock lock(mutex_);
    is_grouping_ = false;
    const absl::Status ended = WithDevice([&] { return library_->ncclGroupEnd(); }, "ncclGroupEnd");
    RETURN_IF_ERROR(failed_);
    if (!ended.ok()) return FailLocked(ended);
    return grouped_ == nullptr ? absl::OkStatus() : FollowLocked(*grouped_);
  }

  absl::Status Check() {
    const protocol::MutexLock lock(mutex_);
    return LookLocked();
  }
  void Abort() {
    const protocol::MutexLock lock(mutex_);
    if (failed_.ok()) {
      FailLocked(MakeError(ErrorId::kRankLost, "this rank has aborted its collectives"))
          .IgnoreError();
    }
  }

  // Sets the check. No call of the old check runs after the return.
  void WatchWith(std::function<absl::Status()> check) {
    const protocol::MutexLock asking(ask_mutex_);
    check_ = std::move(check);
  }

  const Options& options() const { return options_; }
  const CudaDevice& device() const { return *device_; }

 private:
  struct UnderWay {
    std::shared_ptr<const Event> ended;
    Deadline deadline;
  };

  template <typename Call>
  absl::Status WithDevice(const Call& call, std::string_view name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return device_->WithContext([&, comm = comm_]() -> absl::Status {
      const ncclResult_t result = call();
      if (result == nccl::kInProgress) return absl::OkStatus();
      return library_->Check(result, name, comm);
    });
  }

  absl::Status TooLate(std::string_view what) const {
    return MakeError(
        ErrorId::kRankLost,
        absl::StrCat(std::string(what), " has not ended within ", options_.time_limit.count(),
                     " ms: a rank of ", options_.size, " is gone or hangs"),
        "see what the other ranks printed; start the job again");
  }

  // Returns false while NCCL continues a call in the background. No other call may begin then.
  absl::StatusOr<bool> IsReadyLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ncclResult_t state = nccl::kSuccess;
    const auto ask = [&, comm = comm_] { return library_->ncclCommGetAsyncError(comm, &state); };
    RETURN_IF_ERROR(WithDevice(ask, "ncclCommGetAsyncError"));
    if (state == nccl::kInProgress) return false;
    RETURN_IF_ERROR(library_->Check(state, "NCCL in the background", comm_));
    return true;
  }
  absl::Status WaitUntilReadyLocked(std::string_view what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Deadline deadline = Deadline::After(options_.time_limit);
    while (true) {
      ASSIGN_OR_RETURN(const bool is_ready, IsReadyLocked());
      if (is_ready) return absl::OkStatus();
      if (deadline.Expired()) return TooLate(what);
      changed_.wait_for(mutex_, kPause);
      RETURN_IF_ERROR(failed_);  // aborted meanwhile
    }
  }

  // Adds the collective that was begun on the stream to the collectives in flight.
  absl::Status FollowLocked(Stream& stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const absl::Status ready = WaitUntilReadyLocked("a collective's begin");
    if (!ready.ok()) return FailLocked(ready);
    auto ended = stream.Record();
    if (!ended.ok()) return FailLocked(ended.status());
    under_way_.push_back(
        {.ended = *std::move(ended), .deadline = Deadline::After(options_.time_limit)});
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::Status FailLocked(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!failed_.ok()) return failed_;
    failed_ = std::move(status);
    if (comm_ != nullptr) {
      WithDevice([this, comm = comm_] { return library_->ncclCommAbort(comm); }, "ncclCommAbort")
          .IgnoreError();
      comm_ = nullptr;
    }
    under_way_.clear();
    changed_.notify_all();
    return failed_;
  }

  absl::Status LookLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    RETURN_IF_ERROR(failed_);
    if (is_grouping_) return absl::OkStatus();  // NCCL answers nothing within a group
    const absl::Status background = IsReadyLocked().status();
    if (!background.ok()) return FailLocked(background);
    while (!under_way_.empty()) {
      const absl::StatusOr<bool> has_ended = under_way_.front().ended->Done();
      if (!has_ended.ok()) return FailLocked(has_ended.status());
      if (!*has_ended && under_way_.front().deadline.Expired()) {
        return FailLocked(TooLate("a collective"));
      }
      if (!*has_ended) break;
      under_way_.pop_front();
    }
    return absl::OkStatus();
  }

  // False: the end.
  bool WaitAndLook() {
    const protocol::MutexLock lock(mutex_);
    if (stopped_ || !failed_.ok()) return false;
    if (under_way_.empty()) {
      changed_.wait(mutex_);
    } else {
      changed_.wait_for(mutex_, kLook);
      LookLocked().IgnoreError();
    }
    return true;
  }
  bool IsWaiting() {
    const protocol::MutexLock lock(mutex_);
    return !under_way_.empty();
  }
  absl::Status AskCheck() {
    const protocol::MutexLock asking(ask_mutex_);
    return check_ ? check_() : absl::OkStatus();
  }
  void Watch() {
    Deadline next_check = Deadline::After(kWatchPeriod);
    while (WaitAndLook()) {
      if (!IsWaiting()) next_check = Deadline::After(kWatchPeriod);
      if (!next_check.Expired()) continue;
      const absl::Status checked = AskCheck();
      next_check = Deadline::After(kWatchPeriod);
      if (checked.ok()) continue;
      const protocol::MutexLock lock(mutex_);
      FailLocked(checked).IgnoreError();
    }
  }

  const Options options_;
  protocol::Mutex ask_mutex_;  // before mutex_
  std::function<absl::Status()> check_ ABSL_GUARDED_BY(ask_mutex_);
  const std::shared_ptr<CudaDevice> device_;
  const std::shared_ptr<const Library> library_;
  protocol::Mutex mutex_;
  std::condition_variable_any changed_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::pmr::unsynchronized_pool_resource memory_ ABSL_GUARDED_BY(mutex_);
  std::pmr::deque<UnderWay> under_way_ ABSL_GUARDED_BY(mutex_){&memory_};
  bool is_grouping_ ABSL_GUARDED_BY(mutex_) = false;
  Stream* grouped_ ABSL_GUARDED_BY(mutex_) = nullptr;  // the last stream of the group's
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watch_;
};

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(
    const Options& options, std::shared_ptr<CudaDevice> device, const Exchange& exchange) {
  if (options.rank >= options.size || device == nullptr) {
    return MakeError(ErrorId::kRank,
                     absl::StrCat("rank ", options.rank, " of ", options.size, " ranks",
                                  device == nullptr ? ", without a device" : ""));
  }
  const auto library = Library::Load(options.soname);
  nccl::ncclUniqueId id{};
  absl::Status status = library.status();
  if (status.ok() && options.rank == 0) {
    status = device->WithContext([&] {
      return (*library)->Check((*library)->ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr);
    });
  }
  // All ranks hear of an error on one rank, so that none waits for a rank that has failed.
  const std::string own = status.ok() ? std::string(id.internal.data(), id.internal.size()) : "";
  ASSIGN_OR_RETURN(const std::vector<std::string> ids, exchange(own));
  RETURN_IF_ERROR(status);
  for (uint32_t rank = 0; rank < ids.size(); ++rank) {
    if (ids[rank].size() == id.internal.size()) continue;
    return MakeError(ErrorId::kUnsupported, absl::StrCat("rank ", rank, " has no NCCL"),
                     "see what that rank printed");
  }
  if (ids.size() != options.size) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("an exchange of ", ids.size(), " ranks for ", options.size));
  }
  std::memcpy(id.internal.data(), ids[0].data(), id.internal.size());
  auto state = std::make_unique<State>(options, std::move(device), *library);
  RETURN_IF_ERROR(state->Start(id));
  return std::unique_ptr<NcclCommunicator>(new NcclCommunicator(std::move(state)));
}

NcclCommunicator::NcclCommunicator(std::unique_ptr<State> state) : state_(std::move(state)) {}
NcclCommunicator::~NcclCommunicator() = default;

uint32_t NcclCommunicator::rank() const { return state_->options().rank; }
uint32_t NcclCommunicator::size() const { return state_->options().size; }

absl::Status NcclCommunicator::AllGather(Stream& stream, std::span<std::byte> to,
                                         std::span<const std::byte> from) {
  RETURN_IF_ERROR(CheckAllGather(size(), to.size(), from.size()));
  if (from.empty()) return Check();
  return state_->Begin(stream, "ncclAllGather", [&](const Library& library, ncclComm_t comm) {
    return library.ncclAllGather(from.data(), to.data(), from.size(), nccl::kInt8, comm,
                                 HandleOf(stream));
  });
}

absl::Status NcclCommunicator::ReduceScatter(Stream& stream, std::span<std::byte> to,
                                             std::span<const std::byte> from, DType dtype,
                                             Reduction reduction) {
  RETURN_IF_ERROR(CheckReduceScatter(size(), to.size(), from.size(), dtype));
  if (to.empty()) return Check();
  return state_->Begin(stream, "ncclReduceScatter", [&](const Library& library, ncclComm_t comm) {
    return library.ncclReduceScatter(from.data(), to.data(), to.size() / SizeBytes(dtype),
                                     TypeOf(dtype), OperationOf(reduction), comm, HandleOf(stream));
  });
}

absl::Status NcclCommunicator::AllReduce(Stream& stream, std::span<std::byte> bytes, DType dtype,
                                         Reduction reduction) {
  RETURN_IF_ERROR(CheckReduction(bytes.size(), dtype));
  if (bytes.empty()) return Check();
  return state_->Begin(stream, "ncclAllReduce", [&](const Library& library, ncclComm_t comm) {
    return library.ncclAllReduce(bytes.data(), bytes.data(), bytes.size() / SizeBytes(dtype),
                                 TypeOf(dtype), OperationOf(reduction), comm, HandleOf(stream));
  });
}

absl::Status NcclCommunicator::Group(const std::function<absl::Status()>& calls) {
  RETURN_IF_ERROR(state_->BeginGroup());
  absl::Status status = calls();
  status.Update(state_->EndGroup());
  return status;
}

absl::Status NcclCommunicator::Check() { return state_->Check(); }
void NcclCommunicator::Abort() { state_->Abort(); }
std::string_view NcclCommunicator::device() const { return state_->device().name(); }
void NcclCommunicator::WatchWith(std::function<absl::Status()> check) {
  state_->WatchWith(std::move(check));
}

}  // namespace forebay::gpu
