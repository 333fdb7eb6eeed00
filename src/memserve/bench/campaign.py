"""Settings side by side: every workload on every setting, seed by seed (level 4).

All settings take their turn within a seed, each time in another order, so that a busy minute of the machine hits no
setting alone; every server of ours starts fresh, so no seed finds another's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from memserve.bench.catalogue import Recipe, build
from memserve.bench.child import serving
from memserve.bench.load.client import Target, first_model
from memserve.bench.load.driver import Driver, Labels, LoadRun, drive
from memserve.bench.load.progress import Progress
from memserve.bench.load.prompts import VOCAB_SIZE_DEFAULT, Manner
from memserve.bench.load.record import RequestRecord
from memserve.bench.results import Pass, RunFolder, Shape
from memserve.bench.settings import Setting
from memserve.errors import UserError
from memserve.workloads.statistics import measure as weigh
from memserve.workloads.words import Session, Text, Turn, Workload

WARM_REQUESTS, WARM_OUTPUT_TOKENS = 4, 4
"""The first requests of a process pay for what it had put off; they are sent before anything is measured."""

PAPER_NAMES = {"sharegpt": "chat", "loogle": "documents"}
"""The paper's data sets -> the catalogue's kinds that stand for them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    settings: tuple[Setting, ...]
    recipes: dict[str, Recipe]
    """Label -> workload; the seed is the pass's."""
    seeds: tuple[int, ...] = (0,)
    serve_flags: tuple[str, ...] = ()
    """Given to every server of ours."""
    ignore_eos: bool = True
    vocab_size: int = VOCAB_SIZE_DEFAULT
    timeout_s: float = 600.0

    @property
    def passes(self) -> int:
        """Workloads times settings times seeds."""
        return len(self.settings) * len(self.recipes) * len(self.seeds)


@dataclass(slots=True)
class Measured:
    """What was measured so far."""

    records: list[RequestRecord] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None
    """Ended between two passes: a server that did not start, or Ctrl-C meanwhile."""

    @property
    def partial(self) -> str | None:
        """Why it ended early."""
        return next((one.partial for one in self.passes if one.partial is not None), self.stopped)


def kind_of(name: str) -> str:
    """The catalogue's name of a workload: ``sharegpt`` is ``chat``, ``loogle`` is ``documents``."""
    return PAPER_NAMES.get(name, name)


def measure(plan: Plan, folder: RunFolder, say: Callable[[str], None]) -> Measured:
    """Run the plan; it ends early, and keeps what it has, when it is interrupted or a server dies.

    Raises :class:`UserError` when not even the first server starts.
    """
    measured = Measured()
    try:
        for number, seed in enumerate(plan.seeds):
            workloads = {label: build(replace(recipe, seed=seed)) for label, recipe in plan.recipes.items()}
            for setting in _rotated(plan.settings, number):
                _measure_setting(plan, setting, seed, workloads, folder, measured, say)
                if measured.partial is not None:
                    return measured
    except KeyboardInterrupt:
        measured.stopped = "interrupted"
    except UserError as error:
        if not measured.records:
            raise
        measured.stopped = str(error)
    return measured


def _measure_setting(
    plan: Plan,
    setting: Setting,
    seed: int,
    workloads: dict[str, Workload],
    folder: RunFolder,
    measured: Measured,
    say: Callable[[str], None],
) -> None:
    """All workloads of one seed on one setting."""
    with server_of(setting, plan.serve_flags) as (url, model):
        if setting.base_url is not None and seed:
            measured.notes.append(f"{setting.name} ran on between seeds, with its cache; servers of ours start fresh")
        warm = drive(lambda: warm_up(url, model))
        if failed := next((record for record in warm.records if not record.ok), None):
            measured.notes.append(f"{setting.name}: a request of the warm-up failed: {failed.error}")
        for label, workload in workloads.items():
            measured.notes += [f"{label}: {note}" for note in workload.notes if seed == plan.seeds[0]]
            run = _one_pass(plan, label, workload, setting, seed, url, model, folder)
            measured.records += run.records
            measured.passes.append(Pass.of(run, label, setting.name, seed))
            done = f"{len(measured.passes)}/{plan.passes}"
            say(f"{done} {setting.name}, {label}, seed {seed}: {_told(run)}")
            if run.partial is not None:
                return


def shapes_of(plan: Plan) -> list[Shape]:
    """What the workloads of all seeds are like."""
    shapes = []
    for label, recipe in plan.recipes.items():
        columns: list[list[list[float]]] = []
        for seed in plan.seeds:
            workload = build(replace(recipe, seed=seed))
            found = weigh(workload)
            per_output = found.prompt_tokens / found.output_tokens.clip(min=1)
            shared = found.blocks_seen / found.blocks.clip(min=1)
            rows = (found.prompt_tokens, found.output_tokens, per_output, shared)
            columns.append([[float(value) for value in row] for row in rows])
        together = [[value for seed in columns for value in seed[at]] for at in range(4)]
        shapes.append(Shape(label, workload.source, len(together[0]), *together))
    return shapes


def _rotated(settings: Sequence[Setting], by: int) -> list[Setting]:
    by %= len(settings)
    return [*settings[by:], *settings[:by]]


@contextmanager
def server_of(setting: Setting, flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Address and model name."""
    if setting.base_url is not None:
        yield setting.base_url, first_model(Target(setting.base_url))
        return
    with serving((*setting.flags, *flags)) as child:
        yield child.url, child.model


def warm_up(url: str, model: str) -> Driver:
    """Short text about nothing that a workload speaks of."""
    turns = (Turn(Text("one two three four five six seven eight nine ten " * 6), WARM_OUTPUT_TOKENS),)
    sessions = tuple(Session(f"warm-up-{number}", turns) for number in range(WARM_REQUESTS))
    workload = Workload("warm-up", "", sessions, users=2)
    return Driver(workload, Target(url), Manner(model), progress=Progress(WARM_REQUESTS, "warm-up"))


def _one_pass(
    plan: Plan, label: str, workload: Workload, setting: Setting, seed: int, url: str, model: str, folder: RunFolder
) -> LoadRun:
    manner = Manner(model, plan.vocab_size, plan.ignore_eos)
    labels = Labels(setting.name, label, seed)
    progress = Progress(workload.request_count, f"{setting.name} {label}")
    return drive(
        lambda: Driver(
            workload, Target(url, timeout_s=plan.timeout_s), manner,
            writer=folder.writer, progress=progress, labels=labels,
        )
    )  # fmt: skip


def _told(run: LoadRun) -> str:
    answered = sum(record.ok for record in run.records)
    text = f"{answered} of {run.planned} answered in {run.wall_ns / 1e9:.1f} s"
    return text if run.partial is None else f"{text}; {run.partial}"


def default_folder() -> Path:
    """Where results go when nobody says: a folder of the current one that does not exist yet."""
    number = 1
    while (path := Path(f"bench-{number}")).exists():
        number += 1
    return path
