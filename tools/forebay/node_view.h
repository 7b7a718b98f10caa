// Tables that `forebay status`, `mem`, `swap`, `jobs` and `trace` print.
#pragma once

#include <string>

#include "protocol/forebay.capnp.h"

namespace forebay::tools {

std::string StatusText(schema::NodeStatus::Reader status);
std::string MemoryText(schema::MemoryStatus::Reader memory);
std::string SwapText(schema::NodeStatus::Reader status);
std::string JobsText(schema::NodeStatus::Reader status);
std::string TraceText(capnp::List<schema::TraceEvent>::Reader events);

}  // namespace forebay::tools
