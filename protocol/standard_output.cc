// SPDX-License-Identifier: Apache-2.0
#include "protocol/standard_output.h"

#include <signal.h>

#include <cerrno>
#include <cstdio>

#include "protocol/error.h"

namespace forebay::protocol {

absl::Status WriteOutput(std::string_view text) {
  ::signal(SIGPIPE, SIG_IGN);
  const bool is_written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (is_written && std::fflush(stdout) == 0) return absl::OkStatus();
  const int error = errno;
  if (error == EPIPE) return absl::CancelledError("the reader of standard output has gone");
  return MakeError(ErrorId::kLimit, ErrnoText("write to standard output", error),
                   "make room where standard output goes, or send it elsewhere; then start the "
                   "command again");
}

}  // namespace forebay::protocol
