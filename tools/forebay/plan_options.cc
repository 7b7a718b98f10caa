// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/plan_options.h"

#include <cstdint>

#include "CLI/CLI.hpp"

namespace forebay::tools {

void AddModelOptions(CLI::App* command, PlanOptions& plan) {
  command->add_option("--hf", plan.hugging_face, "the model: a config.json of Hugging Face's");
  command->add_option("--layers", plan.layers, "of --params and --width")
      ->check(CLI::Range(1, 10000));
  command->add_option("--width", plan.width, "the model: a decoder of this width")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--vocab", plan.vocab, "of --width")->check(CLI::Range(1, 1 << 24));
  command->add_flag("!--no-early-updates", plan.early_updates,
                    "blocks wait for step: no room for their new weights");
  command->add_option("--dtype", plan.dtype, "of the weights");
  command->add_option("--format", plan.format, "of the states (exact for bfloat16, else fp32)");
  command->add_option("--optimizer", plan.optimizer, "adamw, ...");
  command->add_option("--dram", plan.dram,
                      "on an empty node with this limit; else on this one, as it is");
  command->add_option("--read-rate", plan.read_rate, "of the swap, GB/s: the disk's time is shown")
      ->check(CLI::Range(1e-3, 1e6));
  command->add_option("--write-rate", plan.write_rate, "the same")->check(CLI::Range(1e-3, 1e6));
}

CLI::Option* AddClusterOptions(CLI::App* command, ClusterOptions& cluster) {
  CLI::Option* nodes =
      command
          ->add_option("--nodes", cluster.nodes,
                       "of a cluster: each node's share, each link's bytes, and a step's time; "
                       "no daemon is asked")
          ->check(CLI::Range(1, 1 << 20));
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->needs(nodes);
  };
  add("--gpus", cluster.gpus, "of a node (8)")->check(CLI::Range(1, 1024));
  add("--tensor-parallel", cluster.tensor_parallel, "GPUs of a node that split each layer (1)")
      ->check(CLI::Range(1, 1024));
  const CLI::Range rates(1e-3, 1e9);
  add("--gpu-link-rate", cluster.gpu_link_rate, "GB/s of a GPU to others of its node")
      ->check(rates);
  add("--link-rate", cluster.link_rate, "GB/s of a node to the others, each way")->check(rates);
  // forebay plan --gpu takes these too.
  command->add_option("--tokens", cluster.tokens, "of a step, for each GPU (2048)")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 40));
  command->add_flag("--recompute", cluster.recompute, "activation checkpointing");
  const auto add_rate = [&](const char* name, double& value, const char* help) {
    command->add_option(name, value, help)->check(rates);
  };
  add_rate("--gpu-tflops", cluster.gpu_tflops, "what a GPU achieves, without waiting");
  add_rate("--host-link-rate", cluster.host_link_rate,
           "GB/s of DRAM to all GPUs of a node, each way");
  add_rate("--update-rate", cluster.update_rate, "GB/s of DRAM under the optimizer's pass");
  return nodes;
}

}  // namespace forebay::tools
