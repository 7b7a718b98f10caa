// SPDX-License-Identifier: Apache-2.0
// Functions that make the memory accesses of an update with almost no arithmetic. They measure the limit of DRAM.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::peers {

// Each function reads and writes the bytes of an update of n elements and changes no value, except that `weights` of
// TouchAsMaster receives the upper halves of w.
//
// Threads  Disjoint ranges may run at once.
void TouchAsFp32(size_t n, const float* g, float* w, float* m, float* v);  // 28 bytes an element
void TouchAsMaster(size_t n, const uint16_t* g, float* w, float* m, float* v,
                   uint16_t* weights);  // 28 bytes an element
void TouchAsExact(size_t n, const uint16_t* g, uint16_t* weights, int16_t* remainder, float* m,
                  float* v);  // 26 bytes an element

}  // namespace forebay::peers
