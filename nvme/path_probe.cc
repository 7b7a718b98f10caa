// SPDX-License-Identifier: Apache-2.0
#include "nvme/path_probe.h"

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>

#include "nvme/internal/page_buffer.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::nvme {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
using protocol::kKiB;
using protocol::kMiB;

constexpr uint64_t kSlotBytes = 8 * kMiB;
constexpr size_t kSlotsMin = 32;
constexpr size_t kSlotsMax = 64;
constexpr double kOfBest = 0.97;

struct Load {
  uint64_t request_bytes;
  uint32_t depth;

  constexpr uint64_t bytes() const { return request_bytes * depth; }
};

// Loads to measure, in ascending order of bytes in flight.
constexpr std::array kLoads = {
    Load{256 * kKiB, 1}, Load{kMiB, 1},  Load{256 * kKiB, 8}, Load{kMiB, 4},  Load{256 * kKiB, 32},
    Load{kSlotBytes, 1}, Load{kMiB, 16}, Load{8 * kMiB, 2},   Load{kMiB, 32}, Load{8 * kMiB, 4}};
constexpr uint64_t kAloneBytes = kMiB;
constexpr uint64_t kMemoryBytes = 32 * kMiB;
// Loads of the first writes of slots, in this order. A slow path gets only the smaller writes.
constexpr std::array kFirstWrites = {Load{256 * kKiB, 1}, Load{256 * kKiB, 8}, Load{kMiB, 4},
                                     Load{kSlotBytes, 2}};

// Shares of a path's time: for the first writes, and for the write and the mixed rate. Each load has one share for reads.
constexpr int kShareFirst = 4;
constexpr int kShareRate = 3;
constexpr int kShares = kShareFirst + static_cast<int>(kLoads.size()) + 2 * kShareRate;

static_assert(std::ranges::all_of(kLoads, [](const Load& load) {
  return load.depth <= kSlotsMin && load.bytes() <= kMemoryBytes;
}));

// Kind of the requests. kFirst: writes each slot once.
enum class Mode : uint8_t { kFirst, kRead, kWrite, kMixed };

// Measures the rates of paths. Does not start requests that would end too late at the rate measured so far: on a slow path only
// small loads are measured.
class Prober {
 public:
  Prober(Volume& volume, IoEngine& engine, const ProbeClock& now)
      : volume_(volume), engine_(engine), now_(now) {
    (void)engine_.RegisterBuffer(memory_.bytes());  // only for speed
  }
  ~Prober() { engine_.UnregisterBuffer(memory_.bytes()); }
  Prober(const Prober&) = delete;
  Prober& operator=(const Prober&) = delete;

  absl::StatusOr<std::optional<PathRates>> Probe(uint32_t path, Clock::time_point end) {
    AllocateSlots(path);
    if (slots_.size() < kSlotsMin) return std::nullopt;
    end_ = end;
    shares_left_ = kShares;
    read_rate_ = write_rate_ = 0;
    // Writes the slots before they are read: a read of a slot that was never written would not reach the drive.
    RETURN_IF_ERROR(WriteFirst());
    PathRates rates;
    std::array<double, kLoads.size()> reads{};
    for (size_t i = 0; i < kLoads.size(); ++i) {
      ASSIGN_OR_RETURN(reads[i], Run(Mode::kRead, kLoads[i], Share(1)));
      if (reads[i] == 0 || kLoads[i].depth > 1 || kLoads[i].request_bytes > kAloneBytes) continue;
      rates.read_seconds = static_cast<double>(kAloneBytes) / reads[i];
    }
    rates.read = *std::ranges::max_element(reads);
    if (rates.read == 0) return std::nullopt;
    const auto enough = static_cast<size_t>(
        std::ranges::find_if(reads, [&](double rate) { return rate >= kOfBest * rates.read; }) -
        reads.begin());
    rates.request_bytes = kLoads[enough].request_bytes;
    rates.depth = kLoads[enough].depth;
    ASSIGN_OR_RETURN(rates.write, RunUpTo(Mode::kWrite, enough));
    ASSIGN_OR_RETURN(rates.mixed, RunUpTo(Mode::kMixed, enough));
    if (rates.write == 0 || rates.mixed == 0) return std::nullopt;
    return rates;
  }

