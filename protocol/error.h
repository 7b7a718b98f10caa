// SPDX-License-Identifier: Apache-2.0
// Every error a user can meet: a stable id, the numbers and the cause, and a hint.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace forebay::protocol {

// Numbers travel on the wire and never change their meaning; add at the end.
enum class ErrorId : uint16_t {
  kNone = 0,
  kInternal = 1,     // E_INTERNAL: a bug of ours that was caught
  kDaemonGone = 2,   // E_DAEMON_GONE: the daemon died or closed the connection
  kNoDaemon = 3,     // E_NO_DAEMON: no process listens on the socket
  kProtocol = 4,     // E_PROTOCOL: another protocol version, or a message no client of ours sends
  kTimeout = 5,      // E_TIMEOUT: the call's own limit ran out; the outcome is unknown
  kPermission = 6,   // E_PERMISSION: the job or socket belongs to another user
  kConfig = 7,       // E_CONFIG: file, line, key, nearest valid key
  kBusy = 8,         // E_BUSY: a second daemon on the socket or the swap path; its pid
  kMemlock = 9,      // E_MEMLOCK: RLIMIT_MEMLOCK is too low for a service
  kDramLimit = 10,   // E_DRAM_LIMIT: the terms of the sum against the limit
  kSwapPath = 11,    // E_SWAP_PATH: missing, read-only or without O_DIRECT
  kSwapNospc = 12,   // E_SWAP_NOSPC: needed and free bytes
  kSwapIo = 13,      // E_SWAP_IO: a transfer failed after its retries; path, offset, errno
  kCorrupt = 14,     // E_CORRUPT: a block's bytes are not those of its step; path, slot, identity
  kJobName = 15,     // E_JOB_NAME: empty, too long, or with characters outside [A-Za-z0-9._-]
  kLayout = 16,      // E_LAYOUT: not a valid layout, or not the one the job has; both
  kOption = 17,      // E_OPTION: optimizer, format, hyper-parameter or pair that is not supported
  kRank = 18,        // E_RANK: rank or world size is wrong, or not the job's
  kRankLost = 19,    // E_RANK_LOST: another rank of the job ended; attach again
  kFenced = 20,      // E_FENCED: a newer session of the same rank exists, or this one was evicted
  kLease = 21,       // E_LEASE: not a lease of this session, released before, or held at step
  kRange = 22,       // E_RANGE: offset or length outside the arena, or misaligned
  kRing = 23,        // E_RING: the ring in shared memory was overwritten; the session ends
  kStep = 24,        // E_STEP: step 0, a gap, or t and scalars that differ between ranks
  kRemote = 25,      // E_REMOTE: the way to a daemon on another node is broken; where and how
  kGradRepeat = 26,  // E_GRAD_REPEAT: a second gradient of the same elements in one step
  kNonfinite = 27,  // E_NONFINITE: NaN or infinity in a gradient or an initial parameter; the group
  kOverflow = 28,   // E_OVERFLOW: masters that became non-finite in the update; how many
  kJobFailed = 29,  // E_JOB_FAILED: an earlier error left the job unusable; that error
  kForked = 30,     // E_FORKED: the attachment belongs to the parent process
  // E_UNSUPPORTED: gradient accumulation, sparse gradients and the like; by name
  kUnsupported = 31,
  kExtraState = 32,    // E_EXTRA_STATE: larger than the room taken at attach
  kInterrupted = 33,   // E_INTERRUPTED: a signal handler asked the call to return
  kNotReady = 34,      // E_NOT_READY: used before its parameters were written
  kLimit = 35,         // E_LIMIT: a named maximum (sessions, groups, leases) is reached
  kJobExists = 36,     // E_JOB_EXISTS: another run has trained this job; its step and the ways out
  kGradPartial = 37,   // E_GRAD_PARTIAL: a step with a parameter that was delivered in part
  kGradDropped = 38,   // E_GRAD_DROPPED: another rank has restarted the step; deliver again
  kDevice = 39,        // E_DEVICE: a call of CUDA or NCCL failed; its name and cause
  kDeviceMemory = 40,  // E_DEVICE_MEMORY: needed and free bytes of the device
  kSwapTimeout = 41,   // E_SWAP_TIMEOUT: the disk has not answered in time; path, offset, seconds
};

// Row of an error id in the table.
struct ErrorInfo {
  ErrorId id;
  std::string_view name;  // "E_SWAP_NOSPC"
  absl::StatusCode code;  // tells a caller whether to retry (IsRetryable)
  std::string_view hint;  // default for errors without a hint of their own
};

std::span<const ErrorInfo> AllErrors();
const ErrorInfo& Info(ErrorId id);               // unknown numbers give kInternal's row
ErrorId ErrorIdFromName(std::string_view name);  // kInternal where unknown

// A Status with the id's code; id and hint travel as payloads. An empty hint: the id's own.
absl::Status MakeError(ErrorId id, std::string_view message, std::string_view hint = {});

// Copies an error into new memory. Copies of a Status share memory and count their owners in a library that race detectors do
// not see into: give the result of this function to another thread.
absl::Status Unshared(const absl::Status& status);

ErrorId IdOf(const absl::Status& status);  // kNone for OK, kInternal without a payload
std::string HintOf(const absl::Status& status);

// True if the caller may attach again, or wait and retry: kUnavailable, kResourceExhausted.
bool IsRetryable(const absl::Status& status);

// "error[E_SWAP_NOSPC]: message\nhint: ..." without a trailing newline; what a terminal shows.
std::string FormatError(const absl::Status& status);

// Prints FormatError() and a newline on standard error.
void PrintError(const absl::Status& status);

// Parses the error at the end of a text that FormatError wrote. OK if the text has none.
absl::Status ParseError(std::string_view text);

// errno as text with the object in front: "swap path 0: open /x: No such file or directory".
std::string ErrnoText(std::string_view what, int error_number);

}  // namespace forebay::protocol
