// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/table.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_format.h"

namespace forebay::tools {

std::string Table::Text() const {
  std::vector<size_t> widths(rows_[0].size());
  std::vector<bool> numbers(rows_[0].size(), true);
  for (size_t at = 0; at < rows_.size(); ++at) {
    for (size_t i = 0; i < widths.size(); ++i) {
      const std::string& cell = rows_[at][i];
      widths[i] = std::max(widths[i], cell.size());
      const bool number = cell.empty() || cell == "-" || (cell[0] >= '0' && cell[0] <= '9');
      if (at > 0) numbers[i] = numbers[i] && number;
    }
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      line += (i == 0 ? "" : "  ") + (numbers[i] ? space + row[i] : row[i] + space);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string Percent(double share) { return absl::StrFormat("%.1f %%", 100 * share); }

}  // namespace forebay::tools
