# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation of the embedded model (not installed with the package)."""
