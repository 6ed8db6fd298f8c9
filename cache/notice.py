# SPDX-License-Identifier: Apache-2.0
"""What is said of errors that are got around."""
from __future__ import annotations

import logging
from functools import lru_cache


def first_line(error: BaseException) -> str:
    """Return what an error says first, or its kind: compilers and drivers say very much."""
    return str(error).strip().split("\n")[0] or type(error).__name__


@lru_cache(maxsize=32)
def warn_once(logger: logging.Logger, message: str) -> None:
    """Warn once in a process, however many caches and states are made."""
    logger.warning("%s", message)
