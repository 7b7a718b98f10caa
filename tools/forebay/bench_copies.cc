// SPDX-License-Identifier: Apache-2.0
// Bench copies: measures a GPU's copies from and to the daemon's memory, and the time to register that memory with the
// driver. Each result is compared with the same operation on memory of this process alone.

#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/cuda_device.h"
#include "gpu/device.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/units.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {
namespace {

using gpu::HostAccess;
using gpu::HostRegistration;
using protocol::ErrorId;
using protocol::MakeError;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kSamples = 7;
constexpr uint64_t kParams = uint64_t{1} << 29;  // 1 GiB of 16-bit weights
constexpr uint64_t kBytesPerParam = 2;
constexpr int kPopulateThreads = 8;
// Bytes of one copy call, about as many as a group of a model has.
constexpr uint64_t kCopyBytes = 64 * protocol::kMiB;

double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

class Mapped {
 public:
  // Maps `fd`, or new memory of this process alone if `fd` is -1.
  static absl::StatusOr<std::unique_ptr<Mapped>> Make(int fd, uint64_t size_bytes, int protection) {
    const int flags = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    void* const at = ::mmap(nullptr, size_bytes, protection, flags, fd, 0);
    if (at == MAP_FAILED) return MakeError(ErrorId::kLimit, protocol::ErrnoText("mmap", errno));
    return std::make_unique<Mapped>(std::span(static_cast<std::byte*>(at), size_bytes));
  }
  explicit Mapped(std::span<std::byte> bytes) : bytes_(bytes) {}
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  ~Mapped() { ::munmap(bytes_.data(), bytes_.size()); }

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

enum class Pages : uint8_t { kSmall, kHuge };

std::string_view Name(Pages pages) { return pages == Pages::kSmall ? "4KiB" : "2MiB"; }

// A session's arenas, created like the daemon's and mapped like a client's.
struct Arenas {
  std::unique_ptr<pinned_mem::PinnedArena> weights_arena;
  std::unique_ptr<pinned_mem::PinnedArena> grad_arena;
  std::unique_ptr<Mapped> weights;           // read-only
  std::unique_ptr<Mapped> writable_weights;  // the weights arena, writable
  std::unique_ptr<Mapped> gradients;
};

absl::StatusOr<std::unique_ptr<pinned_mem::PinnedArena>> MakeArena(pinned_mem::Access access,
                                                                   uint64_t size_bytes) {
  return pinned_mem::PinnedArena::Create({.name = "forebay-bench",
                                          .capacity_bytes = size_bytes,
                                          .lock = pinned_mem::LockPolicy::kBestEffort,
                                          .access = access,
                                          .threads = kPopulateThreads});
}

absl::StatusOr<Arenas> MakeArenas(Pages pages, uint64_t size_bytes) {
  // PR_SET_THP_DISABLE also applies to MADV_COLLAPSE: prctl(2).
  ::prctl(PR_SET_THP_DISABLE, pages == Pages::kSmall ? 1 : 0, 0, 0, 0);
  Arenas made;
  ASSIGN_OR_RETURN(made.weights_arena, MakeArena(pinned_mem::Access::kServed, size_bytes));
  ASSIGN_OR_RETURN(made.grad_arena, MakeArena(pinned_mem::Access::kShared, size_bytes));
  ::prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
  ASSIGN_OR_RETURN(const protocol::UniqueFd reader, made.weights_arena->ClientFd());
  ASSIGN_OR_RETURN(const protocol::UniqueFd writer, made.weights_arena->WritableClientFd());
  ASSIGN_OR_RETURN(const protocol::UniqueFd gradients, made.grad_arena->ClientFd());
  ASSIGN_OR_RETURN(made.weights, Mapped::Make(reader.get(), size_bytes, PROT_READ));
  ASSIGN_OR_RETURN(made.writable_weights,
                   Mapped::Make(writer.get(), size_bytes, PROT_READ | PROT_WRITE));
  ASSIGN_OR_RETURN(made.gradients,
                   Mapped::Make(gradients.get(), size_bytes, PROT_READ | PROT_WRITE));
  return made;
}

// A way to register the mapped weights with the GPU driver, from the ways that DESIGN compares.
struct Way {
  std::string_view name;
  HostAccess access;
  bool made_read_only;  // the pages become read-only after the registration
  const Mapped& memory;
};

absl::StatusOr<std::unique_ptr<HostRegistration>> Register(gpu::Device& device, const Way& way) {
  const std::span<std::byte> bytes = way.memory.bytes();
  ::mprotect(bytes.data(), bytes.size(),
             way.access == HostAccess::kRead ? PROT_READ : PROT_READ | PROT_WRITE);
  auto made = device.Register(bytes, way.access);
  if (made.ok() && way.made_read_only) ::mprotect(bytes.data(), bytes.size(), PROT_READ);
  return made;
}

absl::StatusOr<Sample> TimeRegistration(gpu::Device& device, const Way& way) {
  const Clock::time_point began = Clock::now();
  RETURN_IF_ERROR(Register(device, way).status());
  const double gib =
      static_cast<double>(way.memory.bytes().size()) / static_cast<double>(protocol::kGiB);
  return Sample{.value = 1e3 * Seconds(Clock::now() - began) / gib};
}

enum class Direction : uint8_t { kToDevice, kFromDevice, kBoth };

std::string_view Name(Direction direction) {
  constexpr std::array<std::string_view, 3> kNames = {"to_device", "from_device", "both"};
  return kNames[static_cast<size_t>(direction)];
}

// Copies between registered host memory and device memory.
class Copies {
 public:
  static absl::StatusOr<std::unique_ptr<Copies>> Make(gpu::Device& device, uint64_t size_bytes) {
    auto made = std::make_unique<Copies>();
    for (auto* stream : {&made->up_, &made->down_}) {
      ASSIGN_OR_RETURN(*stream, device.MakeStream());
    }
    for (auto* memory : {&made->to_, &made->from_}) {
      ASSIGN_OR_RETURN(*memory, made->up_->Allocate(size_bytes));
    }
    RETURN_IF_ERROR(made->up_->Synchronize());
    return made;
  }
  Copies() = default;
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  ~Copies() {
    if (down_ != nullptr) down_->Synchronize().IgnoreError();
  }

