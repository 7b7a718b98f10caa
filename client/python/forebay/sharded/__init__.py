# SPDX-License-Identifier: Apache-2.0
"""Sharded attachment: ZeRO-3 on torch's FSDP2. Everything in this package is private."""
