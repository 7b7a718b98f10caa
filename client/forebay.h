// SPDX-License-Identifier: Apache-2.0
/* Forebay's client in C: one session of a training process. C99; every function returns a code. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change that an older program would misread. */
#define FOREBAY_ABI_VERSION 3
#define FOREBAY_OK 0
#define FOREBAY_ALL_GROUPS UINT32_MAX

/* Returned codes: FOREBAY_OK, or a number that forebay_error_name() turns into "E_DAEMON_GONE" and
 * so on.
 *
 * Threads    Any; calls on one session are serialised, one that waits holds up the others.
 * Timeouts   Milliseconds; negative: none. The outcome of a call that ran out of time is unknown.
 * Ownership  Pointers into windows live until forebay_free(); strings of errors until this
 *            thread's next call.
 */
struct forebay_session;

struct forebay_param {
  const char* name;      /* unique */
  const uint64_t* shape; /* `dims` dimensions, none of them 0 */
  uint32_t dims;
  uint32_t group;       /* unit of fetch and gradient; ascends from 0 without a gap */
  uint32_t param_group; /* which hyper-parameters */
  int32_t frozen;       /* 1: weights alone, never updated; best listed behind the trained ones */
};

/* Memory of one session. */
struct forebay_memory {
  uint64_t grad_arena_bytes;  /* 0: 4 pieces of at most 32 MiB, sharded 2; of a reader 1 MiB */
  uint64_t extra_state_bytes; /* room for extra_state of one step */
};

/* Faults that a job and a session survive. Not of a reader. */
struct forebay_durability {
  /* What a power cut, or the daemon's death, can undo of the job's training. "memory": all of it; "epoch=N": at
     most N steps; "step": no step that was answered. The first rank of a new job decides for its life; another level
     is then refused with E_OPTION. NULL: the job's, of a new one the daemon's default. */
  const char* level;
  /* How long a call waits for a daemon that is being restarted, within its own time; the session then continues, or
     has ended with E_DAEMON_GONE. 0: FOREBAY_DAEMON_WAIT in seconds, else 60000; negative: no limit. */
  int64_t daemon_wait_ms;
};

struct forebay_options {
  size_t struct_size; /* sizeof(struct forebay_options) */
  const char* socket; /* NULL: FOREBAY_SOCKET, else /run/forebay/forebay.sock */
  const char* job;
  uint32_t rank;
  uint32_t world_size;
  const char* dtype;     /* "float32", "bfloat16", "float16" */
  const char* optimizer; /* "adamw", "sgd", ...: E_OPTION of an unknown name lists all */
  const char* format;    /* "fp32"; for bfloat16 also "exact", "bf16", "int8" */
  const struct forebay_param* params;
  size_t param_count;
  const char* const* group_names; /* one a group */
  size_t group_count;
  struct forebay_memory memory;
  int64_t timeout_ms; /* of attach and of calls without their own */
  uint64_t seed;      /* of the stochastic rounding of formats bf16 and int8 */
  /* The run that this process belongs to, at most 200 printable ASCII characters without spaces;
     NULL: FOREBAY_RUN, else this process alone. All ranks of a job need the same run: if a job has
     several ranks, set this field or FOREBAY_RUN. Another run's job is refused with E_JOB_EXISTS unless
     `resume` is 1, and with E_BUSY while processes of that run are attached. */
  const char* run;
  int32_t resume;
  /* 1: attaches to a job that exists, without a rank: reads weights and states, delivers nothing.
     The ranks never wait for it longer than the daemon's reader.lease_max; then its session ends.
     `rank` is not read. */
  int32_t reader;
  struct forebay_durability durability;
};

struct forebay_info {
  size_t struct_size; /* sizeof(struct forebay_info), set by the caller */
  uint64_t committed_step;
  /* 1: this session must write every group, then call initial_done. Of a new job it is rank 0, which the attaches of the
     others wait for. */
  int32_t writes_initial;
  uint32_t group_count;
  const void* weights; /* the whole window, read-only */
  uint64_t weights_bytes;
  const void* extra_state; /* of this rank and the step found at attach */
  uint64_t extra_state_bytes;
};

struct forebay_group {
  size_t struct_size; /* sizeof(struct forebay_group), set by the caller */
  uint64_t weights_offset_bytes;
  uint64_t elems;
  uint64_t size_bytes;
};

struct forebay_lease {
  uint64_t id;
  uint32_t group;
  uint32_t reserved;
  const void* bytes; /* the group within the window */
  uint64_t size_bytes;
};

/* A fetch in flight. */
struct forebay_ticket {
  uint64_t id;
  uint32_t group;
  uint32_t reserved;
};

/* Hyper-parameters of one parameter group, named as torch names them. An optimizer reads those that
   it has. */
struct forebay_hyper {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double momentum;
  double dampening;
  double lr_decay;
  double initial_accumulator_value;
};

struct forebay_step_args {
  size_t struct_size; /* sizeof(struct forebay_step_args) */
  uint64_t step;      /* committed_step + 1; a repeat is answered, not applied again */
  const struct forebay_hyper* hyper;
  size_t hyper_count;   /* one a parameter group */
  double max_grad_norm; /* 0: no clipping */
  const void* extra_state;
  size_t extra_state_bytes;
};

