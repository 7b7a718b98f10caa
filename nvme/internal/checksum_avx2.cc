// SPDX-License-Identifier: Apache-2.0
#define FOREBAY_CHECKSUM_KERNELS kAvx2Checksum
#include "nvme/internal/checksum_kernels.inc"
