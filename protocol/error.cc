// SPDX-License-Identifier: Apache-2.0
#include "protocol/error.h"

#include <array>
#include <cstdio>
#include <string>
#include <system_error>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace forebay::protocol {
namespace {

using absl::StatusCode;

constexpr char kIdPayload[] = "forebay/id";
constexpr char kHintPayload[] = "forebay/hint";

constexpr std::array kErrors = {
    ErrorInfo{ErrorId::kInternal, "E_INTERNAL", StatusCode::kInternal,
              "a bug of Forebay: report it with the daemon's log"},
    ErrorInfo{
        ErrorId::kDaemonGone, "E_DAEMON_GONE", StatusCode::kUnavailable,
        "start the daemon, where nobody does, and attach again: a job that was kept or is durable "
        "goes on; else it begins anew: save its weights, which stay readable in DRAM"},
    ErrorInfo{ErrorId::kNoDaemon, "E_NO_DAEMON", StatusCode::kUnavailable,
              "start one with `forebay run -- COMMAND`, or `systemctl start forebayd`"},
    ErrorInfo{ErrorId::kProtocol, "E_PROTOCOL", StatusCode::kFailedPrecondition,
              "use client and daemon of one release"},
    ErrorInfo{ErrorId::kTimeout, "E_TIMEOUT", StatusCode::kDeadlineExceeded,
              "see `forebay status` for what the daemon waits for"},
    ErrorInfo{ErrorId::kPermission, "E_PERMISSION", StatusCode::kFailedPrecondition,
              "ask as the user who owns it"},
    ErrorInfo{ErrorId::kConfig, "E_CONFIG", StatusCode::kInvalidArgument,
              "`forebayd --help` lists every key"},
    ErrorInfo{ErrorId::kBusy, "E_BUSY", StatusCode::kFailedPrecondition,
              "wait for what holds it, or end that; then retry"},
    ErrorInfo{ErrorId::kMemlock, "E_MEMLOCK", StatusCode::kResourceExhausted,
              "add the line LimitMEMLOCK=infinity to the unit's [Service] section"},
    ErrorInfo{ErrorId::kDramLimit, "E_DRAM_LIMIT", StatusCode::kResourceExhausted,
              "raise --dram / dram.limit, or delete jobs that hold memory"},
    ErrorInfo{ErrorId::kSwapPath, "E_SWAP_PATH", StatusCode::kFailedPrecondition,
              "give a directory on a local disk that the daemon's user may write"},
    ErrorInfo{ErrorId::kSwapNospc, "E_SWAP_NOSPC", StatusCode::kResourceExhausted,
              "give more swap, or delete jobs that hold it: `forebay jobs`"},
    ErrorInfo{ErrorId::kSwapIo, "E_SWAP_IO", StatusCode::kDataLoss,
              "see the kernel's log for the disk; go back to a checkpoint"},
    ErrorInfo{ErrorId::kCorrupt, "E_CORRUPT", StatusCode::kDataLoss,
              "check the disk; go back to a checkpoint"},
    ErrorInfo{ErrorId::kJobName, "E_JOB_NAME", StatusCode::kInvalidArgument,
              "`forebay jobs` lists the jobs there are"},
    ErrorInfo{ErrorId::kLayout, "E_LAYOUT", StatusCode::kInvalidArgument,
              "correct the layout, or take another job name"},
    ErrorInfo{ErrorId::kOption, "E_OPTION", StatusCode::kInvalidArgument,
              "give a value that is allowed, or leave the option out"},
    ErrorInfo{ErrorId::kRank, "E_RANK", StatusCode::kInvalidArgument,
              "ranks go from 0 to the world size - 1, which all ranks give alike"},
    ErrorInfo{ErrorId::kRankLost, "E_RANK_LOST", StatusCode::kUnavailable,
              "attach again and go on after the committed step"},
    ErrorInfo{ErrorId::kFenced, "E_FENCED", StatusCode::kUnavailable, "attach again"},
    ErrorInfo{ErrorId::kLease, "E_LEASE", StatusCode::kInvalidArgument,
              "release each lease once, in the session that fetched it"},
    ErrorInfo{ErrorId::kRange, "E_RANGE", StatusCode::kInvalidArgument,
              "name a place within what this session and its job have"},
    ErrorInfo{ErrorId::kRing, "E_RING", StatusCode::kFailedPrecondition,
              "the session has ended: attach again"},
    ErrorInfo{ErrorId::kStep, "E_STEP", StatusCode::kFailedPrecondition,
              "call the step after the committed one, with one set of scalars"},
    ErrorInfo{
        ErrorId::kRemote, "E_REMOTE", StatusCode::kUnavailable,
        "see whether the network and forebay-gateway on the daemon's node are well (journalctl "
        "-u forebay-gateway), then attach again"},
    ErrorInfo{ErrorId::kGradRepeat, "E_GRAD_REPEAT", StatusCode::kFailedPrecondition,
              "deliver each gradient once a step, or drop the gradients and begin the step anew"},
    ErrorInfo{ErrorId::kNonfinite, "E_NONFINITE", StatusCode::kInvalidArgument,
              "lower the learning rate, or look for the cause in the loss"},
    ErrorInfo{ErrorId::kOverflow, "E_OVERFLOW", StatusCode::kInvalidArgument,
              "go back to a checkpoint, or lower the learning rate"},
    ErrorInfo{ErrorId::kJobFailed, "E_JOB_FAILED", StatusCode::kDataLoss,
              "delete the job and start it again from a checkpoint"},
    ErrorInfo{ErrorId::kForked, "E_FORKED", StatusCode::kFailedPrecondition,
              "attach in the process that trains"},
    ErrorInfo{ErrorId::kUnsupported, "E_UNSUPPORTED", StatusCode::kFailedPrecondition,
              "README.md says what works and what does not yet"},
    ErrorInfo{ErrorId::kExtraState, "E_EXTRA_STATE", StatusCode::kInvalidArgument,
              "ask for more extra_state_bytes at attach (at most 480 MiB)"},
    ErrorInfo{ErrorId::kInterrupted, "E_INTERRUPTED", StatusCode::kDeadlineExceeded,
              "call again with the same arguments"},
    ErrorInfo{ErrorId::kNotReady, "E_NOT_READY", StatusCode::kFailedPrecondition,
              "do first what it waits for, then call again"},
    ErrorInfo{ErrorId::kLimit, "E_LIMIT", StatusCode::kResourceExhausted,
              "release or end what is not needed any more, then retry"},
    ErrorInfo{ErrorId::kJobExists, "E_JOB_EXISTS", StatusCode::kFailedPrecondition,
              "attach with resume to go on with it, choose another job name, or delete it: forebay "
              "jobs --delete NAME"},
    ErrorInfo{ErrorId::kGradPartial, "E_GRAD_PARTIAL", StatusCode::kFailedPrecondition,
              "deliver every element of a parameter that has a gradient"},
    ErrorInfo{ErrorId::kGradDropped, "E_GRAD_DROPPED", StatusCode::kUnavailable,
              "run forward and backward of this step again, then call step"},
    ErrorInfo{
        ErrorId::kDevice, "E_DEVICE", StatusCode::kUnavailable,
        "see `dmesg` for the GPU's own error (Xid); start the process again: the job is as it "
        "was"},
    ErrorInfo{ErrorId::kDeviceMemory, "E_DEVICE_MEMORY", StatusCode::kResourceExhausted,
              "use smaller groups or batches, or end what else uses the device"},
    ErrorInfo{ErrorId::kSwapTimeout, "E_SWAP_TIMEOUT", StatusCode::kUnavailable,
              "look at the kernel's log (dmesg) and at the device; where it is only slow, raise "
              "swap.deadline"},
};

std::string PayloadOf(const absl::Status& status, const char* key) {
  const auto payload = status.GetPayload(key);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace

std::span<const ErrorInfo> AllErrors() { return kErrors; }

const ErrorInfo& Info(ErrorId id) {
  for (const ErrorInfo& info : kErrors) {
    if (info.id == id) return info;
  }
  return kErrors.front();
}

ErrorId ErrorIdFromName(std::string_view name) {
  for (const ErrorInfo& info : kErrors) {
    if (info.name == name) return info.id;
  }
  return ErrorId::kInternal;
}

absl::Status MakeError(ErrorId id, std::string_view message, std::string_view hint) {
  const ErrorInfo& info = Info(id);
  absl::Status status(info.code, {message.data(), message.size()});
  status.SetPayload(kIdPayload, absl::Cord({info.name.data(), info.name.size()}));
  if (hint.empty()) hint = info.hint;
  status.SetPayload(kHintPayload, absl::Cord({hint.data(), hint.size()}));
  return status;
}

absl::Status Unshared(const absl::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return MakeError(IdOf(status), std::string(status.message()), HintOf(status));
}

ErrorId IdOf(const absl::Status& status) {
  return status.ok() ? ErrorId::kNone : ErrorIdFromName(PayloadOf(status, kIdPayload));
}

std::string HintOf(const absl::Status& status) { return PayloadOf(status, kHintPayload); }

bool IsRetryable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsResourceExhausted(status);
}

std::string FormatError(const absl::Status& status) {
  std::string text = absl::StrCat("error[", std::string(Info(IdOf(status)).name),
                                  "]: ", std::string(status.message()));
  const std::string hint = HintOf(status);
  if (!hint.empty()) absl::StrAppend(&text, "\nhint: ", hint);
  return text;
}

void PrintError(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", FormatError(status).c_str());
}

absl::Status ParseError(std::string_view text) {
  constexpr std::string_view kBefore = "error[";
  constexpr std::string_view kAfter = "]: ";
  constexpr std::string_view kHint = "\nhint: ";
  const size_t before = text.find(kBefore);
  const size_t after = text.find(kAfter, before);
  if (after == text.npos) return absl::OkStatus();
  const std::string_view name =
      text.substr(before + kBefore.size(), after - before - kBefore.size());
  const std::string_view message = text.substr(after + kAfter.size());
  const size_t hint = message.rfind(kHint);
  return MakeError(ErrorIdFromName(name), message.substr(0, hint),
                   hint == message.npos ? "" : message.substr(hint + kHint.size()));
}

std::string ErrnoText(std::string_view what, int error_number) {
  return absl::StrCat(std::string(what), ": ",
                      std::error_code(error_number, std::generic_category()).message());
}

}  // namespace forebay::protocol
