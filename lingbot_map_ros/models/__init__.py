# SPDX-License-Identifier: Apache-2.0
"""Weights that ship with the package."""
