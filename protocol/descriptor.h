// SPDX-License-Identifier: Apache-2.0
// Values of the schema: a capability that carries a descriptor, and outcomes.
#pragma once

#include <capnp/capability.h>
#include <kj/exception.h>

#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "protocol/forebay.capnp.h"
#include "protocol/os/unique_fd.h"

namespace forebay::protocol {

// Owns a descriptor. A peer that holds the capability over a connection that passes descriptors gets a copy of the descriptor.
class DescriptorServer final : public schema::Descriptor::Server {
 public:
  explicit DescriptorServer(UniqueFd fd) : fd_(std::move(fd)) {}
  kj::Maybe<int> getFd() override { return fd_.get(); }

 private:
  UniqueFd fd_;
};

inline schema::Descriptor::Client MakeDescriptor(UniqueFd fd) {
  return kj::heap<DescriptorServer>(std::move(fd));
}

void SetOutcome(const absl::Status& status, schema::Outcome::Builder outcome);

// The status that was passed to SetOutcome: id, message and hint. Numbers this side does not know are
// E_INTERNAL.
absl::Status StatusOf(schema::Outcome::Reader outcome);

// Converts a broken connection to a Status: the error with which the peer aborted the connection, E_DAEMON_GONE if the peer has
// died or closed it, else E_PROTOCOL. `what` names the call.
absl::Status StatusOf(const kj::Exception& exception, std::string_view what);

}  // namespace forebay::protocol
