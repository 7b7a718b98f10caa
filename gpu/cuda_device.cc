// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda_device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/internal/cuda_driver.h"
#include "gpu/internal/free_events.h"
#include "protocol/error.h"
#include "protocol/os/clock.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::gpu {
namespace {

using cuda::CUcontext;
using cuda::CUdeviceptr;
using cuda::CUevent;
using cuda::CUresult;
using cuda::CUstream;
using cuda::Driver;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::MonotonicNs;

CUdeviceptr Address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

// ----------------------------------------------------------------------------------------- Context

class CudaDevice::Context {
 public:
  // Makes the device's context the calling thread's until it dies.
  class Current {
   public:
    explicit Current(const Context& context) : context_(context) {
      const CUresult pushed = context.driver->cuCtxPushCurrent_v2(context.context_);
      status_ = context.Check(pushed, "cuCtxPushCurrent");
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
      CUcontext popped = nullptr;
      if (status_.ok()) context_.driver->cuCtxPopCurrent_v2(&popped);
    }
    const absl::Status& status() const { return status_; }

   private:
    const Context& context_;
    absl::Status status_;
  };

  static absl::StatusOr<std::shared_ptr<Context>> Create(const Options& options) {
    auto context = std::make_shared<Context>();
    ASSIGN_OR_RETURN(context->driver, Driver::Load(options.soname));
    const Driver& driver = *context->driver;
    if (options.ordinal < 0 || options.ordinal >= driver.device_count()) {
      return MakeError(ErrorId::kUnsupported,
                       absl::StrCat("there is no device cuda:", options.ordinal,
                                    "; the driver shows ", driver.device_count()),
                       "look at CUDA_VISIBLE_DEVICES and `nvidia-smi -L`");
    }
    context->name = absl::StrCat("cuda:", options.ordinal);
    context->ordinal = options.ordinal;
    context->piece_bytes = options.piece_bytes;
    RETURN_IF_ERROR(
        context->Check(driver.cuDeviceGet(&context->device_, options.ordinal), "cuDeviceGet"));
    RETURN_IF_ERROR(context->Describe());
    CUcontext retained = nullptr;
    RETURN_IF_ERROR(context->Check(driver.cuDevicePrimaryCtxRetain(&retained, context->device_),
                                   "cuDevicePrimaryCtxRetain"));
    context->context_ = retained;
    return context;
  }
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  absl::Status Check(CUresult result, std::string_view call) const {
    if (result == cuda::kSuccess) return absl::OkStatus();
    return driver->Check(result, absl::StrCat(name, ": ", std::string(call)));
  }

  absl::StatusOr<bool> HasEnded(CUevent event) const {
    const Current current(*this);
    RETURN_IF_ERROR(current.status());
    const CUresult result = driver->cuEventQuery(event);
    if (result == cuda::kNotReady) return false;
    RETURN_IF_ERROR(Check(result, "cuEventQuery"));
    return true;
  }
  void Destroy(CUevent event) const {
    const Current current(*this);
    if (current.status().ok()) driver->cuEventDestroy_v2(event);
  }
  // Returns the clock for events that are recorded now. The context must be current.
  absl::StatusOr<std::shared_ptr<const Clock>> CurrentClock() const;

  // Free bytes of the device's memory, which all processes share. The context must be current.
  absl::StatusOr<uint64_t> FreeBytes() const {
    size_t free_bytes = 0;
    size_t all_bytes = 0;
    RETURN_IF_ERROR(Check(driver->cuMemGetInfo_v2(&free_bytes, &all_bytes), "cuMemGetInfo"));
    return free_bytes;
  }
  absl::Status TooLittleMemory(uint64_t needed_bytes) const {
    ASSIGN_OR_RETURN(const uint64_t free_bytes, FreeBytes());
    return MakeError(ErrorId::kDeviceMemory,
                     absl::StrCat(name, " (", model, ") has ", free_bytes, " of its ", memory_bytes,
                                  " bytes free; ", needed_bytes, " are needed"));
  }

