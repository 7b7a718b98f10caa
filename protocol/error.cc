#include "protocol/error.h"

#include <array>
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
    ErrorInfo{ErrorId::kInternal, "E_INTERNAL", StatusCode::kInternal},
    ErrorInfo{ErrorId::kDaemonGone, "E_DAEMON_GONE", StatusCode::kUnavailable},
    ErrorInfo{ErrorId::kNoDaemon, "E_NO_DAEMON", StatusCode::kUnavailable},
    ErrorInfo{ErrorId::kProtocol, "E_PROTOCOL", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kTimeout, "E_TIMEOUT", StatusCode::kDeadlineExceeded},
    ErrorInfo{ErrorId::kPermission, "E_PERMISSION", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kConfig, "E_CONFIG", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kBusy, "E_BUSY", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kMemlock, "E_MEMLOCK", StatusCode::kResourceExhausted},
    ErrorInfo{ErrorId::kDramLimit, "E_DRAM_LIMIT", StatusCode::kResourceExhausted},
    ErrorInfo{ErrorId::kSwapPath, "E_SWAP_PATH", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kSwapNospc, "E_SWAP_NOSPC", StatusCode::kResourceExhausted},
    ErrorInfo{ErrorId::kSwapIo, "E_SWAP_IO", StatusCode::kDataLoss},
    ErrorInfo{ErrorId::kCorrupt, "E_CORRUPT", StatusCode::kDataLoss},
    ErrorInfo{ErrorId::kJobName, "E_JOB_NAME", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kLayout, "E_LAYOUT", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kOption, "E_OPTION", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kRank, "E_RANK", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kRankLost, "E_RANK_LOST", StatusCode::kUnavailable},
    ErrorInfo{ErrorId::kFenced, "E_FENCED", StatusCode::kUnavailable},
    ErrorInfo{ErrorId::kLease, "E_LEASE", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kRange, "E_RANGE", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kRing, "E_RING", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kStep, "E_STEP", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kGradRepeat, "E_GRAD_REPEAT", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kNonfinite, "E_NONFINITE", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kOverflow, "E_OVERFLOW", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kJobFailed, "E_JOB_FAILED", StatusCode::kDataLoss},
    ErrorInfo{ErrorId::kForked, "E_FORKED", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kUnsupported, "E_UNSUPPORTED", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kExtraState, "E_EXTRA_STATE", StatusCode::kInvalidArgument},
    ErrorInfo{ErrorId::kInterrupted, "E_INTERRUPTED", StatusCode::kDeadlineExceeded},
    ErrorInfo{ErrorId::kNotReady, "E_NOT_READY", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kLimit, "E_LIMIT", StatusCode::kResourceExhausted},
    ErrorInfo{ErrorId::kJobExists, "E_JOB_EXISTS", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kGradPartial, "E_GRAD_PARTIAL", StatusCode::kFailedPrecondition},
    ErrorInfo{ErrorId::kGradDropped, "E_GRAD_DROPPED", StatusCode::kUnavailable},
};

// The hint of an error that was made without one.
struct Hint {
  ErrorId id;
  std::string_view text;
};

constexpr std::array kHints = {
    Hint{ErrorId::kInternal, "a bug of Forebay: report it with the daemon's log"},
    Hint{ErrorId::kDaemonGone, "start the daemon, then attach again"},
    Hint{ErrorId::kNoDaemon,
         "start one with `forebay run -- COMMAND`, or `systemctl start forebayd`"},
    Hint{ErrorId::kProtocol, "use client and daemon of one release"},
    Hint{ErrorId::kTimeout, "see `forebay status` for what the daemon waits for"},
    Hint{ErrorId::kPermission, "ask as the user who owns it"},
    Hint{ErrorId::kConfig, "`forebayd --help` lists every key"},
    Hint{ErrorId::kBusy, "wait for what holds it, or end that; then retry"},
    Hint{ErrorId::kMemlock, "add the line LimitMEMLOCK=infinity to the unit's [Service] section"},
    Hint{ErrorId::kDramLimit, "raise --dram / dram.limit, or delete jobs that hold memory"},
    Hint{ErrorId::kSwapPath, "give a directory on a local disk that the daemon's user may write"},
    Hint{ErrorId::kSwapNospc, "give more swap, or delete jobs that hold it: `forebay jobs`"},
    Hint{ErrorId::kSwapIo, "see the kernel's log for the disk; go back to a checkpoint"},
    Hint{ErrorId::kCorrupt, "check the disk; go back to a checkpoint"},
    Hint{ErrorId::kJobName, "`forebay jobs` lists the jobs there are"},
    Hint{ErrorId::kLayout, "correct the layout, or take another job name"},
    Hint{ErrorId::kOption, "give a value that is allowed, or leave the option out"},
    Hint{ErrorId::kRank, "ranks go from 0 to the world size - 1, which all ranks give alike"},
    Hint{ErrorId::kRankLost, "attach again and go on after the committed step"},
    Hint{ErrorId::kFenced, "attach again"},
    Hint{ErrorId::kLease, "release each lease once, in the session that fetched it"},
    Hint{ErrorId::kRange, "name a place within what this session and its job have"},
    Hint{ErrorId::kRing, "the session has ended: attach again"},
    Hint{ErrorId::kStep, "call the step after the committed one, with one set of scalars"},
    Hint{ErrorId::kGradRepeat,
         "deliver each gradient once a step, or drop the gradients and begin the step anew"},
    Hint{ErrorId::kNonfinite, "lower the learning rate, or look for the cause in the loss"},
    Hint{ErrorId::kOverflow, "go back to a checkpoint, or lower the learning rate"},
    Hint{ErrorId::kJobFailed, "delete the job and start it again from a checkpoint"},
    Hint{ErrorId::kForked, "attach in the process that trains"},
    Hint{ErrorId::kUnsupported, "README.md says what works and what does not yet"},
    Hint{ErrorId::kExtraState, "ask for more extra_state_bytes at attach (at most 16 MiB)"},
    Hint{ErrorId::kInterrupted, "call again with the same arguments"},
    Hint{ErrorId::kNotReady, "do first what it waits for, then call again"},
    Hint{ErrorId::kLimit, "release or end what is not needed any more, then retry"},
    Hint{ErrorId::kJobExists,
         "attach with resume to go on with it, choose another job name, or delete it: forebay jobs "
         "--delete NAME"},
    Hint{ErrorId::kGradPartial, "deliver every element of a parameter that has a gradient"},
    Hint{ErrorId::kGradDropped, "run forward and backward of this step again, then call step"},
};
static_assert(kHints.size() == kErrors.size());

std::string_view OwnHint(ErrorId id) {
  for (const Hint& hint : kHints) {
    if (hint.id == id) return hint.text;
  }
  return kHints.front().text;
}

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
  if (hint.empty()) hint = OwnHint(info.id);
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

std::string ErrnoText(std::string_view what, int error_number) {
  return absl::StrCat(std::string(what), ": ",
                      std::error_code(error_number, std::generic_category()).message());
}

}  // namespace forebay::protocol
