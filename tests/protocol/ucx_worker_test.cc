// SPDX-License-Identifier: Apache-2.0
// Goal    Messages and their data arrive complete at every size. Memory can be read with its key. Transfers in flight end when
//         their endpoint is destroyed.
// Method  Two workers in this process, over TCP on loopback. The other transports that detect a peer's end need hardware.

#include "protocol/ucx/ucx_worker.h"

#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/status_test.h"

namespace forebay::protocol {
namespace {

constexpr std::chrono::seconds kDeadline{30};

std::vector<std::byte> Bytes(size_t size, unsigned seed) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i * 7 + i / 251);
  return bytes;
}

class UcxWorkerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (std::unique_ptr<UcxWorker>* worker : {&one_, &other_}) {
      ASSERT_OK_AND_ASSIGN(*worker, UcxWorker::Create({.tls = "tcp", .has_remote_reads = true}));
    }
    ASSERT_OK_AND_ASSIGN(to_other_, one_->Connect(other_->address(),
                                                  [this](const auto& status) { error_ = status; }));
  }
  void TearDown() override {
    to_other_.reset();
    one_.reset();
    other_.reset();
  }

  // Makes progress on both workers until `done`. Returns false at the deadline.
  [[nodiscard]] bool Await(const std::function<bool()>& done) {
    const auto end = std::chrono::steady_clock::now() + kDeadline;
    while (!done()) {
      one_->Progress();
      if (other_ != nullptr) other_->Progress();
      if (std::chrono::steady_clock::now() > end) return false;
    }
    return true;
  }

  std::unique_ptr<UcxWorker> one_;
  std::unique_ptr<UcxWorker> other_;
  std::unique_ptr<UcxEndpoint> to_other_;
  std::optional<absl::Status> error_;
};

TEST_F(UcxWorkerTest, MessagesOfEverySizeArriveWhole) {
  for (const size_t size : std::initializer_list<size_t>{0, 1, 63, 4096, 65535, 65536, 65537,
                                                         1 << 20, (32 << 20) + 1}) {
    SCOPED_TRACE(size);
    const std::vector<std::byte> header = Bytes(128, 3);
    const std::vector<std::byte> data = Bytes(size, 5);
    std::vector<std::byte> got_header;
    std::vector<std::byte> got(size);
    bool has_arrived = false;
    other_->SetHandler([&](UcxArrival& arrival) {
      got_header.assign(arrival.header().begin(), arrival.header().end());
      ASSERT_EQ(arrival.size_bytes(), size);
      arrival.Receive(got, nullptr, [&](const absl::Status& status) {
        EXPECT_OK(status);
        has_arrived = true;
      });
    });
    bool was_sent = false;
    to_other_->Send(header, data, nullptr, [&](const absl::Status& status) {
      EXPECT_OK(status);
      was_sent = true;
    });
    ASSERT_TRUE(Await([&] { return has_arrived && was_sent; }));
    EXPECT_EQ(got_header, header);
    EXPECT_EQ(got, data);
  }
  EXPECT_EQ(to_other_->in_flight(), 0u);
}

TEST_F(UcxWorkerTest, DataThatNobodyReceivesIsDropped) {
  const std::vector<std::byte> data = Bytes(1 << 20, 5);
  int arrived = 0;
  other_->SetHandler([&](UcxArrival&) { ++arrived; });
  int sent = 0;
  for (int i = 0; i < 3; ++i) {
    to_other_->Send(Bytes(16, 1), data, nullptr, [&](const absl::Status&) { ++sent; });
  }
  ASSERT_TRUE(Await([&] { return arrived == 3 && sent == 3; }));
}

TEST_F(UcxWorkerTest, MemoryIsReadWithItsKey) {
  const std::vector<std::byte> memory = Bytes(3 << 20, 9);
  ASSERT_OK_AND_ASSIGN(const auto mapped, other_->Map(memory));
  ASSERT_OK(to_other_->SetRemoteMemory(mapped->key()));
  std::vector<std::byte> got(1 << 20);
  bool is_done = false;
  to_other_->Get(got, reinterpret_cast<uint64_t>(memory.data()) + 4096, nullptr,
                 [&](const absl::Status& status) {
                   EXPECT_OK(status);
                   is_done = true;
                 });
  ASSERT_TRUE(Await([&] { return is_done; }));
  EXPECT_EQ(std::memcmp(got.data(), memory.data() + 4096, got.size()), 0);
  EXPECT_FALSE(to_other_->reads_in_hardware());
}

TEST_F(UcxWorkerTest, WhatIsUnderWayEndsWithItsEndpoint) {
  const auto data = std::make_shared<const std::vector<std::byte>>(Bytes(32 << 20, 5));
  int ended = 0;
  for (int i = 0; i < 4; ++i) {
    to_other_->Send(Bytes(16, 1), *data, data, [&](const absl::Status&) { ++ended; });
  }
  one_->Progress();
  to_other_.reset();
  ASSERT_TRUE(Await([&] { return ended == 4; }));
  EXPECT_EQ(data.use_count(), 1);
}

TEST(UcxWorker, AnUnknownTransportIsNamed) {
  const auto worker = UcxWorker::Create({.tls = "smoke"});
  EXPECT_EQ(IdOf(worker.status()), ErrorId::kUnsupported);
  EXPECT_THAT(std::string(worker.status().message()), ::testing::HasSubstr("smoke"));
}

}  // namespace
}  // namespace forebay::protocol
