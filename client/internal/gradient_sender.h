// SPDX-License-Identifier: Apache-2.0
// A rank's gradients: the memory that they are written to, and their delivery.
#pragma once

#include <compare>
#include <list>
#include <map>
#include <span>
#include <string_view>

#include "client/internal/device_copies.h"
#include "client/internal/session_trace.h"

namespace forebay::client::internal {

// Owns the attempt at the step, open slots and pieces, and copies of gradients from the device.
//
// States   of an attempt: passes 0, 1, ...; after GradNorm with shared attachment the rank delivers nothing more. A new attempt
//          begins with each step, after a step whose gradients the daemon dropped, and with DropAll.
//          of a slot (whole partition): open from GradSlot to GradReady, which delivers it.
//          of a piece: open from the first gradient that reaches it, delivered when the gradients of all its parameters were
//          added. A flush delivers the units (kGradUnitElems) that are complete, frees those without a gradient, and retains
//          the others in private memory, a piece each, until they are complete or DeliverAll is called.
//          of delivered memory: unsent until its copies have ended, then sent; the daemon's answer frees it.
// Threads  One at a time, under Attachment's mutex. LookAtCopies also runs on the thread of CopyWatch, under that mutex.
// Errors   As the methods of Attachment of the same names. If a gradient is lost, the error is stored: the step must fail.
class GradientSender {
 public:
  GradientSender(const SessionParts& parts, SessionLink& link, DeviceCopies& device,
                 SessionTrace& trace);

  absl::StatusOr<std::span<std::byte>> GradSlot(uint32_t partition, GradFill fill,
                                                const WaitLimits& limits);
  std::shared_ptr<const void> grad_owner(uint32_t partition) const;
  absl::Status GradReady(uint32_t partition, const WaitLimits& limits);

  absl::Status AddGradient(uint32_t param, std::span<const std::byte> bytes,
                           const WaitLimits& limits);
  absl::Status AddGradientAfter(uint32_t param, std::span<const std::byte> bytes,
                                gpu::Stream& ready, const std::shared_ptr<const void>& keep,
                                const WaitLimits& limits);
  absl::Status FlushGradients(std::optional<uint32_t> partition, const WaitLimits& limits);
  absl::Status BeginPass(const WaitLimits& limits);
  absl::StatusOr<double> GradNorm(std::optional<uint32_t> param, const WaitLimits& limits);
  absl::Status DropGradients(const WaitLimits& limits);

  uint64_t attempt() const { return attempt_; }
  // Parameters with a gradient in this attempt; see wire.h.
  std::span<const uint64_t> presence() const { return presence_; }
  void BeginAttempt(uint64_t number);
  // Delivers all open pieces, and waits until they are sent.
  absl::Status DeliverAll(const WaitLimits& limits);
  // Frees all open slots and pieces, drops the stored gradient error, and begins the next attempt if this one has delivered
  // something. No copy into a slot may be in flight.
  void DropAll();
  // Sends gradients whose copies have ended, and drops references to their sources. Errors are stored. Never blocks. Returns
  // true if any copy is in flight or any gradient unsent.
  bool LookAtCopies();
  // Forgets open slots and pieces. Their memory must be free, or the session at its end.
  void Close();

 private:
  struct OpenSlot {
    // Empty if the slot is private memory.
    std::optional<uint64_t> arena_offset;
    std::shared_ptr<Mapping> owner;
    std::span<std::byte> bytes;
    // Event after the last copy from the device into the slot. Null if the device copied nothing into the slot.
    std::shared_ptr<const gpu::Event> copied = {};
  };
  // A range of a partition that AddGradient fills.
  struct OpenPiece {
    uint64_t end = 0;
    OpenSlot slot;
  };
  struct ElemPlace {
    uint32_t partition = 0;
    uint64_t elem = 0;

