#define FOREBAY_CHECKSUM_KERNELS kBaselineChecksum
#include "nvme/internal/checksum_kernels.inc"
