// What `forebay status`, `mem`, `swap`, `jobs` and `trace` print: tables, or the same as JSON.
#pragma once

#include <string>
#include <vector>

#include "client/admin.h"
#include "nlohmann/json.hpp"

namespace forebay::tools {

// Field for field the structs of client/admin.h.
nlohmann::json ToJson(const client::NodeStatus& status);
nlohmann::json ToJson(const client::MemoryStatus& memory);
nlohmann::json ToJson(const client::SwapPathStatus& path);
nlohmann::json ToJson(const client::JobStatus& job);
nlohmann::json ToJson(const client::TraceEvent& event);

template <typename Item>
nlohmann::json ToJson(const std::vector<Item>& items) {
  nlohmann::json all = nlohmann::json::array();
  for (const Item& item : items) all.push_back(ToJson(item));
  return all;
}

std::string StatusText(const client::NodeStatus& status);
std::string MemoryText(const client::MemoryStatus& memory);
std::string SwapText(const client::NodeStatus& status);
std::string JobsText(const std::vector<client::JobStatus>& jobs);
std::string TraceText(const std::vector<client::TraceEvent>& events);

}  // namespace forebay::tools
