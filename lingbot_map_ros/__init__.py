# SPDX-License-Identifier: Apache-2.0
"""Dense mapping from one camera with a streaming geometric context transformer."""

__version__ = "0.1.0"