  // Number of bytes from `at` on that one call has registered, or, if `at` is not registered, that lie before the next
  // registered bytes.
  size_t BytesAlike(const std::byte* at) const {
    const protocol::MutexLock lock(mutex_);
    const auto after = registered_.upper_bound(at);
    if (after != registered_.begin()) {
      const auto& [begin, size_bytes] = *std::prev(after);
      const auto offset = static_cast<size_t>(at - begin);
      if (offset < size_bytes) return size_bytes - offset;
    }
    if (after == registered_.end()) return std::numeric_limits<size_t>::max();
    return static_cast<size_t>(after->first - at);
  }
  void Add(const std::byte* begin, size_t size_bytes) {
    const protocol::MutexLock lock(mutex_);
    registered_[begin] = size_bytes;
  }
  void Remove(const std::byte* begin) {
    const protocol::MutexLock lock(mutex_);
    registered_.erase(begin);
  }

  std::shared_ptr<const Driver> driver;
  std::string name;
  std::string model;
  int ordinal = 0;
  uint64_t memory_bytes = 0;
  uint64_t piece_bytes = 0;
  bool has_read_only_flag = false;
  bool uses_host_page_tables = false;

 private:
  absl::Status Describe() {
    constexpr int kModelBytesMax = 256;
    std::array<char, kModelBytesMax> text{};
    RETURN_IF_ERROR(Check(driver->cuDeviceGetName(text.data(), kModelBytesMax - 1, device_),
                          "cuDeviceGetName"));
    model = text.data();
    size_t bytes = 0;
    RETURN_IF_ERROR(Check(driver->cuDeviceTotalMem_v2(&bytes, device_), "cuDeviceTotalMem"));
    memory_bytes = bytes;
    ASSIGN_OR_RETURN(has_read_only_flag, Has(cuda::kReadOnlyHostRegisterSupported));
    ASSIGN_OR_RETURN(uses_host_page_tables, Has(cuda::kPageableUsesHostPageTables));
    ASSIGN_OR_RETURN(const bool has_pools, Has(cuda::kMemoryPoolsSupported));
    if (has_pools) return absl::OkStatus();
    return MakeError(ErrorId::kUnsupported,
                     absl::StrCat(name, " (", model, ") has no memory pools"),
                     "use a GPU and a driver with stream-ordered allocation");
  }
  absl::StatusOr<bool> Has(cuda::CUdevice_attribute attribute) const {
    int value = 0;
    RETURN_IF_ERROR(
        Check(driver->cuDeviceGetAttribute(&value, attribute, device_), "cuDeviceGetAttribute"));
    return value != 0;
  }

  cuda::CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  mutable protocol::Mutex mutex_;
  std::map<const std::byte*, size_t, std::less<>> registered_ ABSL_GUARDED_BY(mutex_);
  mutable CUstream clock_stream_ ABSL_GUARDED_BY(mutex_) = nullptr;  // has no other work
  mutable internal::FreeEvents<Clock> clocks_ ABSL_GUARDED_BY(mutex_);
  mutable std::shared_ptr<const Clock> clock_ ABSL_GUARDED_BY(mutex_);  // the newest
  mutable uint64_t next_clock_ns_ ABSL_GUARDED_BY(mutex_) = 0;
};

// An event, and the time at which it ended. CUDA reports times as milliseconds between two events, in a float. For the
// precision of the float, a new clock starts every second.
class CudaDevice::Clock {
 public:
  // To be called before the clock is shared, and in the context.
  absl::Status Start(CUstream stream) {
    const uint64_t before_ns = MonotonicNs();
    RETURN_IF_ERROR(
        context_.Check(context_.driver->cuEventRecord(started_, stream), "cuEventRecord"));
    while (true) {
      ASSIGN_OR_RETURN(const bool has_ended, context_.HasEnded(started_));
      const uint64_t now_ns = MonotonicNs();
      started_ns_ = before_ns + (now_ns - before_ns) / 2;
      if (has_ended) return absl::OkStatus();
      if (now_ns - before_ns > kPatienceNs) return absl::DeadlineExceededError("a slow device");
    }
  }
  Clock(const Context& context, CUevent started) : context_(context), started_(started) {}
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  ~Clock() { context_.Destroy(started_); }

