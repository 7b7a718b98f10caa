#include "tests/support/fake_cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <utility>

#include "gpu/internal/cuda_types.h"
#include "protocol/os/mutex.h"

// What a handle of the driver's points to.
namespace forebay::testing {
struct Mark;
struct Queue;
}  // namespace forebay::testing

struct CUevent_st {
  std::shared_ptr<forebay::testing::Mark> mark;  // of the last record
};
struct CUstream_st {
  std::shared_ptr<forebay::testing::Queue> queue;
};
struct CUctx_st {
  int device = 0;
};

namespace forebay::testing {

using namespace gpu::cuda;  // NOLINT(google-build-using-namespace): the driver's own names

// Where an event was recorded.
struct Mark {
  std::weak_ptr<Queue> queue;
  bool is_done = false;
  bool is_left_out = false;
  int looks = 0;
};

struct Work {
  std::span<std::byte> to = {};
  std::span<const std::byte> from = {};
  std::shared_ptr<Mark> record = {};
  std::shared_ptr<Mark> wait = {};
  const std::byte* freed = nullptr;
  std::shared_ptr<FakeCuda::Collective> collective = {};
  size_t rank = 0;  // in the collective
};

// The work of a stream.
struct Queue {
  std::deque<Work> work;
  bool is_running = false;  // its front is looked at
  bool is_late = false;     // runs only where somebody waits for it
};

namespace {

struct Allocation {
  std::vector<std::byte> bytes;
  bool is_freed = false;       // what runs finds it freed
  bool is_given_back = false;  // by a call
  bool is_of_driver = false;   // else of FakeCuda::Allocate
};

struct Registered {
  size_t size_bytes = 0;
  bool is_read_only = false;
};

// The entry of a map of ranges that `at` lies in, or the end.
template <typename Map, typename Size>
auto Holding(Map& ranges, const std::byte* at, const Size& size_of) {
  const auto after = ranges.upper_bound(at);
  if (after == ranges.begin()) return ranges.end();
  const auto found = std::prev(after);
  const auto offset = static_cast<size_t>(at - found->first);
  return offset < std::max<size_t>(size_of(found->second), 1) ? found : ranges.end();
}
size_t SizeOf(const Allocation& one) { return one.bytes.size(); }
size_t SizeOf(const Registered& one) { return one.size_bytes; }
constexpr auto kSizeOf = [](const auto& one) { return SizeOf(one); };

struct State {
  FakeCuda::Options options;
  protocol::Mutex mutex;
  std::mt19937_64 random;
  std::map<const std::byte*, Allocation, std::less<>> allocations;  // what is freed stays mapped
  std::map<const std::byte*, Registered, std::less<>> registered;
  std::map<CUstream, std::unique_ptr<CUstream_st>> streams;
  std::map<CUevent, std::unique_ptr<CUevent_st>> events;
  CUstream_st default_stream{std::make_shared<Queue>()};
  std::vector<CUctx_st> contexts;
  int retained = 0;
  bool is_initialized = false;
  bool is_broken = false;
  bool counts_waits = true;
  size_t waits = 0;
  size_t calls = 0;
  size_t copies = 0;  // that have run
  unsigned streams_made = 0;
  std::optional<size_t> left_out;
  std::optional<size_t> failing_call;
  std::optional<size_t> failing_copy;
  std::function<void()> before_work;
  std::vector<std::string> mistakes;
  std::condition_variable_any changed;  // for who waits for other ranks

  // Whether the wait that is counted now is left out.
  bool IsLeftOut() { return counts_waits && waits++ == left_out; }

  bool IsFreed(const std::byte* at) {
    const auto found = Holding(allocations, at, kSizeOf);
    return found != allocations.end() && found->second.is_freed;
  }

