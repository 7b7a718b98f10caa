// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/forebay.h"
#include "protocol/durability.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"
#include "protocol/os/status_macros.h"

struct forebay_session {
  std::unique_ptr<forebay::client::Attachment> attachment;
};

namespace {

using forebay::client::Attachment;
using forebay::client::FetchTicket;
using forebay::client::Timeout;
using forebay::protocol::ErrorId;
using forebay::protocol::MakeError;

struct LastError {
  int32_t id = FOREBAY_OK;
  std::string message;
  std::string hint;
  bool retryable = false;
};

thread_local LastError last_error;

int32_t Report(const absl::Status& status) {
  if (status.ok()) return FOREBAY_OK;
  last_error = {.id = static_cast<int32_t>(forebay::protocol::IdOf(status)),
                .message = std::string(status.message()),
                .hint = forebay::protocol::HintOf(status),
                .retryable = forebay::protocol::IsRetryable(status)};
  return last_error.id;
}

// Runs the call; no exception (of the allocator, say) leaves into C.
template <typename Call>
int32_t Guard(Call call) {
  try {
    return Report(call());
  } catch (const std::exception& error) {
    return Report(MakeError(ErrorId::kInternal, error.what()));
  }
}

absl::Status NullArgument(const char* name) {
  return MakeError(ErrorId::kOption, absl::StrCat("argument ", name, " is NULL"));
}

absl::Status CheckSize(const char* name, size_t given, size_t known) {
  if (given == known) return absl::OkStatus();
  return MakeError(ErrorId::kProtocol,
                   absl::StrCat(name, ".struct_size is ", given, "; this library has ", known,
                                " (ABI version ", FOREBAY_ABI_VERSION, ")"),
                   "set it to sizeof of the struct, and build against the library's own header");
}

// Runs the call on the session's attachment.
template <typename Session, typename Call>
int32_t With(Session* session, Call call) {
  return Guard([&]() -> absl::Status {
    if (session == nullptr) return NullArgument("session");
    return call(*session->attachment);
  });
}

std::string TextOf(const char* text) { return text == nullptr ? std::string() : std::string(text); }

Timeout TimeoutOf(int64_t timeout_ms) {
  return timeout_ms < 0 ? forebay::client::kNoTimeout : Timeout(timeout_ms);
}

std::span<const std::byte> BytesOf(const void* bytes, size_t size_bytes) {
  return {static_cast<const std::byte*>(bytes), size_bytes};
}

// Offsets of ABI version 3. Programs that were compiled with 0.2.0's header, which has no groups of options, have the same.
static_assert(offsetof(forebay_options, memory.grad_arena_bytes) == 88);
static_assert(offsetof(forebay_options, memory.extra_state_bytes) == 96);
static_assert(offsetof(forebay_options, timeout_ms) == 104);
static_assert(offsetof(forebay_options, durability.level) == 136);
static_assert(offsetof(forebay_options, durability.daemon_wait_ms) == 144);
static_assert(sizeof(forebay_options) == 152);

absl::StatusOr<forebay::protocol::LayoutSpec> LayoutOf(const forebay_options& options) {
  forebay::protocol::LayoutSpec spec;
  ASSIGN_OR_RETURN(spec.dtype, forebay::protocol::WeightsDTypeFromName(TextOf(options.dtype)));
  ASSIGN_OR_RETURN(spec.optimizer, forebay::protocol::OptimizerFromName(TextOf(options.optimizer)));
  ASSIGN_OR_RETURN(spec.format, forebay::protocol::FormatFromName(TextOf(options.format)));
  spec.seed = options.seed;
  if (options.params == nullptr && options.param_count > 0) return NullArgument("params");
  for (const forebay_param& param : std::span(options.params, options.param_count)) {
    if (param.shape == nullptr && param.dims > 0) return NullArgument("params[].shape");
    const std::span<const uint64_t> shape(param.shape, param.dims);
    spec.params.push_back({.name = TextOf(param.name),
                           .shape = {shape.begin(), shape.end()},
                           .group = param.group,
                           .param_group = param.param_group,
                           .trainable = param.frozen == 0});
  }
  if (options.group_names == nullptr && options.group_count > 0) return NullArgument("group_names");
  for (const char* name : std::span(options.group_names, options.group_count)) {
    spec.group_names.push_back(TextOf(name));
  }
  return spec;
}

absl::Status AttachTo(const forebay_options& options, forebay_session** session) {
  ASSIGN_OR_RETURN(forebay::protocol::LayoutSpec spec, LayoutOf(options));
  forebay::client::DurabilityOptions durability;
  if (options.durability.level != nullptr) {
    ASSIGN_OR_RETURN(durability.level,
                     forebay::protocol::ParseDurability(options.durability.level));
  }
  if (options.durability.daemon_wait_ms != 0) {
    durability.daemon_wait = TimeoutOf(options.durability.daemon_wait_ms);
  }
  ASSIGN_OR_RETURN(
      std::unique_ptr<Attachment> attachment,
      Attachment::Attach({.socket = TextOf(options.socket),
                          .job = TextOf(options.job),
                          .reader = options.reader != 0,
                          .rank = options.rank,
                          .world_size = options.world_size,
                          .run = TextOf(options.run),
                          .resume = options.resume != 0,
                          .durability = durability,
                          .layout = std::move(spec),
                          .memory = {.grad_arena_bytes = options.memory.grad_arena_bytes,
                                     .extra_state_bytes = options.memory.extra_state_bytes},
                          .timeout = TimeoutOf(options.timeout_ms)}));
  auto made = std::make_unique<forebay_session>();
  made->attachment = std::move(attachment);
  *session = made.release();  // forebay_free() owns it again
  return absl::OkStatus();
}

forebay_lease LeaseOf(const forebay::client::Lease& lease) {
  return {.id = lease.id,
          .group = lease.partition,
          .reserved = 0,
          .bytes = lease.bytes.data(),
          .size_bytes = lease.bytes.size()};
}

FetchTicket TicketOf(const forebay_ticket& ticket) {
  return {.id = ticket.id, .partition = ticket.group};
}

}  // namespace

