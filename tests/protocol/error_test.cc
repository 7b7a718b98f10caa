// SPDX-License-Identifier: Apache-2.0
// Goal    Every error has the same id, code and hint after it was sent through a Status, a control-plane message or the
//         terminal. Sizes parse to the value that was formatted.
// Method  The whole table, and a list of sizes.

#include "protocol/error.h"

#include <capnp/message.h>

#include <set>
#include <string>

#include "gtest/gtest.h"
#include "protocol/descriptor.h"
#include "protocol/units.h"
#include "tests/support/status_test.h"

namespace forebay::protocol::error_test {
namespace {

TEST(ErrorTable, HasEachNumberAndNameOnce) {
  std::set<int> numbers;
  std::set<std::string_view> names;
  for (const ErrorInfo& info : AllErrors()) {
    EXPECT_TRUE(numbers.insert(static_cast<int>(info.id)).second) << info.name;
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_TRUE(info.name.starts_with("E_")) << info.name;
    EXPECT_EQ(ErrorIdFromName(info.name), info.id);
    EXPECT_EQ(Info(info.id).name, info.name);
  }
  EXPECT_EQ(numbers.size(), 41U);
  EXPECT_EQ(*numbers.rbegin(), 41);
  EXPECT_EQ(Info(static_cast<ErrorId>(999)).id, ErrorId::kInternal);
}

TEST(ErrorTable, HasAHintOfItsOwnForEachId) {
  std::set<std::string> hints;
  for (const ErrorInfo& info : AllErrors()) {
    const std::string hint = HintOf(MakeError(info.id, "said without one"));
    EXPECT_FALSE(hint.empty()) << info.name;
    EXPECT_TRUE(hints.insert(hint).second) << info.name << " has another's: " << hint;
  }
}

TEST(Outcome, CarriesIdMessageAndHint) {
  for (const ErrorInfo& info : AllErrors()) {
    capnp::MallocMessageBuilder message;
    auto outcome = message.initRoot<schema::Outcome>();
    const absl::Status sent = MakeError(info.id, "rank 1 of 2", "attach again");
    SetOutcome(sent, outcome);
    const absl::Status received = StatusOf(outcome.asReader());
    EXPECT_EQ(IdOf(received), info.id);
    EXPECT_EQ(received.code(), sent.code());
    EXPECT_EQ(received.message(), sent.message());
    EXPECT_EQ(HintOf(received), "attach again");
    EXPECT_EQ(FormatError(received),
              "error[" + std::string(info.name) + "]: rank 1 of 2\nhint: attach again");
    EXPECT_EQ(ParseError("remote exception: " + FormatError(sent)), sent);
  }
  capnp::MallocMessageBuilder message;
  auto outcome = message.initRoot<schema::Outcome>();
  SetOutcome(absl::OkStatus(), outcome);
  EXPECT_OK(StatusOf(outcome.asReader()));
  outcome.setError(60'000);  // an error id of a newer peer
  EXPECT_EQ(IdOf(StatusOf(outcome.asReader())), ErrorId::kInternal);
}

TEST(Outcome, OfABrokenConnectionIsTheDaemonsEnd) {
  const kj::Exception gone(kj::Exception::Type::DISCONNECTED, "file", 1, kj::str("peer is gone"));
  EXPECT_THAT(StatusOf(gone, "status"), testing::HasError(ErrorId::kDaemonGone));
  EXPECT_OK(ParseError("peer is gone"));
  EXPECT_OK(ParseError("error[of an older peer"));
  const kj::Exception refused(
      kj::Exception::Type::DISCONNECTED, "file", 1,
      kj::str("remote exception: ", FormatError(MakeError(ErrorId::kLimit, "9 of 9")).c_str()));
  EXPECT_THAT(StatusOf(refused, "hello"), testing::HasError(ErrorId::kLimit));
  const kj::Exception bug(kj::Exception::Type::FAILED, "file", 1, kj::str("no such method"));
  EXPECT_THAT(StatusOf(bug, "status"), testing::HasError(ErrorId::kProtocol));
}

TEST(Units, ReadWhatPeopleWrite) {
  EXPECT_EQ(*ParseBytes("4096"), 4096U);
  EXPECT_EQ(*ParseBytes("64KiB"), 64 * kKiB);
  EXPECT_EQ(*ParseBytes("1.5 GiB"), 3 * kGiB / 2);
  EXPECT_EQ(*ParseBytes("2tib"), 2048 * kGiB);
  for (const char* text : {"", "much", "-1", "1GB", "1 2", "9999999TiB", "nan", "1e400"}) {
    EXPECT_FALSE(ParseBytes(text).ok()) << text;
  }
  EXPECT_EQ(FormatBytes(371), "371 B");
  EXPECT_EQ(FormatBytes(412 * kGiB), "412.0 GiB");
  EXPECT_EQ(RoundUp(1, 4096), 4096U);
  EXPECT_EQ(RoundUp(4096, 4096), 4096U);
  EXPECT_EQ(RoundUp(0, 4096), 0U);
}

TEST(Unshared, IsTheSameErrorInMemoryOfItsOwn) {
  const absl::Status status = MakeError(ErrorId::kRing, "index 9 of 4", "end the client");
  const absl::Status own = Unshared(status);
  EXPECT_EQ(own, status);
  EXPECT_NE(own.message().data(), status.message().data());
  EXPECT_TRUE(Unshared(absl::OkStatus()).ok());
}

}  // namespace
}  // namespace forebay::protocol::error_test
