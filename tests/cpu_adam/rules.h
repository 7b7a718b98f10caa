// The update rules by name.
#pragma once

#include <string>

#include "cpu_adam/optimizer.h"

namespace forebay::testing {

inline constexpr cpu_adam::Rule kRules[] = {
    cpu_adam::Rule::kAdamW,       cpu_adam::Rule::kAdam,        cpu_adam::Rule::kAdamWAmsgrad,
    cpu_adam::Rule::kAdamAmsgrad, cpu_adam::Rule::kAdagrad,     cpu_adam::Rule::kLion,
    cpu_adam::Rule::kSgd,         cpu_adam::Rule::kSgdNesterov, cpu_adam::Rule::kLamb,
};

inline std::string NameOf(cpu_adam::Rule rule) {
  static constexpr const char* kNames[] = {"AdamW",       "Adam",        "AdamWAmsgrad",
                                           "AdamAmsgrad", "Adagrad",     "Lion",
                                           "Sgd",         "SgdNesterov", "Lamb"};
  return kNames[static_cast<size_t>(rule) - 1];
}

}  // namespace forebay::testing
