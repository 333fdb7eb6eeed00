"""How much the processes say on stderr (level 4)."""

from __future__ import annotations

import logging
import sys

from memserve.errors import UserError

LOG_LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(level: str, process: str = "") -> None:
    """Log to stderr from ``level`` on, each line with the name of the ``process`` where there are several.

    Raises :class:`UserError` for an unknown level.
    """
    if level not in LOG_LEVELS:
        raise UserError(f"unknown log level {level!r}", hint=f"use one of {', '.join(LOG_LEVELS)}", param="log_level")
    who = f"{process} " if process else ""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format=f"%(asctime)s {who}%(levelname)s %(name)s: %(message)s"
    )
