// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a GPU: a shared object with the real symbols. Nothing happens before it must: work
// runs when its stream is synchronised, when an event behind it has been looked at a few times, or, with a
// seed, in any order that streams and events allow. Memory of the device is the host's, full of poison
// until it is written and again once it is freed. It is stricter than the hardware: what CUDA leaves
// undefined is an error or a mistake that mistakes() names. Every call can fail.
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
    size_t memory_bytes = size_t{1} << 30;  // of a device
    bool registers_read_only = true;
    bool has_memory_pools = true;
    int looks_until_done = 10;           // queries of an event
    bool is_late_with_pageable = false;  // copies of unregistered memory run late; in CUDA at once
    bool is_default_stream_late = true;
    std::optional<uint64_t> seed = {};  // of the order of work; none: as late as possible
    // If set, work runs as early as possible. Bit i makes the i-th created stream late: its work runs only as far as other work
    // waits for it.
    std::optional<uint64_t> late_streams = {};
    size_t register_bytes_max = SIZE_MAX;  // that one call registers
  };

  static std::string Library();  // for dlopen(3)

  // Starts a new driver and forgets the streams, memory and settings of the previous one.
  static void Start(const Options& options);
  static void Start() { Start(Options()); }

  // Memory of the device. After the last reference is dropped the memory counts as reused, like memory of a caching allocator:
  // copies from it yield poison, copies to it have no effect.
  using Memory = std::shared_ptr<const std::span<std::byte>>;
  static Memory Allocate(size_t size_bytes, int device = 0);

  // Events recorded, waits for one and synchronisations that wait for something are counted. The one of
  // this number does nothing: the event is done at once, the stream does not wait.
  static void LeaveOut(size_t wait);
  static size_t waits();
  static void set_counts_waits(bool counts);
  static void set_looks_until_done(int looks);
  // Called before work of a stream runs because somebody has waited for it.
  static void set_before_work(std::function<void()> before_work);

  // The call of this number, counted over all functions but those that name errors, fails with
  // CUDA_ERROR_UNKNOWN and does nothing.
  static void FailCall(size_t call);
  static size_t calls();
  // From this copy on, counted as they run, the device is broken: each call says CUDA_ERROR_ILLEGAL_ADDRESS.
  static void FailCopy(size_t copy);

  // A collective operation. Like a kernel of NCCL it runs once the streams of all ranks have reached it; under the driver's
  // lock.
  struct Collective {
    size_t ranks = 0;
    std::function<void()> run;
    bool is_done = false;
    std::map<size_t, std::weak_ptr<void>> queues;  // by rank: the streams that it is on
    std::vector<bool> has_left;                    // by rank: it has stopped waiting for the others
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
  static std::vector<Registration> registrations();  // that are alive, by address

  struct Leftovers {
    size_t streams = 0;
    size_t events = 0;
    size_t allocations = 0;  // of cuMemAllocAsync
    size_t registrations = 0;
    int contexts = 0;  // times that a primary context is retained

    bool operator==(const Leftovers&) const = default;
  };
  static Leftovers leftovers();
  static std::vector<std::string> mistakes();  // what a caller did that CUDA does not define
};

}  // namespace forebay::testing