  // Returns the time, in ns of CLOCK_MONOTONIC, at which `event` ended. The event was recorded after this clock's own event,
  // and has ended.
  absl::StatusOr<std::optional<uint64_t>> EndedNs(CUevent event) const {
    constexpr double kNsOfMs = 1e6;
    const Context::Current current(context_);
    RETURN_IF_ERROR(current.status());
    float ms = 0;
    RETURN_IF_ERROR(context_.Check(context_.driver->cuEventElapsedTime(&ms, started_, event),
                                   "cuEventElapsedTime"));
    return started_ns_ + static_cast<uint64_t>(std::max(0.0, double{ms} * kNsOfMs));
  }

  static constexpr uint64_t kPeriodNs = 1'000'000'000;

 private:
  static constexpr uint64_t kPatienceNs = 5'000'000;  // an event of an idle stream takes 10,000

  const Context& context_;  // alive as long as the clock
  CUevent started_;
  std::atomic<uint64_t> started_ns_ = 0;
};

CudaDevice::Context::~Context() {
  if (context_ == nullptr) return;
  {
    const Current current(*this);
    const protocol::MutexLock lock(mutex_);
    clock_.reset();
    clocks_ = {};
    if (clock_stream_ != nullptr && current.status().ok()) {
      driver->cuStreamDestroy_v2(clock_stream_);
    }
  }
  driver->cuDevicePrimaryCtxRelease_v2(device_);
}

absl::StatusOr<std::shared_ptr<const CudaDevice::Clock>> CudaDevice::Context::CurrentClock() const {
  const protocol::MutexLock lock(mutex_);
  if (clock_stream_ == nullptr) {
    RETURN_IF_ERROR(
        Check(driver->cuStreamCreate(&clock_stream_, cuda::kStreamNonBlocking), "cuStreamCreate"));
  }
  const uint64_t now_ns = MonotonicNs();
  if (now_ns >= next_clock_ns_) {
    next_clock_ns_ = now_ns + Clock::kPeriodNs;
    std::shared_ptr<Clock> clock = clocks_.Find();
    if (clock == nullptr) {
      CUevent made = nullptr;
      RETURN_IF_ERROR(Check(driver->cuEventCreate(&made, 0), "cuEventCreate"));
      clocks_.Add(clock = std::make_shared<Clock>(*this, made));
    }
    if (clock->Start(clock_stream_).ok()) clock_ = std::move(clock);
  }
  if (clock_ != nullptr) return clock_;
  return MakeError(ErrorId::kTimeout, absl::StrCat(name, " does not tell the time"));
}

// ------------------------------------------------------------------------------------------ Events

class CudaDevice::CudaEvent final : public Event {
 public:
  static constexpr unsigned kFlags = cuda::kEventDisableTiming;

  CudaEvent(std::shared_ptr<const Context> context, CUevent event)
      : context_(std::move(context)), event_(event) {}
  ~CudaEvent() override { context_->Destroy(event_); }

  absl::StatusOr<bool> Done() const override { return context_->HasEnded(event_); }
  CUevent event() const { return event_; }

 private:
  std::shared_ptr<const Context> context_;
  CUevent event_;
};

class CudaDevice::CudaTimedEvent final : public TimedEvent {
 public:
  static constexpr unsigned kFlags = 0;

  CudaTimedEvent(std::shared_ptr<const Context> context, CUevent event)
      : context_(std::move(context)), event_(event) {}
  ~CudaTimedEvent() override { context_->Destroy(event_); }

  absl::StatusOr<std::optional<uint64_t>> EndedNs() const override {
    ASSIGN_OR_RETURN(const bool has_ended, context_->HasEnded(event_));
    if (!has_ended) return std::nullopt;
    const protocol::MutexLock lock(mutex_);
    return clock_->EndedNs(event_);
  }
  CUevent event() const { return event_; }
  void set_clock(std::shared_ptr<const Clock> clock) {
    const protocol::MutexLock lock(mutex_);
    clock_ = std::move(clock);
  }

