// SPDX-License-Identifier: Apache-2.0
#include "protocol/trace.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "protocol/ring.h"

namespace forebay::protocol {
namespace {

using internal::LoadEntry;
using internal::LoadWord;
using internal::StoreEntry;
using internal::StoreWord;

}  // namespace

std::string_view Name(ClientLane lane) {
  static constexpr std::array<std::string_view, kClientLanes> kNames = {"fetch",
                                                                        "gradient call",
                                                                        "step call",
                                                                        "weights to device",
                                                                        "gradients from device",
                                                                        "all-gather",
                                                                        "reduce",
                                                                        "activations from device",
                                                                        "activations to device"};
  return kNames.at(static_cast<size_t>(lane));
}

void TraceWriter::Add(const ClientEvent& event) {
  const bool is_step = event.lane == ClientLane::kStep;
  if (records_ >= (is_step ? kTraceRecords : kTraceRecords - 1)) {  // the last is the step's
    ++left_out_;
    return;
  }
  TraceRecord record{.start_ns = event.start_ns,
                     .end_ns = event.end_ns,
                     .bytes = event.bytes,
                     .lane = static_cast<uint16_t>(event.lane),
                     .name = {}};
  std::string_view name = event.name;
  std::string longer;
  if (is_step && left_out_ > 0) {
    name = longer = absl::StrCat(std::string(name), " (", left_out_, " left out)");
  }
  std::ranges::copy(name.substr(0, kTraceNameBytes), record.name);
  StoreEntry(memory_.halves[commits_ % 2].records[records_++], record);
}

void TraceWriter::Committed(uint64_t step) {
  TraceHalf& half = memory_.halves[commits_ % 2];
  StoreWord(half.records_used, records_, std::memory_order_relaxed);
  StoreWord(half.step, step, std::memory_order_relaxed);
  StoreWord(memory_.commits, ++commits_, std::memory_order_release);
  // Orders the commit before the writes of the next step over the other half.
  std::atomic_thread_fence(std::memory_order_release);
  records_ = left_out_ = 0;
}

std::vector<TraceRecord> ReadTrace(const TraceMemory& memory, uint64_t step) {
  const uint64_t commits = LoadWord(memory.commits, std::memory_order_acquire);
  if (commits == 0) return {};
  const TraceHalf& half = memory.halves[(commits - 1) % 2];
  const uint64_t used = LoadWord(half.records_used, std::memory_order_relaxed);
  if (LoadWord(half.step, std::memory_order_relaxed) != step) return {};
  std::vector<TraceRecord> records(std::min<uint64_t>(used, kTraceRecords));
  for (size_t i = 0; i < records.size(); ++i) records[i] = LoadEntry(half.records[i]);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (LoadWord(memory.commits, std::memory_order_relaxed) != commits) return {};
  std::erase_if(records, [](const TraceRecord& record) { return record.lane >= kClientLanes; });
  for (TraceRecord& record : records) {
    record.end_ns = std::max(record.end_ns, record.start_ns);
    for (char& character : record.name) {
      const bool is_printable = character >= ' ' && character <= '~';
      if (character != '\0' && !is_printable) character = '?';
    }
  }
  return records;
}

}  // namespace forebay::protocol
