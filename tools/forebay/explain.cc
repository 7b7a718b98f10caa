// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/explain.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "protocol/error.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::ErrorInfo;

struct Explanation {
  ErrorId id = ErrorId::kNone;
  std::string_view meaning;  // what has happened, and what state remains
  std::string_view remedy;   // what the user does
  std::string_view example;  // a message as it is seen, without id and hint
};

constexpr std::array kExplanations = {
    Explanation{
        ErrorId::kInternal,
        "The daemon or the client met what its code rules out, or a call of the operating system "
        "failed that never fails in normal operation.",
        "Report it with the daemon's log and the text of the error. What it refused was not done.",
        "hwloc cannot read the NUMA nodes of this machine"},
    Explanation{
        ErrorId::kDaemonGone,
        "The daemon that the process was attached to ended, or closed the connection, and none "
        "came back within daemon_wait. The weights stay readable where they are in DRAM.",
        "Start the daemon, where the service manager does not, and attach again. A job that was "
        "kept or is durable goes on; one of durability memory whose daemon left nothing begins "
        "anew: save its weights first with torch.save(model.state_dict(), ...).",
        "the daemon was restarted, and refuses this session: E_JOB_NAME: there is no job named "
        "gpt"},
    Explanation{
        ErrorId::kNoDaemon, "Nobody listens on the socket.",
        "Start the script with `forebay run -- COMMAND`, or start the service (`systemctl start "
        "forebayd`). FOREBAY_SOCKET names a socket elsewhere.",
        "no daemon answers: connect to /run/forebay/forebay.sock: No such file or directory"},
    Explanation{ErrorId::kProtocol,
                "Client and daemon are of two releases, and the client's is not the one before the "
                "daemon's; or a message is none that a client of Forebay's sends.",
                "Install the Python package, the forebay command and forebayd of one release, and "
                "restart what still runs an older one. A gateway and the ranks that use it are "
                "always of one release.",
                "the client speaks protocol 8, this daemon 9"},
    Explanation{ErrorId::kTimeout,
                "The call's own time (timeout= of attach) ran out. Nobody knows yet whether it "
                "took effect: a step may be applied later.",
                "Call again with the same arguments: a repeated step() asks for the same step, "
                "never for the next. See `forebay jobs` for what the daemon waits for: most often "
                "a rank that has not come this far.",
                "the call's time ran out before the daemon answered; its outcome is unknown"},
    Explanation{ErrorId::kPermission, "The job or the socket belongs to another user.",
                "Ask as its owner. To use the daemon, join the group that owns its socket (forebay "
                "for the service).",
                "job lora belongs to uid 1000; this process has uid 1001"},
    Explanation{ErrorId::kConfig,
                "A setting of the daemon is wrong, or does not fit what a daemon before it has "
                "left; or a file that it, its "
                "gateway or a trainer needs cannot be used.",
                "Correct the setting or the file that the message names. `forebayd --help` lists "
                "every key, and "
                "`forebayd --config FILE --check` checks a file without starting.",
                "--set: dram.limit: \"lots\" is not a size (examples: 4096, 64MiB, 1.5GiB)"},
    Explanation{ErrorId::kBusy,
                "Something else holds what was asked for: a second daemon the socket or a swap "
                "path, the processes of another run the job.",
                "Wait until that has ended, or end it: the message names the process or the job. "
                "Then try again.",
                "daemon 4711 already listens on /run/forebay/forebay.sock"},
    Explanation{ErrorId::kMemlock,
                "The daemon runs as a service and may not lock as much memory as it needs.",
                "Add the line LimitMEMLOCK=infinity to the [Service] section of its unit, then "
                "`systemctl daemon-reload` and restart it.",
                "cannot lock arena staging: Cannot allocate memory: needs 64.0 MiB (67108864 "
                "bytes) besides what is locked already, RLIMIT_MEMLOCK is 8.0 MiB"},
    Explanation{ErrorId::kDramLimit,
                "The job does not fit into the daemon's memory beside what is in it. The message "
                "has every term of the sum and the limit. Nothing of the job was made.",
                "Raise --dram or dram.limit to what the hint says, give the daemon swap, or delete "
                "jobs that are over (`forebay jobs --delete NAME`). `forebay plan` shows the same "
                "sum before a run.",
                "the job needs 2.2 GiB (2349932544 bytes) of DRAM: weights 512.1 MiB (537001984 "
                "bytes) + gradient sums 512.1 MiB (537001984 bytes) + ...; the limit is 256.0 MiB "
                "(268435456 bytes)"},
    Explanation{
        ErrorId::kSwapPath,
        "A path for swap is missing, cannot be written, has no direct I/O, or holds the jobs of "
        "another daemon.",
        "Name a directory on a local disk (not tmpfs) that the daemon's user may write. A volume "
        "with durable jobs that was moved here is taken over with `forebayd --adopt`.",
        "swap path 0 (/none): missing: No such file or directory"},
    Explanation{ErrorId::kSwapNospc,
                "The disk or the swap has too little room. The message has both numbers.",
                "Lower --swap-size or swap.capacity to what the hint says, free space on the disk, "
                "or delete jobs that hold swap (`forebay jobs`).",
                "cannot reserve 900.0 TiB on swap path 0 (/var/tmp/forebay.swap) (free 64.3 GiB)"},
    Explanation{
        ErrorId::kSwapIo,
        "The disk answered a read or a write with an error, also when it was tried again. A read "
        "for the step that is gathered refuses that step; one after its decision fails the job.",
        "See the kernel's log (dmesg) and the drive's health. A refused step is repeated. Where "
        "the job has failed, restart forebayd: a durable job comes back at its durable step; any "
        "other begins anew from a checkpoint.",
        "swap path 0 (/swap/forebay.swap): read at offset 1073741824: 0 of 65536 bytes: "
        "Input/output error"},
    Explanation{ErrorId::kCorrupt,
                "Bytes on swap, or of a daemon that was killed, are not those that were written: a "
                "checksum differs. They were not used.",
                "Check the disk; `forebay scrub` lists all that is damaged. Go back to a durable "
                "step or to a checkpoint.",
                "swap path 0 (/swap/forebay.swap): the page at offset 8192 of the slot at offset "
                "1073741824 does not hold what was written to it"},
    Explanation{
        ErrorId::kJobName, "The name of the job is not one, or there is no such job.",
        "Take 1 to 200 letters, digits, '.', '_' and '-'. `forebay jobs` lists the jobs there are.",
        "there is no job named nobody to read"},
    Explanation{
        ErrorId::kLayout,
        "The model or the optimizer has another form than the job that has this name: another "
        "number or shape of parameters, another optimizer or format. The message names the first "
        "difference.",
        "Build both as the job has them. For another model set FOREBAY_JOB to another name, or "
        "delete the job.",
        "job gpt has another layout: number of parameters: the job has 4, this client wants 2"},
    Explanation{ErrorId::kOption,
                "An argument, an option or a hyper-parameter has a value that it cannot have, or "
                "does not go with another one.",
                "Give a value as the hint says, or leave the argument out.",
                "lr is -1, not a number from 0 on"},
    Explanation{
        ErrorId::kRank,
        "Rank or world size is wrong, is not the one that the job's other ranks gave, or cannot be "
        "known; or another process of the same launch trains this rank.",
        "Start all ranks with one launcher, which sets RANK and WORLD_SIZE, or call "
        "torch.distributed.init_process_group() before attach; alone leave all of it out. "
        "docs/guide/from-pytorch.md says which numbers count.",
        "there is no rank 2 in a world of size 2"},
    Explanation{ErrorId::kRankLost,
                "Another rank of the job ended or failed. What all ranks had called step for is "
                "applied; the gradients of a later step are gone.",
                "Attach again on every rank and go on after opt.committed_step; torchrun "
                "--max-restarts does so by itself. Where that rank had only detached, attach it "
                "again and call step again.",
                "rank 1 of job gpt was lost in step 8; the committed step is 7"},
    Explanation{ErrorId::kFenced,
                "A newer session of the same rank has attached, or the job was deleted: this "
                "session is over.",
                "Train each rank in one process: end the other one, then attach again. In a "
                "notebook detach() before you attach again.",
                "a newer session of rank 0 of job gpt has attached"},
    Explanation{
        ErrorId::kLease,
        "A lease on weights was released twice, is another session's, or was held where none may "
        "be (while step runs). A reader gets it that has held one longer than reader.lease_max.",
        "Release each lease once, in the session that fetched it, and before step. A reader "
        "attaches again.",
        "rank 0 called step 2 with leases on the weights of layers.0"},
    Explanation{
        ErrorId::kRange,
        "A place outside of what the session or the job has, or one that is not aligned.",
        "Name a range within the parameter, the partition or the arena that the message names.",
        "10 elements from element 300 on are outside parameter layers.0.weight, which has 300"},
    Explanation{ErrorId::kRing,
                "The memory that this process and the daemon share was overwritten: the session "
                "has ended. The job is as it was.",
                "Attach again. Where it comes back, look for code in the process that writes past "
                "its memory (an extension, ctypes).",
                "the memory shared by client and daemon was overwritten: the index of the ring's "
                "head is 4096, this side is at 3 (1024 entries)"},
    Explanation{ErrorId::kStep,
                "A call does not fit the step that is under way: other learning rates on another "
                "rank, a gradient or a norm after step was called, or another step before the "
                "outcome of one is known.",
                "Set the same lr and other scalars on every rank, then call step() again; after "
                "E_TIMEOUT or Ctrl-C repeat step() with the same arguments first.",
                "ranks 0 and 1 called step 5 with different scalars: lr 0.001 and 0.002"},
    Explanation{ErrorId::kRemote,
                "The way to a daemon on another node is broken: the gateway there, the process on "
                "this node that reaches it, or the link between them has ended or is silent. A "
                "rank attaches again by itself, and this is what an attach or a reader meets.",
                "Attach again when the network and forebay-gateway are well: a job goes on from "
                "its committed step.",
                "nothing came from the gateway at ucx://10.0.0.1:7700 over UCX for 10.2 s"},
    Explanation{ErrorId::kGradRepeat,
                "The same elements of a gradient were delivered twice in one step. Only clients in "
                "C++ and C see this.",
                "Deliver each gradient once a pass, or drop the gradients and begin the step anew.",
                "a second gradient of parameter layers.0.weight in step 2"},
    Explanation{ErrorId::kNonfinite,
                "A gradient, a parameter's first value or one that was written holds NaN or "
                "infinity. The step was applied on no rank; states and weights are as before it.",
                "Leave the batch out (opt.zero_grad()) and go on, as loss scaling does; where it "
                "comes back, lower the learning rate, or look for the cause in the loss.",
                "the gradient of rank 0 for group 1 (1) in step 1 holds NaN or infinity"},
    Explanation{ErrorId::kOverflow,
                "The update made parameters infinite. The step is committed nevertheless; with "
                "step() that returns early the next call says so.",
                "Go back to a checkpoint or a durable step, and lower the learning rate.",
                "3 parameters of job gpt became non-finite in step 12, which is committed"},
    Explanation{
        ErrorId::kJobFailed,
        "An earlier error, whose text is in the message, left the job unusable: its states are not "
        "whole.",
        "Where the job is durable, restart forebayd: it comes back at its durable step. Else "
        "delete the job and start it again from a checkpoint.",
        "job gpt failed after step 41: swap path 0 (/swap/forebay.swap): the page at offset 8192 "
        "of the slot at offset 1073741824 does not hold what was written to it"},
    Explanation{ErrorId::kForked,
                "A child made by fork uses the attachment of its parent. The parent trains on.",
                "Train in the process that attached. Workers of a DataLoader may read the weights; "
                "they may not call the optimizer.",
                "job gpt: this attachment belongs to process 4711"},
    Explanation{ErrorId::kUnsupported,
                "The call would do something else than with plain torch, or cannot be done. "
                "Nothing was applied.",
                "Write the line that the hint has instead.",
                "parameter embedding.weight is torch.complex64; float32, bfloat16 and float16 can "
                "be attached"},
    Explanation{ErrorId::kExtraState,
                "What is to be committed beside the step (extra_state, and the model's buffers) is "
                "larger than the room taken at attach.",
                "Attach with a larger extra_state_bytes (at most 480 MiB), or keep large data in a "
                "file and its name in extra_state.",
                "extra_state has 1000 bytes and the model's buffers 0; there is room for 100"},
    Explanation{ErrorId::kInterrupted,
                "The call was given up before its answer: a signal handler asked for it. Its "
                "outcome is unknown. Ctrl-C in Python is a KeyboardInterrupt as ever.",
                "Call again with the same arguments.",
                "the call was interrupted; its outcome is unknown"},
    Explanation{ErrorId::kNotReady,
                "Something has to come first: the optimizer is detached, the initial parameters "
                "are not all written, no rank has attached since the daemon was started, or a load "
                "of states did not end and a part of them is loaded.",
                "Do what the message names, then call again; after detach() attach again.",
                "job gpt: the initial parameters were not written"},
    Explanation{
        ErrorId::kLimit,
        "A named maximum is reached: connections of one user, sessions, leases, open files, bytes "
        "of a ledger. The message has the number.",
        "End what is not needed any more, or raise the limit that the hint names, then try again.",
        "user 1000 has 256 connections to the daemon (at most 256)"},
    Explanation{ErrorId::kJobExists,
                "A job of this name exists, and another run has trained it: nothing goes on with "
                "it unasked.",
                "To go on with it, attach with resume=True. For a new training set FOREBAY_JOB to "
                "another name, or delete the job (`forebay jobs --delete NAME`).",
                "job gpt exists and is at step 1; another run (nightly-3) has trained it"},
    Explanation{
        ErrorId::kGradPartial,
        "A part of a gradient was delivered, and the rest is missing: a backward ended "
        "early (an exception, Ctrl-C), FSDP2 has not reduced a gradient, or another rank has no "
        "gradient of its part.",
        "Run forward and backward again, or call opt.zero_grad() to leave the batch out. If FSDP2 "
        "is named, first change the call that the hint names.",
        "step() after a backward that did not come to its end (an exception, Ctrl-C, or it "
        "still runs): only a part of the gradient was delivered"},
    Explanation{ErrorId::kGradDropped,
                "Another rank has begun the step anew (zero_grad() before step()), or the daemon "
                "was started again: the gradients of all ranks are gone. Nothing was applied.",
                "Run forward and backward of the step again on this rank, then call step().",
                "rank 1 of job gpt has begun step 8 anew: the gradients of all ranks were dropped"},
    Explanation{ErrorId::kDevice,
                "A call of CUDA or NCCL failed. The message names it and the driver's own error. "
                "The job is as it was.",
                "See `dmesg` for an Xid of the GPU, then start the process again.",
                "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access "
                "was encountered"},
    Explanation{
        ErrorId::kDeviceMemory,
        "The device has less free memory than is needed. The message has both.",
        "Take smaller groups or batches or less prefetch, or end what else uses the device.",
        "cuda:0 (NVIDIA H100) has 1073741824 of its 85899345920 bytes free; 2147483648 are needed"},
    Explanation{ErrorId::kSwapTimeout,
                "The disk has not ended a transfer within swap.deadline (60 s). A write goes to "
                "another slot or path; a read is refused, and nothing older is read in its place.",
                "See the kernel's log (dmesg) and the drive's health. Where the disk is only slow, "
                "raise swap.deadline.",
                "swap path 0 (/swap/forebay.swap): read at offset 1073741824: 0 of 65536 bytes "
                "after 60.0 s: the disk does not answer"},
};

