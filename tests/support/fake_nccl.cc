// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "gpu/internal/nccl_types.h"
#include "protocol/float16.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/sanitized.h"

namespace forebay::testing {
namespace {

using gpu::nccl::ncclDataType_t;

enum class Operation : uint8_t { kAllGather, kReduceScatter, kAllReduce };

// Buffers that one rank passed to a collective.
struct Part {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
};

// A collective and the arguments of its ranks.
struct Pending {
  Operation operation = Operation::kAllGather;
  size_t count = 0;
  ncclDataType_t type = gpu::nccl::kInt8;
  int reduction = 0;
  std::vector<Part> parts;
  std::shared_ptr<FakeCuda::Collective> collective;
};

// The ranks that joined with one id.
struct Clique {
  size_t size = 0;
  std::set<int> started;
  std::vector<std::shared_ptr<Pending>> collectives;  // in the order of the calls
};

struct State {
  int version = 22105;
  uint64_t next_id = 1;
  std::map<uint64_t, std::shared_ptr<Clique>> cliques;
  std::map<ncclComm*, std::shared_ptr<ncclComm>> communicators;
  size_t calls = 0;
  std::optional<size_t> failing_call;
};

State state;  // NOLINT: the library's own. Under the driver's lock.

size_t WidthOf(ncclDataType_t type) {
  if (type == gpu::nccl::kFloat32) return 4;
  return type == gpu::nccl::kInt8 ? 1 : 2;
}

float Widen(ncclDataType_t type, const std::byte* at) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, WidthOf(type));
  if (type == gpu::nccl::kFloat16) return protocol::WidenFp16(static_cast<uint16_t>(bits));
  if (type == gpu::nccl::kBFloat16) bits <<= 16;
  return std::bit_cast<float>(bits);
}

void Narrow(ncclDataType_t type, float value, std::byte* to) {
  auto bits = std::bit_cast<uint32_t>(value);
  if (type == gpu::nccl::kFloat16) bits = protocol::RoundToFp16(bits);
  if (type == gpu::nccl::kBFloat16) bits = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
  std::memcpy(to, &bits, WidthOf(type));
}

// Reduces `count` elements from `first` on over all ranks. Adds in reverse rank order: NCCL promises no order.
std::vector<std::byte> Reduce(const Pending& pending, size_t first, size_t count) {
  const size_t width = WidthOf(pending.type);
  std::vector<std::byte> out(count * width);
  for (size_t i = 0; i < count; ++i) {
    float sum = 0;
    for (size_t rank = pending.parts.size(); rank-- > 0;) {
      sum += Widen(pending.type, pending.parts[rank].from + (first + i) * width);
    }
    if (pending.reduction == gpu::nccl::kAverage) sum /= static_cast<float>(pending.parts.size());
    Narrow(pending.type, sum, out.data() + i * width);
  }
  return out;
}

void Write(std::byte* to, const std::vector<std::byte>& bytes) {
  if (!FakeCuda::IsFreed(to)) std::ranges::copy(bytes, to);
}

void Run(const Pending& pending) {
  const size_t ranks = pending.parts.size();
  const size_t bytes = pending.count * WidthOf(pending.type);
  const bool reads_freed = std::ranges::any_of(
      pending.parts, [](const Part& part) { return FakeCuda::IsFreed(part.from); });
  std::vector<std::vector<std::byte>> results(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (pending.operation == Operation::kReduceScatter) {
      results[rank] = Reduce(pending, rank * pending.count, pending.count);
    } else if (pending.operation == Operation::kAllReduce) {
      results[rank] = Reduce(pending, 0, pending.count);
    } else {
      for (const Part& part : pending.parts) {
        results[rank].insert(results[rank].end(), part.from, part.from + bytes);
      }
    }
    if (reads_freed) std::ranges::fill(results[rank], FakeCuda::kPoison);
  }
  for (size_t rank = 0; rank < ranks; ++rank) Write(pending.parts[rank].to, results[rank]);
}

}  // namespace
}  // namespace forebay::testing

