// SPDX-License-Identifier: Apache-2.0
// Values of the schema that both modes of the gateway carry.
#pragma once

#include <capnp/capability.h>
#include <capnp/message.h>
#include <kj/common.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "protocol/descriptor.h"
#include "protocol/os/unique_fd.h"
#include "protocol/wire.h"

namespace forebay::gateway {

inline kj::ArrayPtr<const kj::byte> DataOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

inline std::vector<std::byte> BytesOf(capnp::Data::Reader data) {
  const auto* const begin = reinterpret_cast<const std::byte*>(data.begin());
  return {begin, begin + data.size()};
}

// Sends `request`, whose only result is its outcome, and passes the outcome to the call of `context`.
template <typename Context, typename Request>
kj::Promise<void> ForwardForOutcome(Context context, Request request) {
  return request.send().then([context](auto&& response) mutable {
    context.getResults().setOutcome(response.getOutcome());
  });
}

// Forwards the Session.exchange call of `context` to `session`, and passes the result back.
template <typename Context>
kj::Promise<void> ForwardExchange(Context context, schema::Session::Client& session) {
  auto request = session.exchangeRequest();
  request.setBytes(context.getParams().getBytes());
  request.setNumber(context.getParams().getNumber());
  return request.send().then([context](auto&& response) mutable {
    auto results = context.getResults();
    results.setOutcome(response.getOutcome());
    results.setAll(response.getAll());
  });
}

}  // namespace forebay::gateway