extern "C" {

uint32_t forebay_abi_version(void) { return FOREBAY_ABI_VERSION; }

int32_t forebay_last_error_id(void) { return last_error.id; }
const char* forebay_last_error_message(void) { return last_error.message.c_str(); }
const char* forebay_last_error_hint(void) { return last_error.hint.c_str(); }
int32_t forebay_last_error_retryable(void) { return last_error.retryable ? 1 : 0; }

const char* forebay_error_name(int32_t code) {
  if (code == FOREBAY_OK) return "OK";
  return forebay::protocol::Info(static_cast<ErrorId>(code)).name.data();
}

int32_t forebay_attach(const forebay_options* options, forebay_session** session) {
  return Guard([&]() -> absl::Status {
    if (options == nullptr) return NullArgument("options");
    if (session == nullptr) return NullArgument("session");
    RETURN_IF_ERROR(CheckSize("options", options->struct_size, sizeof(*options)));
    *session = nullptr;
    return AttachTo(*options, session);
  });
}

int32_t forebay_get_info(const forebay_session* session, struct forebay_info* info) {
  return With(session, [&](const Attachment& attachment) -> absl::Status {
    if (info == nullptr) return NullArgument("info");
    RETURN_IF_ERROR(CheckSize("info", info->struct_size, sizeof(*info)));
    *info = {.struct_size = sizeof(*info),
             .committed_step = attachment.committed_step(),
             .writes_initial = attachment.writes_initial() ? 1 : 0,
             .group_count = static_cast<uint32_t>(attachment.layout().groups().size()),
             .weights = attachment.weights().data(),
             .weights_bytes = attachment.weights().size(),
             .extra_state = attachment.extra_state().data(),
             .extra_state_bytes = attachment.extra_state().size()};
    return absl::OkStatus();
  });
}

int32_t forebay_get_group(const forebay_session* session, uint32_t group,
                          struct forebay_group* place) {
  return With(session, [&](const Attachment& attachment) -> absl::Status {
    if (place == nullptr) return NullArgument("place");
    RETURN_IF_ERROR(CheckSize("place", place->struct_size, sizeof(*place)));
    const forebay::protocol::Layout& layout = attachment.layout();
    RETURN_IF_ERROR(attachment.CheckPartition(group));
    const forebay::protocol::GroupPlace& found = layout.groups()[group];
    *place = {.struct_size = sizeof(*place),
              .weights_offset_bytes = found.weights_offset_bytes,
              .elems = found.elems,
              .size_bytes = layout.partition_bytes(group)};
    return absl::OkStatus();
  });
}

int32_t forebay_write_initial(forebay_session* session, uint32_t group, const void* bytes,
                              size_t size_bytes, int64_t timeout_ms) {
  return With(session, [&](Attachment& attachment) {
    if (bytes == nullptr) return NullArgument("bytes");
    return attachment.WriteInitial(group, BytesOf(bytes, size_bytes), TimeoutOf(timeout_ms));
  });
}

int32_t forebay_initial_done(forebay_session* session, int64_t timeout_ms) {
  return With(session, [&](Attachment& attachment) {
    return attachment.InitialDone(TimeoutOf(timeout_ms));
  });
}

int32_t forebay_fetch(forebay_session* session, uint32_t group, int64_t timeout_ms,
                      forebay_lease* lease) {
  return With(session, [&](Attachment& attachment) -> absl::Status {
    if (lease == nullptr) return NullArgument("lease");
    ASSIGN_OR_RETURN(const forebay::client::Lease fetched,
                     attachment.Fetch(group, TimeoutOf(timeout_ms)));
    *lease = LeaseOf(fetched);
    return absl::OkStatus();
  });
}

int32_t forebay_start_fetch(forebay_session* session, uint32_t group, forebay_ticket* ticket) {
  return With(session, [&](Attachment& attachment) -> absl::Status {
    if (ticket == nullptr) return NullArgument("ticket");
    ASSIGN_OR_RETURN(const FetchTicket started, attachment.StartFetch(group));
    *ticket = {.id = started.id, .group = started.partition, .reserved = 0};
    return absl::OkStatus();
  });
}

int32_t forebay_is_fetch_done(forebay_session* session, const forebay_ticket* ticket,
                              int32_t* done) {
  return With(session, [&](Attachment& attachment) -> absl::Status {
    if (ticket == nullptr) return NullArgument("ticket");
    if (done == nullptr) return NullArgument("done");
    ASSIGN_OR_RETURN(const bool is_done, attachment.IsFetchDone(TicketOf(*ticket)));
    *done = is_done ? 1 : 0;
    return absl::OkStatus();
  });
}

int32_t forebay_finish_fetch(forebay_session* session, const forebay_ticket* ticket,
                             int64_t timeout_ms, forebay_lease* lease) {
  return With(session, [&](Attachment& attachment) -> absl::Status {
    if (ticket == nullptr) return NullArgument("ticket");
    if (lease == nullptr) return NullArgument("lease");
    ASSIGN_OR_RETURN(const forebay::client::Lease fetched,
                     attachment.FinishFetch(TicketOf(*ticket), TimeoutOf(timeout_ms)));
    *lease = LeaseOf(fetched);
    return absl::OkStatus();
  });
}

int32_t forebay_cancel_fetch(forebay_session* session, const forebay_ticket* ticket) {
  return With(session, [&](Attachment& attachment) {
    if (ticket == nullptr) return NullArgument("ticket");
    return attachment.CancelFetch(TicketOf(*ticket));
  });
}

int32_t forebay_release(forebay_session* session, const forebay_lease* lease) {
  return With(session, [&](Attachment& attachment) {
    if (lease == nullptr) return NullArgument("lease");
    return attachment.Release({.id = lease->id, .partition = lease->group, .bytes = {}});
  });
}

int32_t forebay_add_gradient(forebay_session* session, uint32_t param, const void* bytes,
                             size_t size_bytes, int64_t timeout_ms) {
  return With(session, [&](Attachment& attachment) {
    if (bytes == nullptr) return NullArgument("bytes");
    return attachment.AddGradient(param, BytesOf(bytes, size_bytes), TimeoutOf(timeout_ms));
  });
}

int32_t forebay_flush_gradients(forebay_session* session, uint32_t group) {
  return With(session, [&](Attachment& attachment) {
    return attachment.FlushGradients(group == FOREBAY_ALL_GROUPS ? std::nullopt
                                                                 : std::optional(group));
  });
}

int32_t forebay_grad_slot(forebay_session* session, uint32_t group, int64_t timeout_ms,
                          void** bytes, uint64_t* size_bytes) {
  return With(session, [&](Attachment& attachment) -> absl::Status {
    if (bytes == nullptr) return NullArgument("bytes");
    ASSIGN_OR_RETURN(
        const std::span<std::byte> slot,
        attachment.GradSlot(group, forebay::client::GradFill::kZero, TimeoutOf(timeout_ms)));
    *bytes = slot.data();
    if (size_bytes != nullptr) *size_bytes = slot.size();
    return absl::OkStatus();
  });
}

int32_t forebay_grad_ready(forebay_session* session, uint32_t group) {
  return With(session, [&](Attachment& attachment) { return attachment.GradReady(group); });
}

int32_t forebay_drop_gradients(forebay_session* session) {
  return With(session, [](Attachment& attachment) { return attachment.DropGradients(); });
}

int32_t forebay_step(forebay_session* session, const forebay_step_args* args, int64_t timeout_ms,
                     forebay_step_result* result) {
  return With(session, [&](Attachment& attachment) -> absl::Status {
    if (args == nullptr) return NullArgument("args");
    RETURN_IF_ERROR(CheckSize("args", args->struct_size, sizeof(*args)));
    if (args->hyper == nullptr && args->hyper_count > 0) return NullArgument("hyper");
    if (args->extra_state == nullptr && args->extra_state_bytes > 0) {
      return NullArgument("extra_state");
    }
    std::vector<forebay::protocol::HyperParams> hyper;
    for (const forebay_hyper& one : std::span(args->hyper, args->hyper_count)) {
      hyper.push_back(std::bit_cast<forebay::protocol::HyperParams>(one));  // equal fields
    }
    ASSIGN_OR_RETURN(const forebay::client::StepResult done,
                     attachment.Step(args->step, hyper, args->max_grad_norm,
                                     BytesOf(args->extra_state, args->extra_state_bytes),
                                     TimeoutOf(timeout_ms)));
    if (result != nullptr) {
      *result = {.committed_step = done.committed_step,
                 .norm = done.norm,
                 .clipped = done.clipped ? 1 : 0,
                 .repeated = done.repeated ? 1 : 0};
    }
    return absl::OkStatus();
  });
}

int32_t forebay_read_state(forebay_session* session, const forebay_state_args* args, float* values,
                           int64_t timeout_ms, uint64_t* step) {
  return With(session, [&](Attachment& attachment) -> absl::Status {
    if (args == nullptr) return NullArgument("args");
    RETURN_IF_ERROR(CheckSize("args", args->struct_size, sizeof(*args)));
    if (values == nullptr && args->elems > 0) return NullArgument("values");
    ASSIGN_OR_RETURN(const uint64_t updates,
                     attachment.ReadState({.param = TextOf(args->param),
                                           .state = TextOf(args->state),
                                           .first_elem = args->first_elem},
                                          {values, args->elems}, TimeoutOf(timeout_ms)));
    if (step != nullptr) *step = updates;
    return absl::OkStatus();
  });
}

int32_t forebay_detach(forebay_session* session) {
  return With(session, [](Attachment& attachment) { return attachment.Detach(); });
}

void forebay_free(forebay_session* session) {
  const std::unique_ptr<forebay_session> owned(session);
}

}  // extern "C"