struct ncclComm {
  std::shared_ptr<forebay::testing::Clique> clique;
  int rank = 0;
  size_t collectives = 0;  // collectives that the rank has begun
  int looks = 0;           // queries until the background call ends
};

namespace forebay::testing {
namespace {

using namespace gpu::nccl;  // NOLINT(google-build-using-namespace): the library's own names

thread_local int group_depth = 0;                                 // NOLINT
thread_local std::vector<std::function<ncclResult_t()>> grouped;  // NOLINT

// Counts a call and calls `act` under the lock.
ncclResult_t Call(const std::function<ncclResult_t()>& act) {
  ncclResult_t result = kSuccess;
  FakeCuda::Change([&] {
    const bool fails = state.failing_call == state.calls;
    ++state.calls;
    result = fails ? kInternalError : act();
  });
  return result;
}

ncclResult_t Enqueue(ncclComm* comm, Operation operation, Part part, size_t count,
                     ncclDataType_t type, int reduction, cudaStream_t stream) {
  std::shared_ptr<Pending> pending;
  bool fits = true;
  FakeCuda::Change([&] {
    Clique& clique = *comm->clique;
    if (comm->collectives == clique.collectives.size()) {
      pending = std::make_shared<Pending>();
      pending->operation = operation;
      pending->count = count;
      pending->type = type;
      pending->reduction = reduction;
      pending->parts.resize(clique.size);
      pending->collective = std::make_shared<FakeCuda::Collective>();
      pending->collective->ranks = clique.size;
      pending->collective->has_left.resize(clique.size);
      pending->collective->run = [weak = std::weak_ptr(pending)] {
        if (const auto all = weak.lock()) Run(*all);
      };
      clique.collectives.push_back(pending);
    }
    pending = clique.collectives[comm->collectives++];
    fits = pending->operation == operation && pending->count == count && pending->type == type;
    if (!fits) FakeCuda::NoteMistake("ranks are at different collectives");
  });
  if (!fits) return kInvalidArgument;
  FakeCuda::Enqueue(stream, pending->collective, static_cast<size_t>(comm->rank),
                    [&] { pending->parts[static_cast<size_t>(comm->rank)] = part; });
  return kSuccess;
}

ncclResult_t Begin(ncclComm* comm, Operation operation, Part part, size_t count,
                   ncclDataType_t type, int reduction, cudaStream_t stream) {
  const ncclResult_t counted = Call([&]() -> ncclResult_t {
    if (!state.communicators.contains(comm)) return kInvalidArgument;
    if (comm->looks == 0) return kSuccess;
    FakeCuda::NoteMistake("a collective while another call goes on in the background");
    return kInvalidUsage;
  });
  if (counted != kSuccess) return counted;
  const auto enqueue = [=] {
    return Enqueue(comm, operation, part, count, type, reduction, stream);
  };
  if (group_depth > 0) {
    grouped.emplace_back(enqueue);
    return kSuccess;
  }
  const ncclResult_t begun = enqueue();
  if (begun != kSuccess) return begun;
  comm->looks = static_cast<int>(comm->collectives % 3);
  return comm->looks == 0 ? kSuccess : kInProgress;
}

}  // namespace

std::string FakeNccl::Library() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<void*>(&FakeNccl::Library), &info);
  return info.dli_fname;
}
std::string FakeNccl::RealLibrary() {
  const std::string library = "libnccl.so.2";
  // The address sanitizer refuses RTLD_DEEPBIND. Later dlopen() calls return this instance.
  if (!kSanitized) ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  return library;
}
void FakeNccl::Start() {
  FakeCuda::Change([] { state = State(); });
}
void FakeNccl::set_version(int version) {
  FakeCuda::Change([&] { state.version = version; });
}
void FakeNccl::FailCall(size_t call) {
  FakeCuda::Change([&] { state.failing_call = call; });
}
size_t FakeNccl::calls() {
  size_t calls = 0;
  FakeCuda::Change([&] { calls = state.calls; });
  return calls;
}
size_t FakeNccl::communicators() {
  size_t count = 0;
  FakeCuda::Change([&] { count = state.communicators.size(); });
  return count;
}

}  // namespace forebay::testing