 private:
  std::shared_ptr<const Context> context_;
  CUevent event_;
  // an earlier user of the event may have read it on another thread
  mutable protocol::Mutex mutex_;
  std::shared_ptr<const Clock> clock_ ABSL_GUARDED_BY(mutex_);
};

// ------------------------------------------------------------------------------- Streams and memory

// Destroyed where it is ours, once memory that was allocated on it is free.
class CudaDevice::StreamHandle final : public MemorySource {
 public:
  enum class Kind : uint8_t { kOwned, kBorrowed };

  StreamHandle(std::shared_ptr<const Context> context, CUstream stream, Kind kind)
      : context_(std::move(context)), stream_(stream), kind_(kind) {}
  ~StreamHandle() override {
    if (!is_owned()) return;
    const Context::Current current(*context_);
    if (current.status().ok()) context_->driver->cuStreamDestroy_v2(stream_);
  }

  void Free(std::span<std::byte> bytes) override {
    const Context::Current current(*context_);
    if (current.status().ok()) context_->driver->cuMemFreeAsync(Address(bytes.data()), stream_);
  }

  const Context& context() const { return *context_; }
  const std::shared_ptr<const Context>& shared_context() const { return context_; }
  CUstream stream() const { return stream_; }
  bool is_owned() const { return kind_ == Kind::kOwned; }

 private:
  std::shared_ptr<const Context> context_;
  CUstream stream_;
  const Kind kind_;
};

class CudaDevice::CudaStream final : public Stream {
 public:
  explicit CudaStream(std::shared_ptr<StreamHandle> handle)
      : handle_(std::move(handle)), context_(handle_->context()), driver_(*context_.driver) {}
  ~CudaStream() override {
    if (handle_->is_owned()) Synchronize().IgnoreError();
  }

