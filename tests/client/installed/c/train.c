// SPDX-License-Identifier: Apache-2.0
/* The same training as ../cpp/train.cc, through the C ABI; a reader then looks at the moments. */
#include <forebay.h>
#include <stdio.h>
#include <string.h>

static int failed(const char* what) {
  fprintf(stderr, "%s: %s: %s (%s)\n", what, forebay_error_name(forebay_last_error_id()),
          forebay_last_error_message(), forebay_last_error_hint());
  return 1;
}

/* In odd steps a parameter at a time with a fetch that does not wait, in even ones a group at a time. */
static int gradient(struct forebay_session* session, int step) {
  struct forebay_ticket ticket;
  struct forebay_lease lease;
  int32_t done = 0;
  void* slot = 0;
  uint64_t slot_bytes = 0;
  float values[2];
  if (step % 2 == 0) {
    if (forebay_fetch(session, 0, 30000, &lease)) return failed("fetch");
    if (forebay_grad_slot(session, 0, 30000, &slot, &slot_bytes)) return failed("slot");
    memcpy(slot, lease.bytes, sizeof(values));
    if (forebay_release(session, &lease)) return failed("release");
    return forebay_grad_ready(session, 0) ? failed("ready") : 0;
  }
  if (forebay_start_fetch(session, 0, &ticket)) return failed("start");
  if (forebay_is_fetch_done(session, &ticket, &done)) return failed("is done");
  if (forebay_finish_fetch(session, &ticket, 30000, &lease)) return failed("finish");
  if (forebay_cancel_fetch(session, &ticket) == FOREBAY_OK) return 1; /* it is used up */
  memcpy(values, lease.bytes, sizeof(values));
  if (forebay_release(session, &lease)) return failed("release");
  if (forebay_add_gradient(session, 0, values, sizeof(values), 30000)) return failed("add");
  return forebay_flush_gradients(session, FOREBAY_ALL_GROUPS) ? failed("flush") : 0;
}

/* A reader has no rank: it reads the states of the committed step and can deliver nothing. */
static int look(const struct forebay_options* trainer) {
  struct forebay_options options = *trainer;
  struct forebay_session* reader = 0;
  struct forebay_state_args args;
  float moments[2];
  uint64_t updates = 0;
  options.reader = 1;
  if (forebay_attach(&options, &reader)) return failed("attach a reader");
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.param = "w";
  args.state = "exp_avg_sq";
  args.elems = 2;
  if (forebay_read_state(reader, &args, moments, 30000, &updates)) return failed("read");
  if (updates == 0 || moments[0] <= 0 || moments[1] <= 0) return 1;
  if (forebay_grad_ready(reader, 0) == FOREBAY_OK) return 1;
  if (forebay_detach(reader)) return failed("detach the reader");
  forebay_free(reader);
  return 0;
}

static int train(struct forebay_session* session) {
  const float initial[2] = {1.0F, -2.0F};
  const struct forebay_hyper hyper = {.lr = 0.25, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
  struct forebay_info info;
  float values[2];
  int i;
  memset(&info, 0, sizeof(info));
  info.struct_size = sizeof(info);
  if (forebay_get_info(session, &info) != FOREBAY_OK) return failed("info");
  if (info.writes_initial) {
    if (forebay_write_initial(session, 0, initial, sizeof(initial), 30000)) return failed("write");
    if (forebay_initial_done(session, 30000)) return failed("done");
  }
  for (i = 1; i <= 3; ++i) {
    struct forebay_step_args args;
    struct forebay_step_result result;
    if (gradient(session, i)) return 1;
    memset(&args, 0, sizeof(args));
    args.struct_size = sizeof(args);
    args.step = info.committed_step + (uint64_t)i;
    args.hyper = &hyper;
    args.hyper_count = 1;
    if (forebay_step(session, &args, 30000, &result)) return failed("step");
    if (result.committed_step != args.step) return 1;
  }
  if (forebay_get_info(session, &info) != FOREBAY_OK) return failed("info");
  memcpy(values, info.weights, sizeof(values));
  printf("step %llu: %.4f %.4f\n", (unsigned long long)info.committed_step, (double)values[0],
         (double)values[1]);
  return forebay_detach(session) ? failed("detach") : 0;
}

int main(void) {
  const uint64_t shape[1] = {2};
  struct forebay_param param;
  const char* const groups[1] = {"all"};
  struct forebay_options options;
  struct forebay_session* session = 0;
  int status;
  memset(&param, 0, sizeof(param));
  param.name = "w";
  param.shape = shape;
  param.dims = 1;
  memset(&options, 0, sizeof(options));
  if (forebay_abi_version() != FOREBAY_ABI_VERSION) return 2;
  /* A struct of another size is refused, and the error says why. */
  if (forebay_attach(&options, &session) == FOREBAY_OK || session != 0) return 3;
  if (strcmp(forebay_error_name(forebay_last_error_id()), "E_PROTOCOL") != 0) return 4;
  options.struct_size = sizeof(options);
  options.job = "installed-c";
  options.world_size = 1;
  options.dtype = "float32";
  options.optimizer = "adamw";
  options.format = "fp32";
  options.params = &param;
  options.param_count = 1;
  options.group_names = groups;
  options.group_count = 1;
  options.timeout_ms = 30000;
  options.durability.daemon_wait_ms = 30000;
  options.durability.level = "hourly";
  if (forebay_attach(&options, &session) == FOREBAY_OK || session != 0) return 5;
  if (strcmp(forebay_error_name(forebay_last_error_id()), "E_OPTION") != 0) return 6;
  options.durability.level = "memory";
  if (forebay_attach(&options, &session) != FOREBAY_OK) return failed("attach");
  status = train(session);
  if (status == 0) status = look(&options);
  forebay_free(session);
  forebay_free(0);
  return status;
}
