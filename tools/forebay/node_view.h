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

// For https://ui.perfetto.dev and chrome://tracing: a process of each, a track a lane; of a lane whose
// events overlap, as many as they need.
//
// Source  Trace Event Format, "complete" and "metadata" events.
nlohmann::json TraceForPerfetto(capnp::List<schema::TraceEvent>::Reader events);

}  // namespace forebay::tools
