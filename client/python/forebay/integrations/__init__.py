# SPDX-License-Identifier: Apache-2.0
"""Forebay in other libraries' loops: integrations.transformers, integrations.accelerate. Each imports its library
and torch; `import forebay` imports neither."""