  // Whether the collective at the front of a queue has run, or its rank has left: runs what is before it on
  // the other ranks' streams.
  bool RunCollective(const Work& work) {
    FakeCuda::Collective& collective = *work.collective;
    if (collective.is_done || collective.has_left[work.rank]) return true;
    for (size_t rank = 0; rank < collective.ranks; ++rank) {
      const auto found = collective.queues.find(rank);
      if (found == collective.queues.end()) return false;
      const auto other = std::static_pointer_cast<Queue>(found->second.lock());
      if (other == nullptr || collective.has_left[rank]) return false;
      while (other->work.front().collective != work.collective) {
        if (!RunFirst(*other)) return false;
        if (collective.is_done) return true;
      }
    }
    collective.is_done = true;
    if (!is_broken) collective.run();
    return true;
  }

  // False where it cannot run yet.
  bool RunFirst(Queue& queue) {
    if (queue.is_running) return false;  // ranks wait for each other in a circle
    queue.is_running = true;
    const bool can_run = CanRunFirst(queue);
    queue.is_running = false;
    if (!can_run) return false;
    const Work work = std::move(queue.work.front());
    queue.work.pop_front();
    Finish(work);
    return true;
  }
  bool CanRunFirst(Queue& queue) {
    const Work work = queue.work.front();
    if (work.wait != nullptr) return RunUntil(work.wait);
    return work.collective == nullptr || RunCollective(work);
  }
  void Finish(const Work& work) {
    if (work.record != nullptr) work.record->is_done = true;
    if (work.freed != nullptr) allocations.at(work.freed).is_freed = true;
    if (work.from.empty()) return;
    if (failing_copy.has_value() && copies++ >= *failing_copy) is_broken = true;
    if (is_broken || IsFreed(work.to.data())) return;
    if (IsFreed(work.from.data())) {
      std::ranges::fill(work.to, FakeCuda::kPoison);
    } else {
      std::memcpy(work.to.data(), work.from.data(), work.from.size());
    }
  }
  bool RunUntil(const std::shared_ptr<Mark>& mark) {
    const std::shared_ptr<Queue> queue = mark->queue.lock();
    while (!mark->is_done && queue != nullptr && !queue->work.empty()) {
      if (!RunFirst(*queue)) return false;
    }
    return true;
  }
  bool RunAll(Queue& queue) {
    while (!queue.work.empty()) {
      if (!RunFirst(queue)) return false;
    }
    return true;
  }

  // A few operations, in an order that streams and events allow.
  void RunSome() {
    constexpr uint64_t kOperationsMax = 4;
    for (uint64_t left = random() % kOperationsMax; left > 0; --left) {
      std::vector<Queue*> ready;
      ForEachQueue([&](Queue& queue) {
        if (queue.work.empty()) return;
        const std::shared_ptr<Mark>& wait = queue.work.front().wait;
        if (wait == nullptr || wait->is_done) ready.push_back(&queue);
      });
      if (ready.empty()) return;
      (void)RunFirst(*ready[random() % ready.size()]);
    }
  }
  // All work of the early streams, and what it waits for of the late ones.
  void RunEarly() {
    for (bool has_run = true; has_run;) {
      has_run = false;
      ForEachQueue([&](Queue& queue) {
        if (!queue.is_late && !queue.work.empty()) has_run = RunFirst(queue) || has_run;
      });
    }
  }
  template <typename Visit>
  void ForEachQueue(const Visit& visit) {
    visit(*default_stream.queue);
    for (const auto& [handle, stream] : streams) visit(*stream->queue);
  }

  Queue* Find(CUstream handle) {
    if (handle == nullptr) return default_stream.queue.get();
    const auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second->queue.get();
  }
  std::shared_ptr<Queue> Share(CUstream handle) {
    return handle == nullptr ? default_stream.queue : streams.at(handle)->queue;
  }

  bool IsInUse(const std::byte* begin, size_t size_bytes) {
    const auto touches = [&](const std::byte* at) {
      return at != nullptr && at >= begin && at < begin + size_bytes;
    };
    return std::ranges::any_of(streams, [&](const auto& one) {
      return std::ranges::any_of(one.second->queue->work, [&](const Work& work) {
        return touches(work.to.data()) || touches(work.from.data());
      });
    });
  }