struct forebay_step_result {
  uint64_t committed_step;
  double norm; /* before clipping; 0 without max_grad_norm */
  int32_t clipped;
  int32_t repeated;
};

struct forebay_state_args {
  size_t struct_size; /* sizeof(struct forebay_state_args) */
  const char* param;  /* by name */
  const char* state;  /* "master", or a moment as torch calls it: "exp_avg", "sum", ... */
  uint64_t first_elem;
  uint64_t elems;
};

uint32_t forebay_abi_version(void); /* of the library; compare with FOREBAY_ABI_VERSION */

/* This thread's newest error; FOREBAY_OK and empty strings before the first. */
int32_t forebay_last_error_id(void);
const char* forebay_last_error_message(void);
const char* forebay_last_error_hint(void);
int32_t forebay_last_error_retryable(void); /* 1: attach again or release something, then retry */
const char* forebay_error_name(int32_t code);

/* Waits until other jobs have made room, the job's memory is created, the initial parameters are
 * written, a step in progress has ended and an older session of the rank is closed. */
int32_t forebay_attach(const struct forebay_options* options, struct forebay_session** session);
int32_t forebay_get_info(const struct forebay_session* session, struct forebay_info* info);
int32_t forebay_get_group(const struct forebay_session* session, uint32_t group,
                          struct forebay_group* place);

/* The initial parameters: all bytes of a group. */
int32_t forebay_write_initial(struct forebay_session* session, uint32_t group, const void* bytes,
                              size_t size_bytes, int64_t timeout_ms);
int32_t forebay_initial_done(struct forebay_session* session, int64_t timeout_ms);

/* Waits until the group's weights are those of the committed step. They do not change before
 * forebay_release(); forebay_step() is refused while a lease is held. */
int32_t forebay_fetch(struct forebay_session* session, uint32_t group, int64_t timeout_ms,
                      struct forebay_lease* lease);
int32_t forebay_release(struct forebay_session* session, const struct forebay_lease* lease);

/* The same without waiting: start_fetch asks and returns, is_fetch_done looks, finish_fetch waits and
 * returns the lease, cancel_fetch cancels (a lease that arrives later is released). A ticket is used
 * up by cancel_fetch, and by a finish_fetch that does not return E_TIMEOUT. */
int32_t forebay_start_fetch(struct forebay_session* session, uint32_t group,
                            struct forebay_ticket* ticket);
int32_t forebay_is_fetch_done(struct forebay_session* session, const struct forebay_ticket* ticket,
                              int32_t* done);
int32_t forebay_finish_fetch(struct forebay_session* session, const struct forebay_ticket* ticket,
                             int64_t timeout_ms, struct forebay_lease* lease);
int32_t forebay_cancel_fetch(struct forebay_session* session, const struct forebay_ticket* ticket);

/* Gradients travel in pieces, ranges of a group of at most 32 MiB. Two ways to deliver, a group by one
 * of them in a step:
 *
 *   a parameter at a time   add_gradient copies the whole gradient of parameter `param` (its index in
 *                           `params`) into the pieces it lies in, and delivers each piece as soon as
 *                           all its parameters are complete. flush_gradients delivers the rest: call it
 *                           with a group where no more gradients of it will come, and with
 *                           FOREBAY_ALL_GROUPS at the end of backward.
 *   a group at a time       grad_slot gives room for the group's gradient, zeroed when it is new;
 *                           grad_ready delivers it.
 *
 * A parameter without a gradient on any rank is not updated; with one on some, the others count as
 * zero. drop_gradients restarts the step: the gradients that ranks have delivered are discarded. */
int32_t forebay_add_gradient(struct forebay_session* session, uint32_t param, const void* bytes,
                             size_t size_bytes, int64_t timeout_ms);
int32_t forebay_flush_gradients(struct forebay_session* session, uint32_t group);
int32_t forebay_grad_slot(struct forebay_session* session, uint32_t group, int64_t timeout_ms,
                          void** bytes, uint64_t* size_bytes);
int32_t forebay_grad_ready(struct forebay_session* session, uint32_t group);
int32_t forebay_drop_gradients(struct forebay_session* session);

/* `result` may be NULL. */
int32_t forebay_step(struct forebay_session* session, const struct forebay_step_args* args,
                     int64_t timeout_ms, struct forebay_step_result* result);

/* Reads `elems` elements of one state of a parameter as float32, in the order of its elements,
 * whatever the format holds it in. `step`, which may be NULL, is how many updates the parameter has
 * had. */
int32_t forebay_read_state(struct forebay_session* session, const struct forebay_state_args* args,
                           float* values, int64_t timeout_ms, uint64_t* step);

/* Ends the session in good order; the weights stay mapped. */
int32_t forebay_detach(struct forebay_session* session);
/* NULL is allowed. Without a detach before it the daemon counts the rank as lost. */
void forebay_free(struct forebay_session* session);

#ifdef __cplusplus
}
#endif