  // GB/s of all bytes that were copied.
  absl::StatusOr<Sample> Time(Direction direction, std::span<const std::byte> weights,
                              std::span<std::byte> gradients) {
    const Clock::time_point began = Clock::now();
    uint64_t copied_bytes = 0;
    for (uint64_t at = 0; at < weights.size(); at += kCopyBytes) {
      const uint64_t bytes = std::min(kCopyBytes, weights.size() - at);
      if (direction != Direction::kFromDevice) {
        RETURN_IF_ERROR(up_->Copy(to_.bytes().subspan(at, bytes), weights.subspan(at, bytes)));
        copied_bytes += bytes;
      }
      if (direction != Direction::kToDevice) {
        RETURN_IF_ERROR(
            down_->Copy(gradients.subspan(at, bytes), from_.bytes().subspan(at, bytes)));
        copied_bytes += bytes;
      }
    }
    RETURN_IF_ERROR(up_->Synchronize());
    RETURN_IF_ERROR(down_->Synchronize());
    return Sample{.value = static_cast<double>(copied_bytes) / Seconds(Clock::now() - began) /
                           protocol::kGb};
  }

  // Checks that bytes copied to the device and back are unchanged.
  absl::Status Check(std::span<const std::byte> weights, std::span<std::byte> gradients) {
    RETURN_IF_ERROR(up_->Copy(from_.bytes(), weights));
    RETURN_IF_ERROR(up_->Synchronize());
    RETURN_IF_ERROR(down_->Copy(gradients, from_.bytes()));
    RETURN_IF_ERROR(down_->Synchronize());
    if (std::ranges::equal(weights, gradients)) return absl::OkStatus();
    return MakeError(ErrorId::kInternal, "what came back from the device differs");
  }

 private:
  std::unique_ptr<gpu::Stream> up_;
  std::unique_ptr<gpu::Stream> down_;
  gpu::DeviceMemory to_;
  gpu::DeviceMemory from_;
};

// Memory of this process alone. Copies from and to it are the limit.
struct OwnMemory {
  std::unique_ptr<Mapped> weights;
  std::unique_ptr<Mapped> gradients;
};

absl::StatusOr<OwnMemory> MakeOwnMemory(uint64_t size_bytes) {
  OwnMemory own;
  for (auto* memory : {&own.weights, &own.gradients}) {
    ASSIGN_OR_RETURN(*memory, Mapped::Make(-1, size_bytes, PROT_READ | PROT_WRITE));
    const std::span<std::byte> bytes = (*memory)->bytes();
    ::madvise(bytes.data(), bytes.size(), MADV_HUGEPAGE);
    std::ranges::fill(bytes, std::byte{1});
  }
  return own;
}

// Fills each 8-byte word with a hash of its index, so that no two pages are equal.
void Fill(std::span<std::byte> bytes) {
  auto* const words = reinterpret_cast<uint64_t*>(bytes.data());
  for (uint64_t i = 0; i < bytes.size() / sizeof(uint64_t); ++i) {
    words[i] = i * 0x9E3779B97F4A7C15U;  // 2^64 over the golden ratio
  }
}

class CopiesBench {
 public:
  CopiesBench(gpu::Device& device, uint32_t samples, const Report& report)
      : device_(device), samples_(samples), report_(report) {}