  void Note(const std::string& mistake) { mistakes.push_back(mistake); }
};

protocol::Mutex current_mutex;
std::shared_ptr<State> current;  // NOLINT: the driver's own

std::shared_ptr<State> Now() {
  const protocol::MutexLock lock(current_mutex);
  if (current == nullptr) {
    current = std::make_shared<State>();
    current->contexts.resize(1);
  }
  return current;
}

thread_local std::vector<CUcontext> context_stack;  // NOLINT: as CUDA has it

enum class Needs : uint8_t { kNothing, kContext };

// A call of the driver: its lock, and why it fails.
class Call {
 public:
  Call(const char* name, Needs needs) : state_(Now()) {
    std::unique_lock<protocol::Mutex> lock(state_->mutex);
    const bool fails = state_->failing_call == state_->calls;
    ++state_->calls;
    if (fails) result_ = kUnknown;
    if (result_ == kSuccess && !state_->is_initialized && std::strcmp(name, "cuInit") != 0 &&
        std::strcmp(name, "cuDriverGetVersion") != 0) {
      result_ = kNotInitialized;
    }
    if (result_ == kSuccess && needs == Needs::kContext && context_stack.empty()) {
      result_ = kInvalidContext;
      state_->Note(std::string(name) + " without a context");
    }
    if (result_ != kSuccess || needs != Needs::kContext) return;
    if (state_->options.seed.has_value()) Run(lock, [this] { state_->RunSome(); });
    if (state_->options.late_streams.has_value()) Run(lock, [this] { state_->RunEarly(); });
    if (state_->is_broken) result_ = kIllegalAddress;
  }

  CUresult result() const { return result_; }
  State* operator->() { return state_.get(); }
  State& operator*() { return *state_; }
  const std::shared_ptr<State>& shared() const { return state_; }

  // What somebody looks at; not ready where it waits for other ranks. Without the lock held by the caller.
  CUresult Look(const std::function<bool()>& run) {
    std::unique_lock<protocol::Mutex> lock(state_->mutex);
    bool has_run = false;
    Run(lock, [&] { has_run = run(); });
    if (state_->is_broken) return kIllegalAddress;
    return has_run ? kSuccess : kNotReady;
  }
  // What somebody waits for.
  CUresult Wait(const std::function<bool()>& run) {
    std::unique_lock<protocol::Mutex> lock(state_->mutex);
    bool has_run = false;
    Run(lock, [&] { has_run = run(); });
    while (!has_run && !state_->is_broken) {
      state_->changed.wait(lock);
      has_run = run();
    }
    return state_->is_broken ? kIllegalAddress : kSuccess;
  }

 private:
  void Run(std::unique_lock<protocol::Mutex>& lock, const std::function<void()>& run) {
    const std::function<void()> before = state_->before_work;
    lock.unlock();
    if (before) before();
    lock.lock();
    run();
  }

  std::shared_ptr<State> state_;
  CUresult result_ = kSuccess;
};

#define FAKE_CALL(call, name, needs) \
  Call call(name, needs);            \
  if (call.result() != kSuccess) return call.result()

// Whether every page of the range is mapped, and writable where that is asked for.
bool IsMapped(const std::byte* begin, size_t size_bytes, bool writable) {
  auto at = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t end = at + size_bytes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; at < end && std::getline(maps, line);) {
    uintptr_t first = 0;
    uintptr_t last = 0;
    std::array<char, 5> rights{};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &first, &last, rights.data()) != 3) continue;
    if (last <= at) continue;
    if (first > at || rights[0] != 'r' || (writable && rights[1] != 'w')) return false;
    at = last;
  }
  return at >= end;
}

enum class Kind : uint8_t { kDevice, kPinned, kPageable, kMixed };

