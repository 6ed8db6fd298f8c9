# SPDX-License-Identifier: Apache-2.0
"""What an evaluation needs beyond what the node needs."""
from __future__ import annotations

import importlib.util

from lingbot_map_ros.image_files import ReplayError


def require(module: str, purpose: str) -> None:
    """Raise ReplayError, with the command that installs it, if a module is missing. Imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise ReplayError(f"{purpose} needs {module}: pip install {module}")
