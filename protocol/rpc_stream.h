// SPDX-License-Identifier: Apache-2.0
// Parts that every connection of the control plane shares: limits on the size of messages, the other side's first capability,
// and a server stream that does not accumulate answers.
#pragma once

#include <capnp/message.h>
#include <capnp/rpc-twoparty.h>
#include <capnp/rpc.h>
#include <capnp/serialize-async.h>
#include <kj/async.h>
#include <kj/common.h>

#include "protocol/wire.h"

namespace forebay::protocol {

inline constexpr unsigned kFdsPerMessageMax = 1;

// Limits on messages that a client reads and that a server sends. Cap'n Proto has one limit for both directions of a server.
inline capnp::ReaderOptions AnswerLimits() {
  capnp::ReaderOptions options;
  options.traversalLimitInWords = kAnswerBytesMax / sizeof(capnp::word);
  return options;
}

template <typename Interface>
typename Interface::Client BootstrapOf(capnp::RpcSystem<capnp::rpc::twoparty::VatId>& rpc) {
  capnp::MallocMessageBuilder message;
  auto vat = message.initRoot<capnp::rpc::twoparty::VatId>();
  vat.setSide(capnp::rpc::twoparty::Side::SERVER);
  return rpc.bootstrap(vat).template castAs<Interface>();
}

// A server reads no further call while its unanswered calls have more words than this.
inline constexpr size_t kCallWordsMax = 4096;

// A server's stream. It begins no read while an answer is being written: a client that reads no answers delays itself alone.
// Without that, the library would store every answer, and free the list of them recursively. A request larger than
// kRequestBytesMax is refused.
//
// Messages  One of capnp's: AsyncCapabilityMessageStream, AsyncIoMessageStream.
template <typename Messages>
class AnswersFirst final : public capnp::MessageStream {
 public:
  template <typename Stream>
  explicit AnswersFirst(Stream& stream) : stream_(stream) {}

  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> tryReadMessage(
      kj::ArrayPtr<kj::AutoCloseFd> fds, capnp::ReaderOptions options,
      kj::ArrayPtr<capnp::word> scratch) override {
    options.traversalLimitInWords = kRequestBytesMax / sizeof(capnp::word);
    if (writes_ == 0) return stream_.tryReadMessage(fds, options, scratch);
    auto written = kj::newPromiseAndFulfiller<void>();
    written_ = kj::mv(written.fulfiller);
    return written.promise.then(
        [this, fds, options, scratch] { return stream_.tryReadMessage(fds, options, scratch); });
  }

  kj::Promise<void> writeMessage(
      kj::ArrayPtr<const int> fds,
      kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) override {
    return Counted([&] { return stream_.writeMessage(fds, segments); });
  }

  kj::Promise<void> writeMessages(
      kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) override {
    return Counted([&] { return stream_.writeMessages(messages); });
  }

  kj::Maybe<int> getSendBufferSize() override { return stream_.getSendBufferSize(); }
  kj::Promise<void> end() override { return stream_.end(); }

 private:
  template <typename Write>
  kj::Promise<void> Counted(Write write) {
    ++writes_;
    auto over = kj::defer([this] {
      if (--writes_ == 0 && written_.get() != nullptr) written_->fulfill();
    });
    return write().attach(kj::mv(over));
  }

  Messages stream_;
  int writes_ = 0;
  kj::Own<kj::PromiseFulfiller<void>> written_;  // resolves the read that waits for the next write
};

}  // namespace forebay::protocol
