// SPDX-License-Identifier: Apache-2.0
// The options of a command line that describe a model and a cluster.
#pragma once

#include "tools/forebay/plan.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace forebay::tools {

// Of a model, and of the node it is for; --params aside.
void AddModelOptions(CLI::App* command, PlanOptions& plan);

// Returns --nodes, without which there is no cluster.
CLI::Option* AddClusterOptions(CLI::App* command, ClusterOptions& cluster);

}  // namespace forebay::tools