// ------------------------------------------------------------------------------------- the library

using namespace forebay::testing;    // NOLINT(google-build-using-namespace)
using namespace forebay::gpu::nccl;  // NOLINT(google-build-using-namespace)

#define FOREBAY_NCCL_FUNCTION(name, parameters) ncclResult_t name parameters;
extern "C" {
#include "gpu/internal/nccl_functions.inc"
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);
}
#undef FOREBAY_NCCL_FUNCTION

const char* ncclGetErrorString(ncclResult_t result) {
  return result == kInternalError ? "internal error" : "an error of the fake's";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetVersion(int* version) {
  return Call([&] {
    *version = state.version;
    return kSuccess;
  });
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return Call([&] {
    std::memset(id, 0, sizeof(*id));
    std::memcpy(id, &state.next_id, sizeof(state.next_id));
    ++state.next_id;
    return kSuccess;
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return Call([&]() -> ncclResult_t {
    if (config->magic != kConfigMagic || config->blocking != 0 || rank < 0 || rank >= ranks) {
      return kInvalidArgument;
    }
    uint64_t number = 0;
    std::memcpy(&number, &id, sizeof(number));
    std::shared_ptr<Clique>& clique = state.cliques[number];
    if (clique == nullptr) clique = std::make_shared<Clique>();
    clique->size = static_cast<size_t>(ranks);
    if (!clique->started.insert(rank).second) {
      FakeCuda::NoteMistake("two communicators of one rank");
    }
    auto made = std::make_shared<ncclComm>();
    made->clique = clique;
    made->rank = rank;
    *comm = made.get();
    state.communicators[*comm] = std::move(made);
    return kInProgress;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  return Call([&]() -> ncclResult_t {
    if (!state.communicators.contains(comm)) return kInvalidArgument;
    const bool has_started = comm->clique->started.size() == comm->clique->size;
    *result = has_started && comm->looks == 0 ? kSuccess : kInProgress;
    comm->looks = std::max(comm->looks - 1, 0);
    return kSuccess;
  });
}

namespace {

ncclResult_t End(ncclComm_t comm, bool aborts) {
  return Call([&]() -> ncclResult_t {
    const auto ended = state.communicators.extract(comm);
    if (ended.empty()) {
      FakeCuda::NoteMistake("a communicator that is none was ended");
      return kInvalidArgument;
    }
    const auto rank = static_cast<size_t>(comm->rank);
    for (size_t i = 0; i < comm->collectives; ++i) {
      FakeCuda::Collective& collective = *comm->clique->collectives[i]->collective;
      if (!collective.is_done && !aborts) {
        FakeCuda::NoteMistake("a communicator was destroyed with a collective under way");
      }
      collective.has_left[rank] = true;
    }
    return kSuccess;
  });
}

}  // namespace

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return End(comm, false); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return End(comm, true); }

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return Begin(comm, Operation::kAllGather,
               {static_cast<const std::byte*>(from), static_cast<std::byte*>(to)}, count, type, 0,
               stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  return Begin(comm, Operation::kReduceScatter,
               {static_cast<const std::byte*>(from), static_cast<std::byte*>(to)}, count, type,
               reduction, stream);
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  return Begin(comm, Operation::kAllReduce,
               {static_cast<const std::byte*>(from), static_cast<std::byte*>(to)}, count, type,
               reduction, stream);
}

ncclResult_t ncclGroupStart() {
  const ncclResult_t counted = Call([] { return kSuccess; });
  if (counted == kSuccess) ++group_depth;
  return counted;
}

ncclResult_t ncclGroupEnd() {
  const ncclResult_t counted = Call([] { return kSuccess; });
  if (counted != kSuccess) return counted;
  if (group_depth == 0) return kInvalidUsage;
  if (--group_depth > 0) return kSuccess;
  const auto calls = std::exchange(grouped, {});
  ncclResult_t result = kSuccess;
  for (const auto& call : calls) {
    if (result == kSuccess) result = call();
  }
  return result;
}
