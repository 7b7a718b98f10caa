/* Forebay's client in C: one session of a training process. C99; every function returns a code. */
#ifndef FOREBAY_H_
#define FOREBAY_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change that an older program would misread. */
#define FOREBAY_ABI_VERSION 1
#define FOREBAY_OK 0

/* Returned codes: FOREBAY_OK, or a number that forebay_error_name() turns into "E_DAEMON_GONE" and
 * so on.
 *
 * Threads    Any; calls on one session are serialised, one that waits holds up the others.
 * Timeouts   Milliseconds; negative: none. The outcome of a call that ran out of time is unknown.
 * Ownership  Pointers into windows live until forebay_free(); strings of errors until this
 *            thread's next call.
 */
typedef struct forebay_session forebay_t;

typedef struct forebay_param {
  const char* name;      /* unique */
  const uint64_t* shape; /* `dims` dimensions, none of them 0 */
  uint32_t dims;
  uint32_t group;       /* unit of fetch and gradient; ascends from 0 without a gap */
  uint32_t param_group; /* which hyper-parameters */
} forebay_param_t;

typedef struct forebay_options {
  size_t struct_size; /* sizeof(forebay_options_t) */
  const char* socket; /* NULL: FOREBAY_SOCKET, else /run/forebay/forebay.sock */
  const char* job;
  uint32_t rank;
  uint32_t world_size;
  const char* dtype;     /* "float32", "bfloat16" */
  const char* optimizer; /* "adamw" */
  const char* format;    /* "fp32", "exact" */
  const forebay_param_t* params;
  size_t param_count;
  const char* const* group_names; /* one a group */
  size_t group_count;
  uint64_t grad_arena_bytes;  /* 0: three times the largest group */
  uint64_t extra_state_bytes; /* room for extra_state of one step */
  int64_t timeout_ms;         /* of attach and of calls without their own */
} forebay_options_t;

typedef struct forebay_info {
  size_t struct_size; /* sizeof(forebay_info_t), set by the caller */
  uint64_t committed_step;
  int32_t writes_initial; /* 1: this session must write every group, then call initial_done */
  uint32_t group_count;
  const void* image; /* the whole window, read-only */
  uint64_t image_bytes;
  const void* extra_state; /* of this rank and the step found at attach */
  uint64_t extra_state_bytes;
} forebay_info_t;

typedef struct forebay_group {
  size_t struct_size; /* sizeof(forebay_group_t), set by the caller */
  uint64_t image_offset_bytes;
  uint64_t elems; /* without padding */
  uint64_t padded_elems;
  uint64_t padded_bytes;
} forebay_group_t;

typedef struct forebay_lease {
  uint64_t id;
  uint32_t group;
  uint32_t reserved;
  const void* bytes; /* the padded group within the window */
  uint64_t size_bytes;
} forebay_lease_t;

typedef struct forebay_hyper {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
} forebay_hyper_t;

typedef struct forebay_step_args {
  size_t struct_size; /* sizeof(forebay_step_args_t) */
  uint64_t step;      /* committed_step + 1; a repeat is answered, not applied again */
  const forebay_hyper_t* hyper;
  size_t hyper_count;   /* one a parameter group */
  double max_grad_norm; /* 0: no clipping */
  const void* extra_state;
  size_t extra_state_bytes;
} forebay_step_args_t;

typedef struct forebay_step_result {
  uint64_t committed_step;
  double norm; /* before clipping; 0 without max_grad_norm */
  int32_t clipped;
  int32_t repeated;
} forebay_step_result_t;

uint32_t forebay_abi_version(void); /* of the library; compare with FOREBAY_ABI_VERSION */

/* This thread's newest error; FOREBAY_OK and empty strings before the first. */
int32_t forebay_last_error_id(void);
const char* forebay_last_error_message(void);
const char* forebay_last_error_hint(void);
int32_t forebay_last_error_retryable(void); /* 1: attach again or wait, then retry */
const char* forebay_error_name(int32_t code);

int32_t forebay_attach(const forebay_options_t* options, forebay_t** session);
int32_t forebay_get_info(const forebay_t* session, forebay_info_t* info);
int32_t forebay_get_group(const forebay_t* session, uint32_t group, forebay_group_t* place);

/* The initial parameters: a group with or without its padding. */
int32_t forebay_write_initial(forebay_t* session, uint32_t group, const void* bytes,
                              size_t size_bytes, int64_t timeout_ms);
int32_t forebay_initial_done(forebay_t* session, int64_t timeout_ms);

int32_t forebay_fetch(forebay_t* session, uint32_t group, int64_t timeout_ms,
                      forebay_lease_t* lease);
int32_t forebay_release(forebay_t* session, const forebay_lease_t* lease);

/* The group's open slot, zeroed when it is new: room for its padded gradient. grad_ready
 * delivers it. */
int32_t forebay_grad_slot(forebay_t* session, uint32_t group, int64_t timeout_ms, void** bytes,
                          uint64_t* size_bytes);
int32_t forebay_grad_ready(forebay_t* session, uint32_t group);
int32_t forebay_drop_gradients(forebay_t* session);

int32_t forebay_step(forebay_t* session, const forebay_step_args_t* args, int64_t timeout_ms,
                     forebay_step_result_t* result); /* result may be NULL */

/* Elements of state plane `plane` from `element_offset` of the padded group on. */
int32_t forebay_read_state(forebay_t* session, uint32_t group, uint32_t plane,
                           uint64_t element_offset, void* bytes, size_t size_bytes,
                           int64_t timeout_ms);

int32_t forebay_detach(
    forebay_t* session);               /* ends the session in good order; the image stays mapped */
void forebay_free(forebay_t* session); /* NULL is fine; without detach the rank counts as lost */

#ifdef __cplusplus
}
#endif

#endif /* FOREBAY_H_ */
