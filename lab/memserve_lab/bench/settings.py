"""The settings of MemServe's section 8 by name, and which of them get which workloads.

====================== =====================================================================================
``2PD``, ``PD``        colocated instances without a cache; without a number, as many as the run compares
``PD-CC``              with context caching
``1P1D``, ``2P1D``     prefill and decode instances without a cache
``1P1D-CC1`` ... ``3`` caching levels of section 5.1; ``-CC`` is ``-CC3``
``.../session``        a routing policy other than the default
``.../by-request``     a transfer mode other than the default
====================== =====================================================================================

============ ============================================ ===========================
``settings`` shapes and caching on all three workloads    figure 8, over request rates
``turns``    caching levels 1, 2, 3 as chats grow         section 5.1
``transfer`` the three transfer modes, and ``auto``        figure 12, over request rates
``policies`` least load, session, prompt tree on 3P1D     figure 14, over share ratios
============ ============================================ ===========================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memserve.base.errors import UserError
from memserve.base.plugins import ROUTING_POLICIES
from memserve.base.types import Caching, TransferPolicy
from memserve_lab.bench.catalogue import Arrivals, Recipe, known_kind
from memserve_lab.bench.results import Label
from memserve_lab.workloads.shape import Caps

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
    """One contender: a ``memserve serve`` that the run starts, or a running server."""

    name: str
    flags: tuple[str, ...] = ()
    instances: int = 0
    base_url: str | None = None


def parse_setting(text: str, instances: int) -> Setting:
    """The setting that ``text`` names; ``instances``: number of instances of a ``PD`` without a number.

    Raises :class:`UserError` for an unknown name.
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
    """``NAME=URL`` of another server; a URL alone is its own name."""
    return text if "=" in text else f"{text.removeprefix('http://')}={text}"


def _option(word: str, text: str) -> tuple[str, str]:
    if word in ROUTING_POLICIES.names():
        return "--policy", word
    if word in list(TransferPolicy):
        return "--transfer", word
    names_text = ", ".join((*ROUTING_POLICIES.names(), *TransferPolicy))
    raise UserError(f"unknown policy or transfer mode {word!r} in setting {text!r}", hint=f"one of {names_text}")


def parse_settings(texts: str, instances: int) -> tuple[Setting, ...]:
    """Settings of a comma-separated list, each once. Raises :class:`UserError`."""
    settings = tuple(parse_setting(text.strip(), instances) for text in texts.split(",") if text.strip())
    names = [setting.name for setting in settings]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"setting {name!r} is named twice", hint="name each once")
    return settings


# -- which settings get which workloads

STUDIES = ("settings", "turns", "transfer", "policies")
PAPER_NAMES = {"sharegpt": "chat", "loogle": "documents"}
"""The paper's data sets -> the catalogue's kinds that stand for them."""
SHARE_RATIOS = (1.0, 2.0, 4.0)
CACHING_LEVELS = "1P1D-CC1,1P1D-CC2,1P1D-CC3"
TRANSFER_MODES = "1P1D/by-layer,1P1D/by-request,1P1D/by-request-agg,1P1D/auto"
POLICIES_COMPARED = "3P1D-CC/least-load,3P1D-CC/session,3P1D-CC/prompt-tree"
"""As in the paper: with two prefill instances, half of all prefixes are found by chance."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is sent in a pass."""

    sessions: int
    turns_max: int
    prompt_tokens_max: int
    output_tokens_max: int
    rates: tuple[float, ...]
    """Requests a second over all instances; one pass each."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Settings and workloads: every workload goes to every setting."""

    settings: tuple[Setting, ...]
    recipes: dict[str, Recipe]
    """Label -> workload; each pass sets its seed. No label occurs in two comparisons."""


def kind_of(name: str) -> str:
    """The catalogue's name of a workload: ``sharegpt`` is ``chat``, ``loogle`` is ``documents``.

    :class:`UserError` if the catalogue has no such workload.
    """
    kind = PAPER_NAMES.get(name.strip(), name.strip())
    known_kind(kind)
    return kind


def settings_compared(
    settings: Sequence[Setting], workloads: str, ratios: Sequence[float], size: Size, data: Path | None
) -> Comparison:
    """Figure 8: comma-separated ``workloads``, each at every share ratio and rate; labels name what is varied."""
    recipes: dict[str, Recipe] = {}
    for kind in map(kind_of, workloads.split(",")):
        for ratio in ratios:
            recipes |= _recipes(kind, size, data, share_ratio=ratio, varies_ratio=len(ratios) > 1)
    return Comparison(tuple(settings), recipes)


def levels_compared(size: Size, data: Path | None) -> Comparison:
    """Section 5.1: chats that all have ``size.turns_max`` turns, on the three caching levels."""
    recipe = _recipe("chat", size, data, size.rates[0])
    return Comparison(parse_settings(CACHING_LEVELS, 2), {"long chat": replace(recipe, turns_min=size.turns_max)})


def transfer_compared(size: Size) -> Comparison:
    """Figure 12: prompts and answers of one length over the request rate, on the three transfer modes and ``auto``."""
    return Comparison(parse_settings(TRANSFER_MODES, 2), _recipes("uniform", size, None))


def policies_compared(size: Size, data: Path | None) -> Comparison:
    """Figure 14: documents and their questions, every session once, twice, four times, on three policies."""
    recipes: dict[str, Recipe] = {}
    for ratio in SHARE_RATIOS:
        recipes |= _recipes("documents", size, data, share_ratio=ratio, varies_ratio=True)
    return Comparison(parse_settings(POLICIES_COMPARED, 4), recipes)


def _recipes(
    kind: str, size: Size, data: Path | None, share_ratio: float = 1.0, varies_ratio: bool = False
) -> dict[str, Recipe]:
    """Label -> recipe, one per rate."""
    ratio, varies = share_ratio if varies_ratio else None, len(size.rates) > 1
    return {
        str(Label(kind, ratio, rate if varies else None)): _recipe(kind, size, data, rate, share_ratio)
        for rate in size.rates
    }


def _recipe(kind: str, size: Size, data: Path | None, rate: float, share_ratio: float = 1.0) -> Recipe:
    return Recipe(
        kind=kind, data=data, sessions=size.sessions, share_ratio=share_ratio, arrivals=Arrivals.POISSON,
        caps=Caps(size.prompt_tokens_max, size.output_tokens_max, size.turns_max), requests_per_s=rate,
    )  # fmt: skip


def parse_studies(text: str) -> tuple[str, ...]:
    """Names of studies, comma-separated, in the order of :data:`STUDIES`. Raises :class:`UserError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in STUDIES:
            raise UserError(f"unknown study {name!r}", hint=f"any of {', '.join(STUDIES)}")
    return tuple(name for name in STUDIES if name in names)


def parse_numbers(text: str, flag: str, subject: str, least: float) -> tuple[float, ...]:
    """Comma-separated numbers of at least ``least``, each once. Raises :class:`UserError`."""
    try:
        numbers = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(least <= number < 1e6 for number in numbers):
        raise UserError(f"cannot read {text!r} as {subject}", hint=f"for example {flag} 1,2,4")
    return numbers