 private:
  struct Place {
    Slot slot;
    uint64_t written_bytes = 0;  // bytes written from the start of the slot
    bool is_busy = false;
  };
  struct InFlight {
    size_t place = 0;
    bool writes = false;
  };

  void AllocateSlots(uint32_t path) {
    SlotMap free = volume_.free_slots();
    slots_.clear();
    while (slots_.size() < kSlotsMax) {
      const std::optional<Slot> slot = free.AllocateOn(path, kSlotBytes);
      if (!slot) break;
      slots_.push_back({.slot = *slot});
    }
  }

  // Returns `shares` shares of the remaining time, and takes them from the remaining shares.
  Clock::duration Share(int shares) {
    const Clock::duration left = std::max(end_ - now_(), Clock::duration::zero());
    const Clock::duration share = left * shares / shares_left_;
    shares_left_ -= shares;
    return share;
  }

  // Writes the start of every slot, or of as many slots as the time allows.
  absl::Status WriteFirst() {
    const Clock::duration share = Share(kShareFirst);
    const Clock::time_point end = now_() + share;
    for (const Load& load : kFirstWrites) {
      // The rate of the path is unknown before the first write.
      const Clock::duration time = write_rate_ == 0 ? share / 2 : end - now_();
      RETURN_IF_ERROR(Run(Mode::kFirst, load, time, slots_.size()).status());
    }
    return absl::OkStatus();
  }

  // Measures the rate with the largest load, up to `load_index`, for which the time suffices. Returns 0 if the time suffices
  // for no load.
  absl::StatusOr<double> RunUpTo(Mode mode, size_t load_index) {
    const Clock::duration time = Share(kShareRate);
    for (size_t i = load_index + 1; i-- > 0;) {
      Load load = kLoads[i];
      if (mode == Mode::kMixed) load.depth = std::max(load.depth, uint32_t{2});
      ASSIGN_OR_RETURN(const double rate, Run(mode, load, time));
      if (rate > 0) return rate;
    }
    return 0.0;
  }

  // Returns the bytes a second that the mode is expected to reach, from the rates measured so far; 0 if no rate is known.
  double ExpectedRate(Mode mode) const {
    if (mode == Mode::kFirst || mode == Mode::kWrite || read_rate_ == 0) return write_rate_;
    return mode == Mode::kRead ? read_rate_ : std::min(read_rate_, write_rate_);
  }

  // Returns the rate in bytes a second with load.depth requests in flight until the time is over or `requests_max` requests
  // have begun. Returns 0 if the time does not suffice, or if too few slots were written so far.
  absl::StatusOr<double> Run(Mode mode, Load load, Clock::duration time,
                             uint64_t requests_max = UINT64_MAX) {
    places_ = slots_.size();
    if (mode != Mode::kFirst) {
      places_ = static_cast<size_t>(std::ranges::count_if(
          slots_, [&](const Place& place) { return place.written_bytes >= load.request_bytes; }));
    }
    const double expected_rate = ExpectedRate(mode);
    const Seconds drain(expected_rate == 0 ? 0 : static_cast<double>(load.bytes()) / expected_rate);
    if (places_ < load.depth || time.count() <= 0 || drain > time) return 0.0;
    next_ = mode == Mode::kFirst ? 0 : next_;
    std::vector<InFlight> flights(load.depth);
    const Clock::time_point began = now_();
    uint64_t begun = 0;
    uint64_t ended = 0;
    const auto begin = [&](uint32_t number) -> absl::Status {
      const bool writes = mode == Mode::kMixed ? !flights[number].writes : mode != Mode::kRead;
      const size_t place = AllocatePlace();
      flights[number] = {.place = place, .writes = writes};
      ++begun;
      const std::span<std::byte> bytes =
          memory_.bytes().subspan(number * load.request_bytes, load.request_bytes);
      if (writes) return volume_.Write(slots_[place].slot, bytes, number);
      return volume_.Read(slots_[place].slot, bytes, number);
    };
    for (uint32_t number = 0; number < load.depth && begun < requests_max; ++number) {
      flights[number].writes = number % 2 == 0;
      RETURN_IF_ERROR(begin(number));
    }
    while (ended < begun) {
      ASSIGN_OR_RETURN(const std::vector<uint64_t> done, Wait());
      for (const uint64_t token : done) {
        const auto number = static_cast<uint32_t>(token);
        Place& place = slots_[flights[number].place];
        place.is_busy = false;
        if (mode == Mode::kFirst) place.written_bytes = load.request_bytes;
        ++ended;
        if (begun < requests_max && now_() - began < time - drain) RETURN_IF_ERROR(begin(number));
      }
    }
    const double rate =
        static_cast<double>(ended * load.request_bytes) / Seconds(now_() - began).count();
    if (mode == Mode::kRead) read_rate_ = rate;
    if (mode == Mode::kFirst || mode == Mode::kWrite) write_rate_ = rate;
    return rate;
  }