    // NOLINTNEXTLINE(modernize-use-nullptr): of clang 14
    auto operator<=>(const ElemPlace&) const = default;
  };
  using Pieces = std::pmr::map<ElemPlace, OpenPiece>;  // keyed by the first element
  // A copy of a gradient to a slot.
  struct GradientCopy {
    std::shared_ptr<const gpu::Event> done;
    std::shared_ptr<const void> keep;  // source of the copy
  };
  // A delivered gradient whose command is sent when its copies have ended.
  struct UnsentGradient {
    protocol::Command command;
    BusyRange range;
    std::shared_ptr<const gpu::Event> copied;
  };
  // Tells whether any trainable parameter in a range has a gradient (`any`), and whether any lacks one (`missing`).
  struct Coverage {
    bool any = false;
    bool missing = false;
  };

  absl::StatusOr<OpenSlot> MakeSlot(uint64_t size_bytes, const WaitLimits& limits);
  void FreeSlot(const OpenSlot& slot);
  absl::Status CheckGradient(uint32_t param, std::span<const std::byte> bytes,
                             const WaitLimits& limits);
  absl::Status CopyGradient(uint32_t param, std::span<const std::byte> bytes,
                            const std::shared_ptr<const void>& keep, const WaitLimits& limits);
  absl::Status CopyBoxToPieces(const protocol::BoxPlace& place, std::span<const std::byte> bytes,
                               const std::shared_ptr<const void>& keep, const WaitLimits& limits);
  // Returns the open piece that holds the element. A new piece covers its whole piece of the partition, less what is open or
  // delivered already.
  absl::StatusOr<Pieces::iterator> PieceAt(uint32_t partition, uint64_t elem,
                                           const WaitLimits& limits);
  absl::Status FlushPiece(Pieces::iterator at, const WaitLimits& limits);
  absl::Status RetainPart(uint32_t partition, uint64_t begin, uint64_t end, const OpenSlot& slot,
                          const WaitLimits& limits);
  absl::Status Flush(std::optional<uint32_t> partition, const WaitLimits& limits);
  // Delivers elements [begin, end) of a partition, whose gradient the slot holds.
  absl::Status DeliverSlot(uint32_t partition, uint64_t begin, uint64_t end, const OpenSlot& slot,
                           const WaitLimits& limits);
  // Sends the gradient in `range`. If its copies have not ended, LookAtCopies sends it when they have.
  absl::Status SendGradient(uint32_t partition, uint64_t begin, uint64_t end, BusyRange range,
                            std::shared_ptr<const gpu::Event> copied, const WaitLimits& limits);
  CommandPort::OnDone OnGradientDone(uint64_t arena_offset);
  // Refuses a delivery after GradNorm with shared attachment, because other ranks may have received their norms already.
  absl::Status CheckAskedNoNorm(std::string_view what, std::string_view name = {}) const;
  bool HasGradient(uint32_t param) const { return protocol::IsPresent(pass_presence_, param); }
  void SetGradient(uint32_t param);
  Coverage CoverageOf(uint32_t partition, uint64_t begin, uint64_t end) const;
  // `bytes` hold elements [begin, end): those without a gradient become zero.
  void ZeroAbsent(uint32_t partition, uint64_t begin, uint64_t end,
                  std::span<std::byte> bytes) const;

  const SessionParts& parts_;
  SessionLink& link_;
  DeviceCopies& device_;
  SessionTrace& trace_;
  // The boxes of each parameter whose gradients this rank delivers, by parameter; sharded: the boxes that this rank owns.
  const std::vector<std::vector<uint32_t>> own_boxes_;
  std::pmr::map<uint32_t, OpenSlot> open_{link_.memory()};  // slots of whole partitions
  Pieces pieces_{link_.memory()};
  // Ranges that were delivered in this pass: first element to end.
  std::pmr::map<ElemPlace, uint64_t> delivered_{link_.memory()};
  std::pmr::list<GradientCopy> copies_{link_.memory()};
  std::pmr::list<UnsentGradient> unsent_{link_.memory()};
  uint64_t attempt_;
  uint32_t pass_ = 0;           // number of this attempt's pass, from BeginPass
  bool has_delivered_ = false;  // true: this attempt has delivered something
  // True if this rank asked for a norm in this attempt (shared attachment). It then delivers nothing more.
  bool has_asked_norm_ = false;
  std::vector<uint64_t> presence_;       // parameters with a gradient in this attempt
  std::vector<uint64_t> pass_presence_;  // parameters with a gradient in this pass
};

}  // namespace forebay::client::internal