  absl::Status Run(Pages pages, uint64_t size_bytes) {
    ASSIGN_OR_RETURN(const Arenas arenas, MakeArenas(pages, size_bytes));
    ASSIGN_OR_RETURN(const OwnMemory own, MakeOwnMemory(size_bytes));
    Fill(arenas.weights_arena->bytes());
    huge_share_ =
        static_cast<double>(arenas.weights_arena->huge_bytes()) / static_cast<double>(size_bytes);
    const Way own_weights{"own", HostAccess::kReadWrite, false, *own.weights};
    const std::array ways = {
        Way{"read_only", HostAccess::kRead, false, *arenas.weights},
        Way{"made_read_only", HostAccess::kReadWrite, true, *arenas.writable_weights}};
    const Way* taken = nullptr;
    for (const Way& way : ways) {
      const absl::Status status = Registration(pages, way, own_weights);
      if (status.ok() && taken == nullptr) taken = &way;
      if (status.ok()) continue;
      if (protocol::IdOf(status) != ErrorId::kUnsupported) return status;
      protocol::PrintError(status);
    }
    if (taken == nullptr) {
      return MakeError(ErrorId::kUnsupported, "the driver registers the weights in no way",
                       "sessions copy through a ring of 16 MiB: docs/reports/gpu.md");
    }
    return Rates(pages, *taken, arenas, own_weights, own);
  }

 private:
  absl::Status Registration(Pages pages, const Way& way, const Way& own) {
    ASSIGN_OR_RETURN(BenchResult result,
                     MeasureCase(
                         {.bench = "copies",
                          .name = absl::StrCat("copies/register/way=", std::string(way.name),
                                               "/pages=", std::string(Name(pages))),
                          .unit = "ms/GiB",
                          .limit_what = "to register memory of the process's own",
                          .measure = Measure::kTime},
                         samples_, [&] { return TimeRegistration(device_, way); },
                         [&] { return TimeRegistration(device_, own); }));
    result.more["huge_page_share"] = huge_share_;
    return report_(result);
  }

  absl::Status Rates(Pages pages, const Way& way, const Arenas& arenas, const Way& own_weights,
                     const OwnMemory& own) {
    const Way gradients{"", HostAccess::kReadWrite, false, *arenas.gradients};
    const Way own_gradients{"", HostAccess::kReadWrite, false, *own.gradients};
    std::vector<std::unique_ptr<HostRegistration>> registrations;
    for (const Way* one : {&way, &gradients, &own_weights, &own_gradients}) {
      ASSIGN_OR_RETURN(registrations.emplace_back(), Register(device_, *one));
    }
    const std::span<const std::byte> weights = way.memory.bytes();
    ASSIGN_OR_RETURN(const std::unique_ptr<Copies> copies, Copies::Make(device_, weights.size()));
    RETURN_IF_ERROR(copies->Check(weights, arenas.gradients->bytes()));
    for (const Direction direction :
         {Direction::kToDevice, Direction::kFromDevice, Direction::kBoth}) {
      ASSIGN_OR_RETURN(
          BenchResult result,
          MeasureCase(
              {.bench = "copies",
               .name = absl::StrCat("copies/dir=", std::string(Name(direction)),
                                    "/pages=", std::string(Name(pages))),
               .unit = "GB/s",
               .limit_what = "the same with memory of the process's own"},
              samples_, [&] { return copies->Time(direction, weights, arenas.gradients->bytes()); },
              [&] {
                return copies->Time(direction, own.weights->bytes(), own.gradients->bytes());
              }));
      result.more["huge_page_share"] = huge_share_;
      RETURN_IF_ERROR(report_(result));
    }
    return absl::OkStatus();
  }

  gpu::Device& device_;
  const uint32_t samples_;
  const Report& report_;
  double huge_share_ = 0;
};

}  // namespace

absl::Status BenchCopies(const BenchOptions& options, const Report& report) {
  gpu::CudaDevice::Options device_options;
  if (!options.driver.empty()) device_options.soname = options.driver;
  ASSIGN_OR_RETURN(const std::shared_ptr<gpu::CudaDevice> device,
                   gpu::CudaDevice::Create(device_options));
  const uint64_t params = options.params == 0 ? kParams : options.params;
  const uint64_t size_bytes = protocol::RoundUp(params * kBytesPerParam, protocol::kHugePageBytes);
  CopiesBench bench(*device, options.samples == 0 ? kSamples : options.samples, report);
  for (const Pages pages : {Pages::kSmall, Pages::kHuge}) {
    RETURN_IF_ERROR(bench.Run(pages, size_bytes));
  }
  return absl::OkStatus();
}

}  // namespace forebay::tools
