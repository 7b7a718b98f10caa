// SPDX-License-Identifier: Apache-2.0
// The options of a command line that describe a model and a cluster.
#pragma once

#include "tools/forebay/plan.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace forebay::tools {

// Adds the options that describe a model and the node that it is planned for, except --params.
void AddModelOptions(CLI::App* command, PlanOptions& plan);

// Adds the options that describe a cluster. Returns --nodes, which all of them need.
CLI::Option* AddClusterOptions(CLI::App* command, ClusterOptions& cluster);

}  // namespace forebay::tools