  // Returns the next idle slot of the first `places_`. At least one is idle, because `places_` is at least the number of
  // requests at once.
  size_t AllocatePlace() {
    while (slots_[next_ % places_].is_busy) ++next_;
    const size_t place = next_++ % places_;
    slots_[place].is_busy = true;
    return place;
  }

  // Waits until at least one request has ended. Returns the tokens of the ended requests. If a request failed, waits for all
  // requests and returns the first error.
  absl::StatusOr<std::vector<uint64_t>> Wait() {
    std::vector<Finished> finished;
    std::array<Completion, 64> completions;
    absl::Status failed;
    std::vector<uint64_t> tokens;
    while (tokens.empty() || (!failed.ok() && volume_.requests_in_flight() > 0)) {
      ASSIGN_OR_RETURN(const size_t count, engine_.Wait(IoEngine::kForever, completions));
      finished.clear();
      for (size_t i = 0; i < count; ++i) volume_.OnCompletion(completions[i], finished);
      for (const Finished& one : finished) {
        failed.Update(one.status);
        tokens.push_back(one.token);
      }
    }
    RETURN_IF_ERROR(failed);
    return tokens;
  }

  Volume& volume_;
  IoEngine& engine_;
  const ProbeClock& now_;
  internal::PageBuffer memory_{kMemoryBytes};
  Clock::time_point end_;
  int shares_left_ = 0;
  double read_rate_ = 0;
  double write_rate_ = 0;
  std::vector<Place> slots_;
  size_t places_ = 0;
  size_t next_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<std::optional<PathRates>>> ProbeVolume(Volume& volume, IoEngine& engine,
                                                                  Clock::time_point end,
                                                                  const ProbeClock& now) {
  Prober prober(volume, engine, now);
  std::vector<std::optional<PathRates>> rates;
  const uint32_t paths = volume.free_slots().paths();
  for (uint32_t path = 0; path < paths; ++path) {
    const Clock::time_point began = now();
    const Clock::duration share = std::max(end - began, Clock::duration::zero()) / (paths - path);
    ASSIGN_OR_RETURN(const std::optional<PathRates> one, prober.Probe(path, began + share));
    rates.push_back(one);
  }
  return rates;
}

absl::StatusOr<std::vector<std::optional<PathRates>>> ProbePaths(const VolumeOptions& options,
                                                                 const EngineOptions& engine,
                                                                 std::chrono::nanoseconds limit) {
  const Clock::time_point end = Clock::now() + limit;
  ASSIGN_OR_RETURN(const ChosenEngine chosen, CreateIoEngine(engine));
  ASSIGN_OR_RETURN(const std::unique_ptr<Volume> volume, Volume::Open(options, *chosen.engine));
  return ProbeVolume(*volume, *chosen.engine, end, [] { return Clock::now(); });
}

}  // namespace forebay::nvme