  absl::Status Copy(std::span<std::byte> to, std::span<const std::byte> from) override {
    RETURN_IF_ERROR(CheckCopy(to, from));
    const Context::Current current(context_);
    RETURN_IF_ERROR(current.status());
    // CUDA refuses a copy from or to memory that was registered by two calls.
    while (!from.empty()) {
      const size_t bytes =
          std::min({from.size(), context_.BytesAlike(to.data()), context_.BytesAlike(from.data())});
      RETURN_IF_ERROR(context_.Check(
          driver_.cuMemcpyAsync(Address(to.data()), Address(from.data()), bytes, handle_->stream()),
          "cuMemcpyAsync"));
      to = to.subspan(bytes);
      from = from.subspan(bytes);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const Event>> Record() override {
    const Context::Current current(context_);
    RETURN_IF_ERROR(current.status());
    ASSIGN_OR_RETURN(const std::shared_ptr<CudaEvent> event, FreeOf(events_));
    RETURN_IF_ERROR(
        context_.Check(driver_.cuEventRecord(event->event(), handle_->stream()), "cuEventRecord"));
    return event;
  }

  absl::StatusOr<std::shared_ptr<const TimedEvent>> RecordTimed() override {
    const Context::Current current(context_);
    RETURN_IF_ERROR(current.status());
    ASSIGN_OR_RETURN(const std::shared_ptr<CudaTimedEvent> event, FreeOf(timed_));
    ASSIGN_OR_RETURN(std::shared_ptr<const Clock> clock, context_.CurrentClock());
    event->set_clock(std::move(clock));
    RETURN_IF_ERROR(
        context_.Check(driver_.cuEventRecord(event->event(), handle_->stream()), "cuEventRecord"));
    return event;
  }

  absl::Status WaitFor(const Event& event) override {
    const Context::Current current(context_);
    RETURN_IF_ERROR(current.status());
    const auto* const other = dynamic_cast<const CudaEvent*>(&event);
    if (other == nullptr) {
      return MakeError(ErrorId::kOption,
                       absl::StrCat("a stream of ", context_.name,
                                    " is to wait for an event of another kind of device"),
                       "use one device for the session and all that works with it");
    }
    return context_.Check(driver_.cuStreamWaitEvent(handle_->stream(), other->event(), 0),
                          "cuStreamWaitEvent");
  }

  absl::Status Synchronize() override {
    const Context::Current current(context_);
    RETURN_IF_ERROR(current.status());
    return context_.Check(driver_.cuStreamSynchronize(handle_->stream()), "cuStreamSynchronize");
  }

  uintptr_t handle() const override { return reinterpret_cast<uintptr_t>(handle_->stream()); }

  absl::StatusOr<DeviceMemory> Allocate(size_t size_bytes) override {
    const Context::Current current(context_);
    RETURN_IF_ERROR(current.status());
    CUdeviceptr made = 0;
    const size_t bytes = std::max<size_t>(size_bytes, 1);
    const CUresult result = driver_.cuMemAllocAsync(&made, bytes, handle_->stream());
    if (result == cuda::kOutOfMemory) return context_.TooLittleMemory(bytes);
    if (result != cuda::kSuccess) {
      return context_.Check(result, absl::StrCat("cuMemAllocAsync of ", bytes, " bytes"));
    }
    auto* const begin = reinterpret_cast<std::byte*>(static_cast<uintptr_t>(made));
    return DeviceMemory(handle_, std::span(begin, size_bytes));
  }

 private:
  // Returns an event without another owner, or a new event. The context must be current.
  template <typename Event>
  absl::StatusOr<std::shared_ptr<Event>> FreeOf(internal::FreeEvents<Event>& events) {
    std::shared_ptr<Event> event = events.Find();
    if (event != nullptr) return event;
    CUevent made = nullptr;
    RETURN_IF_ERROR(context_.Check(driver_.cuEventCreate(&made, Event::kFlags), "cuEventCreate"));
    events.Add(event = std::make_shared<Event>(handle_->shared_context(), made));
    return event;
  }

  std::shared_ptr<StreamHandle> handle_;
  const Context& context_;
  const Driver& driver_;
  internal::FreeEvents<CudaEvent> events_;
  internal::FreeEvents<CudaTimedEvent> timed_;
};

// ------------------------------------------------------------------------------------ Registrations

class CudaDevice::CudaRegistration final : public HostRegistration {
 public:
  explicit CudaRegistration(std::shared_ptr<Context> context) : context_(std::move(context)) {}
  ~CudaRegistration() override {
    const Context::Current current(*context_);
    for (std::byte* const begin : pieces_) {
      context_->Remove(begin);
      if (current.status().ok()) context_->driver->cuMemHostUnregister(begin);
    }
  }

  absl::Status Add(std::byte* begin, size_t size_bytes, unsigned flags) {
    const Context::Current current(*context_);
    RETURN_IF_ERROR(current.status());
    RETURN_IF_ERROR(
        context_->Check(context_->driver->cuMemHostRegister_v2(begin, size_bytes, flags),
                        absl::StrCat("cuMemHostRegister of ", size_bytes, " bytes")));
    context_->Add(begin, size_bytes);
    pieces_.push_back(begin);
    return absl::OkStatus();
  }

 private:
  std::shared_ptr<Context> context_;
  std::vector<std::byte*> pieces_;
};

// ------------------------------------------------------------------------------------------- Device

absl::StatusOr<std::shared_ptr<CudaDevice>> CudaDevice::Create(const Options& options) {
  if (options.piece_bytes == 0 || options.piece_bytes % protocol::kPageBytes != 0) {
    return MakeError(ErrorId::kOption, absl::StrCat("pieces of ", options.piece_bytes,
                                                    " bytes; whole pages are registered"));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Context> context, Context::Create(options));
  return std::shared_ptr<CudaDevice>(new CudaDevice(std::move(context)));
}

std::string_view CudaDevice::name() const { return context_->name; }
std::string_view CudaDevice::model() const { return context_->model; }
uint64_t CudaDevice::memory_bytes() const { return context_->memory_bytes; }
int CudaDevice::driver_version() const { return context_->driver->version(); }

absl::Status CudaDevice::WithContext(absl::FunctionRef<absl::Status()> call) const {
  const Context::Current current(*context_);
  RETURN_IF_ERROR(current.status());
  return call();
}

bool CudaDevice::registers_read_only() const {
  return context_->has_read_only_flag || context_->uses_host_page_tables;
}

absl::StatusOr<std::optional<uint64_t>> CudaDevice::FreeBytes() {
  const Context::Current current(*context_);
  RETURN_IF_ERROR(current.status());
  return context_->FreeBytes();
}

absl::Status CudaDevice::CheckReach(std::span<const std::byte> bytes) const {
  if (bytes.empty()) return absl::OkStatus();
  const Context::Current current(*context_);
  RETURN_IF_ERROR(current.status());
  const Driver& driver = *context_->driver;
  unsigned type = 0;
  CUresult result =
      driver.cuPointerGetAttribute(&type, cuda::kPointerMemoryType, Address(bytes.data()));
  if (result == cuda::kInvalidValue) return absl::OkStatus();  // the host's, not registered
  RETURN_IF_ERROR(context_->Check(result, "cuPointerGetAttribute"));
  if (type != cuda::kMemoryTypeDevice) return absl::OkStatus();
  int ordinal = 0;
  result =
      driver.cuPointerGetAttribute(&ordinal, cuda::kPointerDeviceOrdinal, Address(bytes.data()));
  RETURN_IF_ERROR(context_->Check(result, "cuPointerGetAttribute"));
  if (ordinal == context_->ordinal) return absl::OkStatus();
  return MakeError(ErrorId::kRange,
                   absl::StrCat("memory of cuda:", ordinal, " in a session of ", context_->name),
                   "pass memory of the device that the session was attached with");
}

absl::StatusOr<std::unique_ptr<Stream>> CudaDevice::MakeStream() {
  const Context::Current current(*context_);
  RETURN_IF_ERROR(current.status());
  CUstream made = nullptr;
  RETURN_IF_ERROR(context_->Check(context_->driver->cuStreamCreate(&made, cuda::kStreamNonBlocking),
                                  "cuStreamCreate"));
  return std::make_unique<CudaStream>(
      std::make_shared<StreamHandle>(context_, made, StreamHandle::Kind::kOwned));
}

absl::StatusOr<std::unique_ptr<Stream>> CudaDevice::BorrowStream(uintptr_t handle) {
  return std::make_unique<CudaStream>(std::make_shared<StreamHandle>(
      context_, reinterpret_cast<CUstream>(handle), StreamHandle::Kind::kBorrowed));
}

absl::StatusOr<std::unique_ptr<HostRegistration>> CudaDevice::Register(
    std::span<const std::byte> bytes, HostAccess access) {
  if (Address(bytes.data()) % protocol::kPageBytes != 0) {
    return MakeError(ErrorId::kRange, "memory that begins within a page cannot be registered");
  }
  const bool is_read_only = access == HostAccess::kRead && context_->has_read_only_flag;
  const unsigned flags = cuda::kRegisterPortable | (is_read_only ? cuda::kRegisterReadOnly : 0U);
  auto* const begin = const_cast<std::byte*>(bytes.data());  // CUDA's signature
  const uint64_t size_bytes = protocol::RoundUp(bytes.size(), protocol::kPageBytes);
  auto registration = std::make_unique<CudaRegistration>(context_);
  for (uint64_t at = 0; at < size_bytes; at += context_->piece_bytes) {
    const uint64_t piece_bytes = std::min(context_->piece_bytes, size_bytes - at);
    const absl::Status added = registration->Add(begin + at, piece_bytes, flags);
    if (added.ok()) continue;
    return MakeError(
        ErrorId::kUnsupported,
        absl::StrCat(context_->name, " cannot reach ", bytes.size(), " bytes of memory mapped ",
                     access == HostAccess::kRead ? "read-only" : "writable", ", at byte ", at, ": ",
                     std::string(added.message())));
  }
  return registration;
}

}  // namespace forebay::gpu