// What a range of a copy is; both ends have to be in one and the same.
Kind KindOf(State& state, const std::byte* begin, size_t size_bytes, bool is_written) {
  const std::byte* const last = begin + size_bytes - 1;
  const auto allocation = Holding(state.allocations, begin, kSizeOf);
  if (allocation != state.allocations.end()) {
    if (allocation->second.is_given_back) state.Note("a copy of memory that was freed");
    return Holding(state.allocations, last, kSizeOf) == allocation ? Kind::kDevice : Kind::kMixed;
  }
  const auto registered = Holding(state.registered, begin, kSizeOf);
  if (registered != state.registered.end()) {
    if (Holding(state.registered, last, kSizeOf) != registered) return Kind::kMixed;
    if (is_written && registered->second.is_read_only) {
      state.Note("a copy to memory that is registered as read-only");
      return Kind::kMixed;
    }
    return Kind::kPinned;
  }
  const auto next = state.registered.upper_bound(begin);
  return next != state.registered.end() && next->first <= last ? Kind::kMixed : Kind::kPageable;
}

std::byte* Pointer(CUdeviceptr address) {
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address));
}

}  // namespace

// ---------------------------------------------------------------------------------------- the tests

namespace {

// Marks its bytes as freed when it dies.
class Allocated {
 public:
  Allocated(std::shared_ptr<State> state, std::span<std::byte> bytes)
      : state_(std::move(state)), bytes_(bytes) {}
  Allocated(const Allocated&) = delete;
  Allocated& operator=(const Allocated&) = delete;
  ~Allocated() {
    const protocol::MutexLock lock(state_->mutex);
    state_->allocations.at(bytes_.data()).is_freed = true;
  }
  const std::span<std::byte>& bytes() const { return bytes_; }

 private:
  std::shared_ptr<State> state_;
  std::span<std::byte> bytes_;
};

std::span<std::byte> AllocateIn(State& state, size_t size_bytes, bool is_of_driver) {
  std::vector<std::byte> bytes(std::max<size_t>(size_bytes, 1), FakeCuda::kPoison);
  const std::span<std::byte> span(bytes.data(), size_bytes);
  state.allocations[span.data()] = {.bytes = std::move(bytes), .is_of_driver = is_of_driver};
  return span;
}

// Calls `act` with the state, locked.
template <typename Act>
auto Locked(const Act& act) {
  const std::shared_ptr<State> state = Now();
  const protocol::MutexLock lock(state->mutex);
  return act(*state);
}

}  // namespace

std::string FakeCuda::Library() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<void*>(&FakeCuda::Library), &info);
  return info.dli_fname;
}

void FakeCuda::Start(const Options& options) {
  const protocol::MutexLock lock(current_mutex);
  current = std::make_shared<State>();
  current->options = options;
  current->random.seed(options.seed.value_or(0));
  current->contexts.resize(static_cast<size_t>(std::max(options.devices, 0)));
}

FakeCuda::Memory FakeCuda::Allocate(size_t size_bytes) {
  const std::shared_ptr<State> state = Now();
  const protocol::MutexLock lock(state->mutex);
  auto memory = std::make_shared<const Allocated>(state, AllocateIn(*state, size_bytes, false));
  return {memory, &memory->bytes()};
}

void FakeCuda::LeaveOut(size_t wait) {
  Locked([&](State& state) { state.left_out = wait; });
}
size_t FakeCuda::waits() {
  return Locked([](const State& state) { return state.waits; });
}
void FakeCuda::set_counts_waits(bool counts) {
  Locked([&](State& state) { state.counts_waits = counts; });
}
void FakeCuda::set_looks_until_done(int looks) {
  Locked([&](State& state) { state.options.looks_until_done = looks; });
}
void FakeCuda::set_before_work(std::function<void()> before_work) {
  Locked([&](State& state) { state.before_work = std::move(before_work); });
}
void FakeCuda::Enqueue(void* stream, std::shared_ptr<Collective> collective, size_t rank,
                       const std::function<void()>& update) {
  Locked([&](State& state) {
    update();
    auto* const handle = static_cast<CUstream>(stream);
    collective->queues[rank] = state.Share(handle);
    state.Find(handle)->work.push_back({.collective = std::move(collective), .rank = rank});
    state.changed.notify_all();
  });
}
void FakeCuda::Change(const std::function<void()>& act) {
  Locked([&](State& state) {
    act();
    state.changed.notify_all();
  });
}
bool FakeCuda::IsFreed(const std::byte* at) { return Now()->IsFreed(at); }
void FakeCuda::NoteMistake(const std::string& mistake) { Now()->Note(mistake); }
void FakeCuda::FailCall(size_t call) {
  Locked([&](State& state) { state.failing_call = call; });
}
size_t FakeCuda::calls() {
  return Locked([](const State& state) { return state.calls; });
}
void FakeCuda::FailCopy(size_t copy) {
  Locked([&](State& state) { state.failing_copy = copy; });
}

