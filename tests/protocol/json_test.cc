// SPDX-License-Identifier: Apache-2.0
// Goal    A message becomes JSON with every field by name, exact numbers, and any bytes in a text.
// Method  Compare messages that hold the extremes of each type with the expected JSON text.

#include "protocol/json.h"

#include <capnp/message.h>

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"
#include "protocol/forebay.capnp.h"

namespace forebay::protocol::json_test {
namespace {

TEST(Json, NamesEachFieldAndKeepsIntegersExact) {
  capnp::MallocMessageBuilder message;
  auto arena = message.initRoot<schema::ArenaStatus>();
  arena.setKind("weights");
  arena.setRank(std::numeric_limits<int32_t>::min());
  auto nodes = arena.initNumaNodes(2);
  nodes.set(0, 0);
  nodes.set(1, UINT32_MAX);
  arena.setSizeBytes(UINT64_MAX);
  arena.setAllocatedBytes((uint64_t{1} << 53) + 1);  // not representable in a double
  arena.setLocked(true);
  EXPECT_EQ(JsonOf(arena.asReader()),
            "{\n"
            "  \"kind\": \"weights\",\n"
            "  \"job\": \"\",\n"
            "  \"rank\": -2147483648,\n"
            "  \"numa_nodes\": [\n"
            "    0,\n"
            "    4294967295\n"
            "  ],\n"
            "  \"size_bytes\": 18446744073709551615,\n"
            "  \"allocated_bytes\": 9007199254740993,\n"
            "  \"huge_bytes\": 0,\n"
            "  \"locked\": true\n"
            "}");
}

TEST(Json, NestsAndWritesEmptyListsAndDoublesThatReadBack) {
  capnp::MallocMessageBuilder message;
  auto status = message.initRoot<schema::NodeStatus>();
  status.setUptimeSeconds(0.1 + 0.2);
  status.initMemory().setUsedBytes(7);
  const std::string json = JsonOf(status.asReader());
  EXPECT_NE(json.find("\"uptime_seconds\": 0.30000000000000004,\n"), std::string::npos) << json;
  EXPECT_NE(json.find("\"memory\": {\n    \"limit_bytes\": 0,\n    \"used_bytes\": 7,"),
            std::string::npos)
      << json;
  EXPECT_NE(json.find("\"jobs\": [],\n"), std::string::npos) << json;
  EXPECT_EQ(JsonOf(status.asReader().getJobs()), "[]");
  status.setUptimeSeconds(std::numeric_limits<double>::infinity());
  EXPECT_NE(JsonOf(status.asReader()).find("\"uptime_seconds\": null,\n"), std::string::npos);
}

TEST(Json, LeavesOutObsoleteFields) {
  capnp::MallocMessageBuilder message;
  auto path = message.initRoot<schema::SwapPathStatus>();
  path.setObsolete14(7);
  const std::string json = JsonOf(path.asReader());
  EXPECT_EQ(json.find("obsolete"), std::string::npos) << json;
  EXPECT_NE(json.find("\"read_errors\": 0,\n  \"read_rate\": 0,"), std::string::npos) << json;
}

TEST(Json, EscapesTextAndReplacesWhatIsNoUtf8) {
  capnp::MallocMessageBuilder message;
  auto jobs = message.initRoot<schema::JobStatus>().initGroups(4);
  jobs.set(0, "a \"quoted\" \\ back\nslash\x7f");
  jobs.set(1, "\xC3\xA9\xF0\x9F\x98\x80");  // é, and an emoji that JSON writes as a surrogate pair
  jobs.set(2, "cut \xF0\x9F");
  jobs.set(3, "\xED\xA0\x80 half a pair");
  EXPECT_EQ(JsonOf(jobs.asReader()),
            "[\n"
            "  \"a \\u0022quoted\\u0022 \\u005c back\\u000aslash\\u007f\",\n"
            "  \"\\u00e9\\ud83d\\ude00\",\n"
            "  \"cut \\ufffd\",\n"
            "  \"\\ufffd half a pair\"\n"
            "]");
}

}  // namespace
}  // namespace forebay::protocol::json_test
