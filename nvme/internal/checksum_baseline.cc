// SPDX-License-Identifier: Apache-2.0
#define FOREBAY_CHECKSUM_KERNELS kBaselineChecksum
#include "nvme/internal/checksum_kernels.inc"