std::vector<FakeCuda::Registration> FakeCuda::registrations() {
  return Locked([](const State& state) {
    std::vector<Registration> all;
    for (const auto& [begin, one] : state.registered) {
      all.push_back({begin, one.size_bytes, one.is_read_only});
    }
    return all;
  });
}

FakeCuda::Leftovers FakeCuda::leftovers() {
  return Locked([](const State& state) {
    const auto is_left = [](const auto& one) {
      return one.second.is_of_driver && !one.second.is_given_back;
    };
    return Leftovers{
        .streams = state.streams.size(),
        .events = state.events.size(),
        .allocations = static_cast<size_t>(std::ranges::count_if(state.allocations, is_left)),
        .registrations = state.registered.size(),
        .contexts = state.retained};
  });
}

std::vector<std::string> FakeCuda::mistakes() {
  return Locked([](const State& state) { return state.mistakes; });
}

}  // namespace forebay::testing

// -------------------------------------------------------------------------------------- the driver

using forebay::protocol::MutexLock;
using namespace forebay::testing;    // NOLINT(google-build-using-namespace)
using namespace forebay::gpu::cuda;  // NOLINT(google-build-using-namespace)

#define FOREBAY_CUDA_FUNCTION(name, parameters) CUresult name parameters;
extern "C" {
#include "gpu/internal/cuda_functions.inc"
}
#undef FOREBAY_CUDA_FUNCTION

CUresult cuInit(unsigned) {
  FAKE_CALL(call, "cuInit", Needs::kNothing);
  if (call->options.devices == 0) return kNoDevice;
  call->is_initialized = true;
  return kSuccess;
}

CUresult cuDriverGetVersion(int* version) {
  FAKE_CALL(call, "cuDriverGetVersion", Needs::kNothing);
  *version = call->options.version;
  return kSuccess;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
    case kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return kSuccess;
    case kIllegalAddress:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return kSuccess;
    case kNotSupported:
      *name = "CUDA_ERROR_NOT_SUPPORTED";
      return kSuccess;
    case kUnknown:
      *name = "CUDA_ERROR_UNKNOWN";
      return kSuccess;
    default:
      *name = "CUDA_ERROR";
      return kSuccess;
  }
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == kIllegalAddress ? "an illegal memory access was encountered" : "of the fake";
  return kSuccess;
}

