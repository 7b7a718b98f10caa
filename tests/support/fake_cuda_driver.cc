// SPDX-License-Identifier: Apache-2.0
// The symbols of the CUDA driver, over the state of fake_cuda_state.h.

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/support/fake_cuda.h"
#include "tests/support/fake_cuda_state.h"

namespace forebay::testing {
namespace {

enum class Needs : uint8_t { kNothing, kContext };

// One call of a driver function. The constructor decides whether the call fails and runs pending work first.
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
    if (result_ == kSuccess && needs == Needs::kContext && ContextStack().empty()) {
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

  // Queries work: calls `run` under the lock. Returns kNotReady if the work waits for other ranks. The caller does not hold the
  // lock.
  CUresult Look(const std::function<bool()>& run) {
    std::unique_lock<protocol::Mutex> lock(state_->mutex);
    bool has_run = false;
    Run(lock, [&] { has_run = run(); });
    if (state_->is_broken) return kIllegalAddress;
    return has_run ? kSuccess : kNotReady;
  }
  // Waits for work: calls `run` under the lock until it returns true. The caller does not hold the lock.
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

// Returns true if every page of the range is mapped and readable, and also writable if `writable` is set.
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

// Kind of the memory that a copy reads or writes. A range that begins and ends in different memory is kMixed.
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
}  // namespace forebay::testing

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
  static const std::map<CUresult, const char*> kNames = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
      {kUnknown, "CUDA_ERROR_UNKNOWN"}};
  const auto found = kNames.find(error);
  *name = found == kNames.end() ? "CUDA_ERROR" : found->second;
  return kSuccess;
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
  *bytes = call->options.memory_bytes;
  return kSuccess;
}

CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* all_bytes) {
  FAKE_CALL(call, "cuMemGetInfo", Needs::kContext);
  const MutexLock lock(call->mutex);
  *free_bytes = call->FreeBytes();
  *all_bytes = call->options.memory_bytes;
  return kSuccess;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  FAKE_CALL(call, "cuPointerGetAttribute", Needs::kContext);
  const MutexLock lock(call->mutex);
  const auto found = Holding(call->allocations, Pointer(address), kSizeOf);
  // Registered memory is host memory and has no entry either.
  if (found == call->allocations.end()) return kInvalidValue;
  if (attribute == kPointerMemoryType) *static_cast<unsigned*>(value) = kMemoryTypeDevice;
  if (attribute == kPointerDeviceOrdinal) *static_cast<int*>(value) = found->second.device;
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
  ContextStack().push_back(context);
  return kSuccess;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (ContextStack().empty()) return kInvalidContext;  // fails in no other case: it only pops
  *context = ContextStack().back();
  ContextStack().pop_back();
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
  {
    const MutexLock lock(call->mutex);
    Queue* const queue = call->Find(stream);
    if (queue == nullptr || !call->events.contains(event)) return kInvalidHandle;
    const std::shared_ptr<Mark>& mark = event->mark;
    if (mark == nullptr || mark->is_left_out) return kSuccess;
    if (call->IsLeftOut()) return kSuccess;
    queue->work.push_back({.wait = mark});
    if (stream != nullptr || call->options.is_default_stream_late) return kSuccess;
  }
  return call.Wait([&] { return call->RunAll(*call->Find(stream)); });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  FAKE_CALL(call, "cuEventCreate", Needs::kContext);
  const MutexLock lock(call->mutex);
  auto made = std::make_unique<CUevent_st>();
  made->is_timed = flags != kEventDisableTiming;
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
  event->mark->is_left_out = !event->is_timed && call->IsLeftOut();
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

CUresult cuEventElapsedTime(float* ms, CUevent start, CUevent end) {
  FAKE_CALL(call, "cuEventElapsedTime", Needs::kContext);
  const MutexLock lock(call->mutex);
  for (const CUevent event : {start, end}) {
    if (!call->events.contains(event) || !event->is_timed) return kInvalidHandle;
    if (event->mark == nullptr) return kInvalidHandle;
    if (!event->mark->is_done) return kNotReady;
  }
  *ms = std::chrono::duration<float, std::milli>(end->mark->done - start->mark->done).count();
  return kSuccess;
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
  if (size_bytes > call->FreeBytes()) return kOutOfMemory;
  *address = reinterpret_cast<uintptr_t>(
      AllocateIn(*call, size_bytes, true, ContextStack().back()->device).data());
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

// ------------------------------------------------------------------------ calls of the Python tests

extern "C" {

// torch computes on the CPU and does not know the fake's streams: work on the default stream runs at once, work on other
// streams late.
void fake_cuda_start(int registers_read_only) {
  FakeCuda::Start({.registers_read_only = registers_read_only != 0,
                   .is_late_with_pageable = true,
                   .is_default_stream_late = false});
}
int fake_cuda_mistakes() { return static_cast<int>(FakeCuda::mistakes().size()); }
int fake_cuda_registrations() { return static_cast<int>(FakeCuda::registrations().size()); }
void fake_cuda_fail_copy(int copy) { FakeCuda::FailCopy(static_cast<size_t>(copy)); }
}
