// A volume on simulated disks, driven to the end of each call: what the volume's tests share.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/checksum.h"
#include "nvme/internal/protections.h"
#include "nvme/io/io_engine.h"
#include "nvme/volume.h"
#include "protocol/os/status_macros.h"
#include "tests/support/pattern.h"

namespace forebay::nvme {

inline constexpr size_t kBlockBytes = 3 * 4096;  // several sectors and pages

// The content of a block at a step: what the daemon would write, and whose it is.
inline testing::Bytes ContentOf(uint32_t block, uint32_t step) {
  return testing::Pattern(kBlockBytes, /*seed=*/1000 * step + block);
}

inline Identity IdentityOf(uint32_t block, uint32_t step) {
  Identity identity{};
  std::memcpy(identity.data(), &block, sizeof(block));
  std::memcpy(identity.data() + sizeof(block), &step, sizeof(step));
  return identity;
}

inline uint32_t StepOf(const Identity& identity) {
  uint32_t step = 0;
  std::memcpy(&step, identity.data() + sizeof(uint32_t), sizeof(step));
  return step;
}

// Calls the engine until `token` has finished; its status.
inline absl::Status FinishOne(Volume& volume, IoEngine& engine, uint64_t token) {
  constexpr int kWaitsMax = 100000;
  std::array<Completion, 8> completions;
  std::vector<Finished> finished;
  for (int i = 0; i < kWaitsMax; ++i) {
    ASSIGN_OR_RETURN(const size_t count, engine.Wait(std::chrono::seconds(1), completions));
    for (size_t c = 0; c < count; ++c) volume.OnCompletion(completions[c], finished);
    for (const Finished& one : finished) {
      if (one.token == token) return one.status;
    }
  }
  return absl::DeadlineExceededError("the request never ends");
}

inline absl::Status ReadNow(Volume& volume, IoEngine& engine, ExtentId extent,
                            std::span<std::byte> bytes) {
  RETURN_IF_ERROR(volume.Read(extent, bytes, /*token=*/1));
  return FinishOne(volume, engine, 1);
}

// Writes and publishes.
inline absl::Status WriteNow(Volume& volume, IoEngine& engine, ExtentId extent,
                             std::span<const std::byte> bytes, const Identity& identity) {
  RETURN_IF_ERROR(volume.Write(extent, bytes, identity, Checksum(identity, bytes), /*token=*/2));
  RETURN_IF_ERROR(FinishOne(volume, engine, 2));
  return volume.Publish(extent);
}

inline absl::Status CommitNow(Volume& volume, IoEngine& engine) {
  RETURN_IF_ERROR(volume.Commit(/*token=*/3));
  return FinishOne(volume, engine, 3);
}

inline absl::Status ZeroNow(Volume& volume, IoEngine& engine, std::span<const ExtentId> extents) {
  const testing::Bytes zeros(8192);
  RETURN_IF_ERROR(volume.ZeroExtents(extents, zeros, /*token=*/4));
  return FinishOne(volume, engine, 4);
}

// All blocks of one step: written at the same time, each published when it is there, committed.
// Blocks that have the step already are left alone, those in doubt are written again.
inline absl::Status CommitStep(Volume& volume, IoEngine& engine, uint32_t step) {
  constexpr uint64_t kFirstToken = 100;
  constexpr int kWaitsMax = 100000;
  const std::vector<ExtentId> extents = volume.extents();
  const std::vector<ExtentId> doubted = volume.NeedsRewrite();
  std::vector<testing::Bytes> contents;
  size_t left = 0;
  absl::Status first_error;
  for (const ExtentId extent : extents) {
    const auto block = static_cast<uint32_t>(extent);
    contents.push_back(ContentOf(block, step));
    const auto expected = volume.expected(extent);
    const bool in_doubt = std::find(doubted.begin(), doubted.end(), extent) != doubted.end();
    if (!in_doubt && expected.has_value() && StepOf(expected->identity) == step) continue;
    const Identity identity = IdentityOf(block, step);
    const absl::Status status =
        volume.Write(extent, contents.back(), identity, Checksum(identity, contents.back()),
                     kFirstToken + block);
    first_error.Update(status);
    if (status.ok()) ++left;
  }
  std::array<Completion, 8> completions;
  for (int i = 0; left > 0 && i < kWaitsMax; ++i) {
    ASSIGN_OR_RETURN(const size_t count, engine.Wait(std::chrono::seconds(1), completions));
    std::vector<Finished> finished;
    for (size_t c = 0; c < count; ++c) volume.OnCompletion(completions[c], finished);
    for (const Finished& one : finished) {
      --left;
      first_error.Update(one.status);
      if (one.status.ok()) {
        RETURN_IF_ERROR(volume.Publish(ExtentId{static_cast<uint32_t>(one.token - kFirstToken)}));
      }
    }
  }
  RETURN_IF_ERROR(first_error);
  return CommitNow(volume, engine);
}

// What a block reads as: its step, or the error; and whether the bytes are that step's.
struct BlockState {
  absl::Status status;
  uint32_t step = 0;
  bool bytes_right = false;
};

inline BlockState ReadBlock(Volume& volume, IoEngine& engine, ExtentId extent) {
  const auto expected = volume.expected(extent);
  if (!expected.has_value()) return {.status = absl::NotFoundError("never written")};
  testing::Bytes bytes(kBlockBytes);
  BlockState state;
  state.step = StepOf(expected->identity);
  state.status = ReadNow(volume, engine, extent, bytes);
  if (state.status.ok()) state.status = Verify(*expected, bytes);
  state.bytes_right = bytes == ContentOf(static_cast<uint32_t>(extent), state.step);
  return state;
}

}  // namespace forebay::nvme
