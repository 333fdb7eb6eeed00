"""Settings by name: what stands side by side in the evaluation (MemServe section 8) (level 4).

====================== =====================================================================================
``2PD``, ``PD``        colocated instances without a cache; without a number as many as the run compares
``PD-CC``              with context caching
``1P1D``, ``2P1D``     prefill and decode instances without a cache
``1P1D-CC1`` ... ``3`` caching levels of section 5.1; ``-CC`` is ``-CC3``
``.../session``        a routing policy other than the default
``.../by-request``     a transfer mode other than the default
====================== =====================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memserve.config import POLICIES
from memserve.errors import UserError
from memserve.types import Caching, TransferMode

_NAME = re.compile(
    r"(?:(?P<same>\d*)PD|(?P<prefill>\d+)P(?P<decode>\d+)D)(?P<caching>-CC[123]?)?(?P<rest>(?:/[a-z-]+)*)"
)
_LEVELS = {
    None: Caching.OFF,
    "-CC1": Caching.PD_CACHING_1,
    "-CC2": Caching.PD_CACHING_2,
    "-CC3": Caching.PD_CACHING_3,
    "-CC": Caching.PD_CACHING_3,
}
HINT = "for example PD, PD-CC, 1P1D, 1P1D-CC, 2P1D-CC2, PD-CC/session or NAME=URL of another server"


@dataclass(frozen=True, slots=True)
class Setting:
    """One contender: a ``memserve serve`` of our own, or a server that runs already."""

    name: str
    flags: tuple[str, ...] = ()
    instances: int = 0
    base_url: str | None = None


def parse_setting(text: str, instances: int) -> Setting:
    """The setting that ``text`` names; ``instances``: how many a ``PD`` without a number has.

    Raises :class:`UserError` for a name that means nothing.
    """
    name, _, url = text.partition("=")
    if url:
        return Setting(name, base_url=url)
    match = _NAME.fullmatch(text)
    if match is None:
        raise UserError(f"unknown setting {text!r}", hint=HINT)
    flags = ["--caching", _LEVELS[match["caching"]].value]
    if match["same"] is not None:
        count = int(match["same"] or instances)
        flags += ["--colocated", str(count)]
    else:
        count = int(match["prefill"]) + int(match["decode"])
        flags += ["--prefill", match["prefill"], "--decode", match["decode"]]
    for word in match["rest"].split("/")[1:]:
        flags += _option(word, text)
    name = f"{count}{text}" if match["same"] == "" else text
    return Setting(name, tuple(flags), count)


def named_server(text: str) -> str:
    """``NAME=URL`` of another server; a mere URL is its own name."""
    return text if "=" in text else f"{text.removeprefix('http://')}={text}"


def _option(word: str, text: str) -> tuple[str, str]:
    if word in POLICIES:
        return "--policy", word
    if word in list(TransferMode):
        return "--transfer", word
    known = ", ".join((*POLICIES, *TransferMode))
    raise UserError(f"unknown policy or transfer mode {word!r} in setting {text!r}", hint=f"one of {known}")


def parse_settings(texts: str, instances: int) -> tuple[Setting, ...]:
    """Settings of a comma-separated list, each once. Raises :class:`UserError`."""
    settings = tuple(parse_setting(text.strip(), instances) for text in texts.split(",") if text.strip())
    names = [setting.name for setting in settings]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"setting {name!r} twice", hint="name each once")
    return settings