std::string_view PythonClassOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
      return "UsageError";
    case absl::StatusCode::kResourceExhausted:
      return "ResourceError";
    case absl::StatusCode::kUnavailable:
      return "UnavailableError";
    case absl::StatusCode::kDeadlineExceeded:
      return "ForebayTimeoutError";
    case absl::StatusCode::kDataLoss:
      return "DataLossError";
    default:
      return "ForebayError";
  }
}

// Returns the explanation of an error, or an empty one. tests/tools/troubleshooting_test.py fails if an error has none.
const Explanation& Of(const ErrorInfo& info) {
  static constexpr Explanation kNone;
  const auto found = std::ranges::find(kExplanations, info.id, &Explanation::id);
  return found == kExplanations.end() ? kNone : *found;
}

bool IsRetryable(const ErrorInfo& info) {
  return protocol::IsRetryable(absl::Status(info.code, ""));
}

// Returns the first sentence up to its colon if it has one, without the final punctuation.
std::string Beginning(std::string_view text) {
  const size_t end = std::min(text.find(". "), text.find(": "));
  text = text.substr(0, end);
  if (text.ends_with('.')) text.remove_suffix(1);
  return std::string(text);
}

nlohmann::json Json(const ErrorInfo& info) {
  const Explanation& explanation = Of(info);
  return {{"id", info.name},
          {"class", PythonClassOf(info.code)},
          {"retryable", IsRetryable(info)},
          {"meaning", explanation.meaning},
          {"remedy", explanation.remedy},
          {"example", explanation.example},
          {"hint", info.hint}};
}

