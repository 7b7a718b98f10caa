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

// By the bytes that they keep in flight.
constexpr std::array kLoads = {
    Load{256 * kKiB, 1}, Load{kMiB, 1},  Load{256 * kKiB, 8}, Load{kMiB, 4},  Load{256 * kKiB, 32},
    Load{kSlotBytes, 1}, Load{kMiB, 16}, Load{8 * kMiB, 2},   Load{kMiB, 32}, Load{8 * kMiB, 4}};
constexpr Load kAlone{kMiB, 1};
constexpr uint64_t kMemoryBytes = 32 * kMiB;

// Shares of a path's time: the first writes, each load, the rates of writes and of both.
constexpr int kShareFirst = 4;
constexpr int kShareRate = 3;
constexpr int kShares = kShareFirst + static_cast<int>(kLoads.size()) + 2 * kShareRate;

static_assert(std::ranges::all_of(kLoads, [](const Load& load) {
  return load.depth <= kSlotsMin && load.bytes() <= kMemoryBytes;
}));

enum class Mode : uint8_t { kRead, kWrite, kMixed };

class Prober {
 public:
  Prober(Volume& volume, IoEngine& engine) : volume_(volume), engine_(engine) {
    (void)engine_.RegisterBuffer(memory_.bytes());  // speed alone
  }
  ~Prober() { engine_.UnregisterBuffer(memory_.bytes()); }
  Prober(const Prober&) = delete;
  Prober& operator=(const Prober&) = delete;

  absl::StatusOr<std::optional<PathRates>> Probe(uint32_t path, Clock::duration limit) {
    SlotMap free = volume_.free_slots();
    slots_.clear();
    while (slots_.size() < kSlotsMax) {
      const std::optional<Slot> slot = free.AllocateOn(path, kSlotBytes);
      if (!slot) break;
      slots_.push_back({.slot = *slot});
    }
    if (slots_.size() < kSlotsMin) return std::nullopt;
    const Clock::duration share = limit / kShares;
    // What was never written would be read without the drive.
    RETURN_IF_ERROR(WriteFirst(Clock::now() + kShareFirst * share));
    PathRates rates;
    std::array<double, kLoads.size()> reads{};
    for (size_t i = 0; i < kLoads.size(); ++i) {
      ASSIGN_OR_RETURN(reads[i], Run(Mode::kRead, kLoads[i], share));
      if (kLoads[i].request_bytes == kAlone.request_bytes && kLoads[i].depth == kAlone.depth) {
        rates.read_seconds = static_cast<double>(kAlone.request_bytes) / reads[i];
      }
    }
    rates.read = *std::ranges::max_element(reads);
    const auto enough = static_cast<size_t>(
        std::ranges::find_if(reads, [&](double rate) { return rate >= kOfBest * rates.read; }) -
        reads.begin());
    rates.request_bytes = kLoads[enough].request_bytes;
    rates.depth = kLoads[enough].depth;
    ASSIGN_OR_RETURN(rates.write, Run(Mode::kWrite, kLoads[enough], kShareRate * share));
    const Load both{rates.request_bytes, std::max(rates.depth, uint32_t{2})};
    ASSIGN_OR_RETURN(rates.mixed, Run(Mode::kMixed, both, kShareRate * share));
    return rates;
  }

 private:
  struct Place {
    Slot slot;
    bool is_busy = false;
  };
  struct InFlight {
    size_t place = 0;
    bool writes = false;
  };

  // Every slot, or as many as there is time for.
  absl::Status WriteFirst(Clock::time_point end) {
    size_t written = 0;
    for (; written < slots_.size(); ++written) {
      if (written >= kSlotsMin && Clock::now() > end) break;
      RETURN_IF_ERROR(volume_.Write(slots_[written].slot, memory_.bytes().first(kSlotBytes), 0));
      ASSIGN_OR_RETURN(const std::vector<uint64_t> done, Wait());
    }
    slots_.resize(written);
    return absl::OkStatus();
  }

  // Bytes a second, with always so many requests in flight.
  absl::StatusOr<double> Run(Mode mode, Load load, Clock::duration time) {
    std::vector<InFlight> flights(load.depth);
    const Clock::time_point began = Clock::now();
    uint64_t ended = 0;
    uint32_t in_flight = 0;
    const auto begin = [&](uint32_t number) -> absl::Status {
      const bool writes = mode == Mode::kWrite || (mode == Mode::kMixed && !flights[number].writes);
      const size_t place = AllocatePlace();
      flights[number] = {.place = place, .writes = writes};
      ++in_flight;
      const std::span<std::byte> bytes =
          memory_.bytes().subspan(number * load.request_bytes, load.request_bytes);
      if (writes) return volume_.Write(slots_[place].slot, bytes, number);
      return volume_.Read(slots_[place].slot, bytes, number);
    };
    for (uint32_t number = 0; number < load.depth; ++number) {
      flights[number].writes = number % 2 == 0;
      RETURN_IF_ERROR(begin(number));
    }
    while (in_flight > 0) {
      ASSIGN_OR_RETURN(const std::vector<uint64_t> done, Wait());
      for (const uint64_t token : done) {
        const auto number = static_cast<uint32_t>(token);
        slots_[flights[number].place].is_busy = false;
        --in_flight;
        ++ended;
        if (Clock::now() - began < time) RETURN_IF_ERROR(begin(number));
      }
    }
    return static_cast<double>(ended * load.request_bytes) / Seconds(Clock::now() - began).count();
  }

  // The next slot that nothing uses: there are as many slots as requests at once.
  size_t AllocatePlace() {
    while (slots_[next_ % slots_.size()].is_busy) ++next_;
    const size_t place = next_++ % slots_.size();
    slots_[place].is_busy = true;
    return place;
  }

  // Tokens of what has ended, one at least. Errors: of the first that failed, when all have ended.
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
  internal::PageBuffer memory_{kMemoryBytes};
  std::vector<Place> slots_;
  size_t next_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<std::optional<PathRates>>> ProbePaths(const VolumeOptions& options,
                                                                 const EngineOptions& engine,
                                                                 std::chrono::nanoseconds limit) {
  ASSIGN_OR_RETURN(const ChosenEngine chosen, CreateIoEngine(engine));
  ASSIGN_OR_RETURN(const std::unique_ptr<Volume> volume, Volume::Open(options, *chosen.engine));
  Prober prober(*volume, *chosen.engine);
  std::vector<std::optional<PathRates>> rates;
  const auto paths = static_cast<uint32_t>(options.paths.size());
  for (uint32_t path = 0; path < paths; ++path) {
    ASSIGN_OR_RETURN(const std::optional<PathRates> one, prober.Probe(path, limit / paths));
    rates.push_back(one);
  }
  return rates;
}

}  // namespace forebay::nvme
