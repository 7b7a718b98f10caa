// SPDX-License-Identifier: Apache-2.0
// Tables that `forebay status`, `mem`, `swap`, `jobs` and `trace` print.
#pragma once

#include <string>

#include "nlohmann/json.hpp"
#include "protocol/forebay.capnp.h"

namespace forebay::tools {

std::string StatusText(schema::NodeStatus::Reader status);
std::string MemoryText(schema::MemoryStatus::Reader memory);
std::string SwapText(schema::NodeStatus::Reader status);
std::string JobsText(schema::NodeStatus::Reader status);
std::string TraceText(capnp::List<schema::TraceEvent>::Reader events);

// Converts trace events for https://ui.perfetto.dev and chrome://tracing. Each process of the events becomes a process, and
// each lane a track. A lane with overlapping events becomes as many tracks as the overlap needs.
//
// Source  Trace Event Format, "complete" and "metadata" events.
nlohmann::json TraceForPerfetto(capnp::List<schema::TraceEvent>::Reader events);

}  // namespace forebay::tools