CUresult cuDeviceGetCount(int* count) {
  FAKE_CALL(call, "cuDeviceGetCount", Needs::kNothing);
  *count = call->options.devices;
  return kSuccess;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_CALL(call, "cuDeviceGet", Needs::kNothing);
  if (ordinal < 0 || ordinal >= call->options.devices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  FAKE_CALL(call, "cuDeviceGetName", Needs::kNothing);
  std::snprintf(name, static_cast<size_t>(size), "Fake GPU");
  return kSuccess;
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  FAKE_CALL(call, "cuDeviceTotalMem", Needs::kNothing);
  *bytes = size_t{1} << 30;
  return kSuccess;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  FAKE_CALL(call, "cuDeviceGetAttribute", Needs::kNothing);
  *value = 0;
  if (attribute == kReadOnlyHostRegisterSupported) *value = int{call->options.registers_read_only};
  if (attribute == kMemoryPoolsSupported) *value = int{call->options.has_memory_pools};
  return kSuccess;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  FAKE_CALL(call, "cuDevicePrimaryCtxRetain", Needs::kNothing);
  const MutexLock lock(call->mutex);
  ++call->retained;
  *context = &call->contexts[static_cast<size_t>(device)];
  return kSuccess;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  FAKE_CALL(call, "cuDevicePrimaryCtxRelease", Needs::kNothing);
  const MutexLock lock(call->mutex);
  --call->retained;
  return kSuccess;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  FAKE_CALL(call, "cuCtxPushCurrent", Needs::kNothing);
  context_stack.push_back(context);
  return kSuccess;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (context_stack.empty()) return kInvalidContext;  // never fails otherwise: what was pushed
  *context = context_stack.back();
  context_stack.pop_back();
  return kSuccess;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  FAKE_CALL(call, "cuStreamCreate", Needs::kContext);
  const MutexLock lock(call->mutex);
  auto made = std::make_unique<CUstream_st>(CUstream_st{std::make_shared<Queue>()});
  const uint64_t late = call->options.late_streams.value_or(0);
  made->queue->is_late = ((late >> call->streams_made++) & 1) != 0;
  *stream = made.get();
  call->streams[*stream] = std::move(made);
  return kSuccess;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  FAKE_CALL(call, "cuStreamDestroy", Needs::kContext);
  const MutexLock lock(call->mutex);
  if (call->streams.erase(stream) == 1) return kSuccess;
  call->Note("a stream that is none was destroyed");
  return kInvalidHandle;
}

CUresult cuStreamSynchronize(CUstream stream) {
  FAKE_CALL(call, "cuStreamSynchronize", Needs::kContext);
  {
    const MutexLock lock(call->mutex);
    Queue* const queue = call->Find(stream);
    if (queue == nullptr) return kInvalidHandle;
    if (queue->work.empty() || call->IsLeftOut()) return kSuccess;
  }
  return call.Wait([&] { return call->RunAll(*call->Find(stream)); });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  FAKE_CALL(call, "cuStreamWaitEvent", Needs::kContext);
  const MutexLock lock(call->mutex);
  Queue* const queue = call->Find(stream);
  if (queue == nullptr || !call->events.contains(event)) return kInvalidHandle;
  const std::shared_ptr<Mark>& mark = event->mark;
  if (mark == nullptr || mark->is_left_out) return kSuccess;
  if (call->IsLeftOut()) return kSuccess;
  queue->work.push_back({.wait = mark});
  return kSuccess;
}

CUresult cuEventCreate(CUevent* event, unsigned) {
  FAKE_CALL(call, "cuEventCreate", Needs::kContext);
  const MutexLock lock(call->mutex);
  auto made = std::make_unique<CUevent_st>();
  *event = made.get();
  call->events[*event] = std::move(made);
  return kSuccess;
}

CUresult cuEventDestroy_v2(CUevent event) {
  FAKE_CALL(call, "cuEventDestroy", Needs::kContext);
  const MutexLock lock(call->mutex);
  if (call->events.erase(event) == 1) return kSuccess;
  call->Note("an event that is none was destroyed");
  return kInvalidHandle;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  FAKE_CALL(call, "cuEventRecord", Needs::kContext);
  const MutexLock lock(call->mutex);
  Queue* const queue = call->Find(stream);
  if (queue == nullptr || !call->events.contains(event)) return kInvalidHandle;
  event->mark = std::make_shared<Mark>();
  event->mark->queue = call->Share(stream);
  event->mark->is_left_out = call->IsLeftOut();
  if (!event->mark->is_left_out) queue->work.push_back({.record = event->mark});
  return kSuccess;
}

CUresult cuEventQuery(CUevent event) {
  FAKE_CALL(call, "cuEventQuery", Needs::kContext);
  std::shared_ptr<Mark> mark;
  {
    const MutexLock lock(call->mutex);
    if (!call->events.contains(event)) return kInvalidHandle;
    mark = event->mark;
    if (mark == nullptr || mark->is_done || mark->is_left_out) return kSuccess;
    if (++mark->looks < call->options.looks_until_done) return kNotReady;
  }
  return call.Look([&] { return call->RunUntil(mark); });
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size_bytes, CUstream stream) {
  FAKE_CALL(call, "cuMemcpyAsync", Needs::kContext);
  {
    const MutexLock lock(call->mutex);
    Queue* const queue = call->Find(stream);
    if (queue == nullptr) return kInvalidHandle;
    if (size_bytes == 0) return kSuccess;
    const Kind target = KindOf(*call, Pointer(to), size_bytes, true);
    const Kind source = KindOf(*call, Pointer(from), size_bytes, false);
    if (target == Kind::kMixed || source == Kind::kMixed) return kInvalidValue;
    queue->work.push_back({.to = {Pointer(to), size_bytes}, .from = {Pointer(from), size_bytes}});
    const bool is_known = target != Kind::kPageable && source != Kind::kPageable;
    const bool is_late = is_known || call->options.is_late_with_pageable;
    if (is_late && (stream != nullptr || call->options.is_default_stream_late)) return kSuccess;
  }
  return call.Wait([&] { return call->RunAll(*call->Find(stream)); });
}

CUresult cuMemAllocAsync(CUdeviceptr* address, size_t size_bytes, CUstream stream) {
  FAKE_CALL(call, "cuMemAllocAsync", Needs::kContext);
  const MutexLock lock(call->mutex);
  if (call->Find(stream) == nullptr) return kInvalidHandle;
  if (size_bytes == 0) return kInvalidValue;
  *address = reinterpret_cast<uintptr_t>(AllocateIn(*call, size_bytes, true).data());
  return kSuccess;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  FAKE_CALL(call, "cuMemFreeAsync", Needs::kContext);
  const MutexLock lock(call->mutex);
  Queue* const queue = call->Find(stream);
  const auto found = call->allocations.find(Pointer(address));
  if (queue == nullptr || found == call->allocations.end() || found->second.is_given_back) {
    call->Note("memory that is not allocated was freed");
    return kInvalidValue;
  }
  found->second.is_given_back = true;
  queue->work.push_back({.freed = found->first});
  return kSuccess;
}

CUresult cuMemHostRegister_v2(void* memory, size_t size_bytes, unsigned flags) {
  FAKE_CALL(call, "cuMemHostRegister", Needs::kContext);
  const MutexLock lock(call->mutex);
  const auto* const begin = static_cast<const std::byte*>(memory);
  const bool is_read_only = (flags & kRegisterReadOnly) != 0;
  if (is_read_only && !call->options.registers_read_only) return kNotSupported;
  if (size_bytes == 0 || size_bytes > call->options.register_bytes_max) return kInvalidValue;
  if (!IsMapped(begin, size_bytes, !is_read_only)) return kInvalidValue;
  const auto next = call->registered.upper_bound(begin);
  const bool overlaps = Holding(call->registered, begin, kSizeOf) != call->registered.end() ||
                        (next != call->registered.end() && next->first < begin + size_bytes);
  if (overlaps) return kAlreadyRegistered;
  call->registered[begin] = {.size_bytes = size_bytes, .is_read_only = is_read_only};
  return kSuccess;
}

CUresult cuMemHostUnregister(void* memory) {
  FAKE_CALL(call, "cuMemHostUnregister", Needs::kContext);
  const MutexLock lock(call->mutex);
  const auto found = call->registered.find(static_cast<const std::byte*>(memory));
  if (found == call->registered.end()) return kNotRegistered;
  if (call->IsInUse(found->first, found->second.size_bytes)) {
    call->Note("memory was unregistered that copies under way use");
  }
  call->registered.erase(found);
  return kSuccess;
}

// ------------------------------------------------------------------------ what Python's tests call

extern "C" {

// torch computes on the processor, and knows nothing of our streams: what is on the default stream is done
// at once, other streams are late.
void fake_cuda_start(int registers_read_only) {
  FakeCuda::Start({.registers_read_only = registers_read_only != 0,
                   .is_late_with_pageable = true,
                   .is_default_stream_late = false});
}
int fake_cuda_mistakes() { return static_cast<int>(FakeCuda::mistakes().size()); }
int fake_cuda_registrations() { return static_cast<int>(FakeCuda::registrations().size()); }
void fake_cuda_fail_copy(int copy) { FakeCuda::FailCopy(static_cast<size_t>(copy)); }
}
