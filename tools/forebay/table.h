// SPDX-License-Identifier: Apache-2.0
// Text tables for a terminal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace forebay::tools {

// A table whose columns are as wide as their widest cell, with two spaces between. Columns of numbers are right-aligned. Each
// row has as many cells as the header.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}

  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  bool empty() const { return rows_.size() == 1; }
  std::string Text() const;  // lines, each with its newline

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string Percent(double share);  // "93.7 %"

}  // namespace forebay::tools
