# SPDX-License-Identifier: Apache-2.0
"""What modules below the node log, and errors, as lines of the node's log."""
from __future__ import annotations

import logging

from rclpy.impl.rcutils_logger import RcutilsLogger

PACKAGE = "lingbot_map_ros"


class LogForwarder(logging.Handler):
    """Passes the package's records on to a node's logger while it is installed, and keeps the newest message."""

    def __init__(self, logger: RcutilsLogger) -> None:
        super().__init__(logging.INFO)
        self.newest = ""
        self._logger = logger

    def install(self) -> None:
        """Start to forward."""
        self.newest = ""
        package = logging.getLogger(PACKAGE)
        if package.level == logging.NOTSET:
            package.setLevel(logging.INFO)
        package.addHandler(self)

    def remove(self) -> None:
        """Stop forwarding."""
        logging.getLogger(PACKAGE).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a record."""
        self.newest = " ".join(record.getMessage().split())
        # One call a level: rclpy takes only one level from one place in the source.
        if record.levelno >= logging.ERROR:
            self._logger.error(self.newest)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(self.newest)
        else:
            self._logger.info(self.newest)


def one_line(error: Exception) -> str:
    """Return what an error says, in one line."""
    text = " ".join(str(error).split())
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__} {text}".strip()