std::string Text(const ErrorInfo& info) {
  const Explanation& explanation = Of(info);
  return absl::StrCat(std::string(info.name), " (forebay.", std::string(PythonClassOf(info.code)),
                      IsRetryable(info) ? ", retryable)" : ", not retryable)", "\n\n",
                      std::string(explanation.meaning),
                      "\n\nwhat to do: ", std::string(explanation.remedy), "\n\nexample: error[",
                      std::string(info.name), "]: ", std::string(explanation.example), "\n");
}

}  // namespace

absl::StatusOr<std::string> Explain(const ExplainOptions& options) {
  std::vector<const ErrorInfo*> chosen;
  for (const ErrorInfo& info : protocol::AllErrors()) {
    if (options.id.empty() || info.name == options.id) chosen.push_back(&info);
  }
  if (chosen.empty()) {
    return protocol::MakeError(
        ErrorId::kOption, absl::StrCat("there is no error ", options.id),
        "forebay explain without an id lists all of them; an id is what stands in error[...]");
  }
  if (options.as_json) {
    nlohmann::json all = nlohmann::json::array();
    for (const ErrorInfo* info : chosen) all.push_back(Json(*info));
    return all.dump(2) + "\n";
  }
  if (!options.id.empty()) return Text(*chosen[0]);
  Table table({"id", "class", "retryable", "meaning"});
  for (const ErrorInfo* info : chosen) {
    table.Add({std::string(info->name), std::string(PythonClassOf(info->code)),
               IsRetryable(*info) ? "yes" : "no", Beginning(Of(*info).meaning)});
  }
  return table.Text();
}

}  // namespace forebay::tools
