# SPDX-License-Identifier: Apache-2.0
"""The optimizer's states outside the daemon: torch's state_dict, files, readers. Everything in this package is private."""
