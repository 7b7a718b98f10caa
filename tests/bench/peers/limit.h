// SPDX-License-Identifier: Apache-2.0
// The memory accesses of an update with next to no arithmetic: what DRAM allows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::peers {

// Each reads and writes what an update of n elements would, and leaves every value as it was; `weights`
// of TouchAsMaster becomes the upper halves of w.
//
// Threads  Disjoint ranges may run at once.
void TouchAsFp32(size_t n, const float* g, float* w, float* m, float* v);  // 28 bytes an element
void TouchAsMaster(size_t n, const uint16_t* g, float* w, float* m, float* v,
                   uint16_t* weights);  // 28
void TouchAsExact(size_t n, const uint16_t* g, uint16_t* weights, int16_t* remainder, float* m,
                  float* v);  // 26

}  // namespace forebay::peers
