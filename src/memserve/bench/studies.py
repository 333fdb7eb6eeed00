"""The studies of the evaluation (MemServe section 8): which settings get which workloads (level 4).

============ ===================================================== ==========================================
``settings`` shapes and caching on all three workloads             figure 8
``turns``    caching levels 1, 2, 3 as chats grow                  figure 12's form
``policies`` least load, session, prompt tree over the share ratio figure 14
============ ===================================================== ==========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memserve.bench.catalogue import Arrivals, Recipe
from memserve.bench.settings import Setting, parse_settings
from memserve.errors import UserError
from memserve.workloads.shape import Caps

STUDIES = ("settings", "turns", "policies")
PAPER_NAMES = {"sharegpt": "chat", "loogle": "documents"}
"""The paper's data sets -> the catalogue's kinds that stand for them."""
SHARE_RATIOS = (1.0, 2.0, 4.0)
CACHING_LEVELS = "1P1D-CC1,1P1D-CC2,1P1D-CC3"
POLICIES = "{n}PD-CC/least-load,{n}PD-CC/session,{n}PD-CC/prompt-tree"
POLICY_INSTANCES = 3
"""With two, half of all prefixes are found by chance."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is sent in a pass."""

    sessions: int
    turns_max: int
    prompt_tokens_max: int
    output_tokens_max: int
    rate: float

    @property
    def caps(self) -> Caps:
        """As the workload's bounds."""
        return Caps(self.prompt_tokens_max, self.output_tokens_max, self.turns_max)


@dataclass(frozen=True, slots=True)
class Study:
    """Every workload goes to every setting."""

    settings: tuple[Setting, ...]
    recipes: dict[str, Recipe]
    """Label -> workload; the seed is the pass's. No label stands in two studies."""


def kind_of(name: str) -> str:
    """The catalogue's name of a workload: ``sharegpt`` is ``chat``, ``loogle`` is ``documents``."""
    return PAPER_NAMES.get(name.strip(), name.strip())


def settings_study(
    settings: Sequence[Setting], workloads: str, ratios: Sequence[float], size: Size, data: Path | None
) -> Study:
    """Comma-separated ``workloads``, each at every share ratio, which stands in the label when there are several."""
    recipes = {}
    for kind in map(kind_of, workloads.split(",")):
        for ratio in ratios:
            label = kind + (f" x{ratio:g}" if len(ratios) > 1 else "")
            recipes[label] = _recipe(kind, size, data, share_ratio=ratio)
    return Study(tuple(settings), recipes)


def turns_study(size: Size, data: Path | None) -> Study:
    """Chats that all have ``size.turns_max`` turns, on the three caching levels."""
    long = _recipe("chat", size, data, turns_min=size.turns_max)
    return Study(parse_settings(CACHING_LEVELS, 2), {"long chat": long})


def policies_study(size: Size, data: Path | None, instances: int = POLICY_INSTANCES) -> Study:
    """Documents and their questions, every session once, twice, four times, on three policies."""
    recipes = {f"documents x{ratio:g}": _recipe("documents", size, data, share_ratio=ratio) for ratio in SHARE_RATIOS}
    return Study(parse_settings(POLICIES.format(n=instances), instances), recipes)


def _recipe(kind: str, size: Size, data: Path | None, **more: float) -> Recipe:
    recipe = Recipe(
        kind=kind, data=data, sessions=size.sessions, caps=size.caps,
        arrivals=Arrivals.POISSON, requests_per_s=size.rate,
    )  # fmt: skip
    return replace(recipe, **more)  # type: ignore[arg-type]  # the keys are its fields


def parse_studies(text: str) -> tuple[str, ...]:
    """Names of studies, comma-separated, in the order of :data:`STUDIES`. Raises :class:`UserError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in STUDIES:
            raise UserError(f"unknown study {name!r}", hint=f"any of {', '.join(STUDIES)}")
    return tuple(name for name in STUDIES if name in names)


def parse_ratios(text: str) -> tuple[float, ...]:
    """Comma-separated share ratios. Raises :class:`UserError`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"cannot read {text!r} as share ratios", hint="for example --share-ratio 1,2,4") from None
