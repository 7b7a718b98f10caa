// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a GPU: a shared object with the real symbols. Work is delayed: it runs once its stream is synchronised
// or a later event was queried a few times, or, with a seed, in any order that streams and events allow. Device memory is host
// memory, filled with poison before the first write and after the free. The fake is stricter than hardware: use that CUDA
// leaves undefined is an error or a mistake that mistakes() lists. Every call can fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace forebay::testing {

// The driver of this process. Threads: any.
class FakeCuda {
 public:
  static constexpr std::byte kPoison{0xA5};

  struct Options {
    int devices = 1;
    int version = 12040;
    size_t memory_bytes = size_t{1} << 30;  // memory of one device
    bool registers_read_only = true;
    bool has_memory_pools = true;
    int looks_until_done = 10;           // queries until an event is done
    bool is_late_with_pageable = false;  // copies of unregistered memory run late, unlike CUDA's
    bool is_default_stream_late = true;
    // Seeds the order of work; nullopt: work runs as late as possible.
    std::optional<uint64_t> seed = {};
    // If set, work runs as early as possible. Bit i makes the i-th created stream late: its work runs only as far as other work
    // waits for it.
    std::optional<uint64_t> late_streams = {};
    size_t register_bytes_max = SIZE_MAX;  // maximum bytes of one registration
  };

  static std::string Library();  // for dlopen(3)

  // Starts a new driver and forgets the streams, memory and settings of the previous one.
  static void Start(const Options& options);
  static void Start() { Start(Options()); }

  // Memory of the device. After the last reference is dropped the memory counts as reused, like memory of a caching allocator:
  // copies from it yield poison, copies to it have no effect.
  using Memory = std::shared_ptr<const std::span<std::byte>>;
  static Memory Allocate(size_t size_bytes, int device = 0);

  // Skips synchronisation number `wait`, counted over event records, waits for an event, and synchronisations with pending
  // work. A skipped record counts as done at once; a skipped wait does not block.
  static void LeaveOut(size_t wait);
  static size_t waits();
  static void set_counts_waits(bool counts);
  static void set_looks_until_done(int looks);
  // Sets a function that runs before work of a stream that a caller has waited for.
  static void set_before_work(std::function<void()> before_work);

  // Makes call number `call` fail with CUDA_ERROR_UNKNOWN without an effect. Counts all functions except those that name
  // errors.
  static void FailCall(size_t call);
  static size_t calls();
  // Breaks the device at copy number `copy`, counted as copies run. Every later call fails with CUDA_ERROR_ILLEGAL_ADDRESS.
  static void FailCopy(size_t copy);

  // A collective operation. Like a kernel of NCCL it runs once the streams of all ranks have reached it; under the driver's
  // lock.
  struct Collective {
    size_t ranks = 0;
    std::function<void()> run;
    bool is_done = false;
    std::map<size_t, std::weak_ptr<void>> queues;  // by rank: the stream of the collective
    std::vector<bool> has_left;  // by rank: true once the rank has stopped waiting for other ranks
  };
  // Puts the collective on a stream as the part of rank `rank`. Calls `update` first, under the lock.
  static void Enqueue(void* stream, std::shared_ptr<Collective> collective, size_t rank,
                      const std::function<void()>& update);
  // Calls `act` under the lock, then wakes all waiting threads.
  static void Change(const std::function<void()>& act);
  static bool IsFreed(const std::byte* at);             // under the lock
  static void NoteMistake(const std::string& mistake);  // under the lock

  struct Registration {
    const std::byte* begin;
    size_t size_bytes;
    bool is_read_only;
  };
  static std::vector<Registration> registrations();  // live registrations, by address

  struct Leftovers {
    size_t streams = 0;
    size_t events = 0;
    size_t allocations = 0;  // of cuMemAllocAsync
    size_t registrations = 0;
    int contexts = 0;  // times that a primary context is retained

    bool operator==(const Leftovers&) const = default;
  };
  static Leftovers leftovers();
  // Mistakes of the caller, which CUDA leaves undefined.
  static std::vector<std::string> mistakes();
};

}  // namespace forebay::testing
