"""What operators read of a cluster's members: one line a death, a return, a refusal (level 3)."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from memserve.cluster.events import MemberChange, ReportMember
from memserve.runtime.rated import RatedLog

log = logging.getLogger(__name__)

_NAMES_MAX = 1024
"""Names whose last end is remembered, for the line about their return."""

_LEVELS = {
    MemberChange.JOINED: logging.INFO,
    MemberChange.LEFT: logging.INFO,
    MemberChange.RETURNED: logging.WARNING,  # beside the line about the death: one without the other alarms
    MemberChange.DIED: logging.WARNING,
    MemberChange.REFUSED: logging.WARNING,
    MemberChange.EXPELLED: logging.WARNING,
}

_WORDS = {
    MemberChange.JOINED: "joined",
    MemberChange.LEFT: "left",
    MemberChange.RETURNED: "is back",
    MemberChange.DIED: "is dead",
    MemberChange.REFUSED: "may not join",
    MemberChange.EXPELLED: "is told to join again",
}


class MemberLog:
    """Writes the lines. One thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines = RatedLog(log, clock=clock)
        self._gone: OrderedDict[str, float] = OrderedDict()
        """Name -> when its last incarnation ended."""

    def say(self, report: ReportMember) -> None:
        """One line, unless there was one like it just now."""
        change, name = report.change, report.peer.name
        why = [report.why] if report.why else []
        if change in (MemberChange.DIED, MemberChange.LEFT):
            self._gone[name] = self._clock()
            self._gone.move_to_end(name)
            if len(self._gone) > _NAMES_MAX:
                self._gone.popitem(last=False)
        elif change is MemberChange.RETURNED and (since := self._gone.pop(name, None)) is not None:
            why.append(f"after {self._clock() - since:.1f} s")
        # one process that knocks at short intervals under ever new generations has one line, too
        thing = (change, name, report.address)
        place = f" at {report.address}" if report.address else ""
        what = _WORDS[change] + (f": {', '.join(why)}" if why else "")
        self._lines.say(_LEVELS[change], thing, "instance %s%s %s", name[:100], place[:200], what[:300])
