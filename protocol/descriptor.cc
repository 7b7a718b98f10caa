// SPDX-License-Identifier: Apache-2.0
#include "protocol/descriptor.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::protocol {

void SetOutcome(const absl::Status& status, schema::Outcome::Builder outcome) {
  if (status.ok()) return;
  const std::string message(status.message());
  outcome.setError(static_cast<uint16_t>(IdOf(status)));
  outcome.setMessage(kj::StringPtr(message.c_str(), message.size()));
  const std::string hint = HintOf(status);
  if (!hint.empty()) outcome.setHint(kj::StringPtr(hint.c_str(), hint.size()));
}

absl::Status StatusOf(schema::Outcome::Reader outcome) {
  if (outcome.getError() == 0) return absl::OkStatus();
  return MakeError(Info(static_cast<ErrorId>(outcome.getError())).id, outcome.getMessage().cStr(),
                   outcome.getHint().cStr());
}

absl::Status StatusOf(const kj::Exception& exception, std::string_view what) {
  const std::string text(exception.getDescription().cStr());
  if (exception.getType() == kj::Exception::Type::DISCONNECTED) {
    if (const absl::Status refusal = ParseError(text); !refusal.ok()) return refusal;
    return MakeError(
        ErrorId::kDaemonGone,
        absl::StrCat(std::string(what), ": the daemon died or closed the connection: ", text));
  }
  return MakeError(ErrorId::kProtocol, absl::StrCat(std::string(what), ": ", text));
}

}  // namespace forebay::protocol
