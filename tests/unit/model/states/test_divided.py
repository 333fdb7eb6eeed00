"""Layers with recurrent states or latents, divided among workers: each has its heads or channels, and their states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from late_grammar import check_late_draws
from memserve.base.errors import UserError
from memserve.base.kv_layout import Parallel, shares
from memserve.base.states import StateGeometry, StatePart, StateRange, StateShare, share_state
from memserve.instance.events import LoadState
from memserve.model.states.layers import states_of
from memserve.model.states.memory import SlotStates
from memserve.model.workers.plans import plan_division
from memserve.model.workers.processes import slot_bytes
from memserve.model.workers.recurrent import plan_cut
from memserve.model.workers.sharding import share_states
from memserve.model.workers.trial import Trial, follow_trial
from tiny_models import LATENT, STATEFUL, Driver, loaded, tiny_module
from worker_threads import ThreadedWorkers, crews, divided_modules, run_workers

GROUPED: dict[str, dict[str, int]] = {
    "bamba": {"mamba_n_groups": 2},
    "falcon_h1": {"mamba_n_groups": 2},
    "mamba2": {"n_groups": 4},
    "qwen3_next": {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
}
"""Heads in groups, and heads that do not divide evenly."""
REAL: dict[str, tuple[str, dict[str, int]]] = {
    "Qwen3-Next 80B": ("qwen3_next", {"linear_num_key_heads": 16, "linear_num_value_heads": 32,
                                      "linear_key_head_dim": 128, "linear_value_head_dim": 128}),
    "Falcon-H1 34B": ("falcon_h1", {"mamba_n_heads": 32, "mamba_d_head": 128, "mamba_d_ssm": 4096,
                                    "mamba_d_state": 256, "mamba_n_groups": 2}),
    "Mamba-2 2.7B": ("mamba2", {"num_heads": 80, "head_dim": 64, "hidden_size": 2560, "state_size": 128}),
    "LFM2 1.2B": ("lfm2", {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}),
}  # fmt: skip
"""Recurrent layers with the heads, groups and channels that these models have."""
KINDS = [*((family, {}) for family in (*STATEFUL, *LATENT)), *GROUPED.items()]
NAMES = [family + "-grouped" * bool(sizes) for family, sizes in KINDS]


def try_together(family: str, sizes: dict[str, int], parallel: Parallel, damage: bool = False) -> None:
    """Raises :class:`UserError` where the workers do not compute what the whole model does."""
    model = loaded(tiny_module(family, **sizes))
    trial = Trial(model.module, "float32")
    found, modules, vocabularies = divided_modules(model, parallel)
    trial._module = modules[0]
    if damage:
        layer = next(part for part in modules[-1].modules() if getattr(part, "A_log", None) is not None)
        layer.A_log = torch.nn.Parameter(layer.A_log + 1, requires_grad=False)
    members, _regions = crews(found, vocabularies)
    followers = [
        (crew, partial(follow_trial, module, "float32", crew))
        for crew, module in zip(members[1:], modules[1:], strict=True)
    ]
    run_workers([(members[0], partial(trial.compare_together, members[0])), *followers])


@pytest.mark.parametrize("parallel", [Parallel(2), Parallel(2, 2)], ids=lambda found: found.text)
@pytest.mark.parametrize(("family", "sizes"), KINDS, ids=NAMES)
def test_parts_together_compute_what_the_whole_does(family: str, sizes: dict[str, int], parallel: Parallel) -> None:
    """In pieces, whose states go from one to the next."""
    try_together(family, sizes, parallel)


@pytest.mark.parametrize("name", REAL)
def test_layers_of_real_sizes_are_divided(name: str) -> None:
    family, sizes = REAL[name]
    try_together(family, sizes, Parallel(2))
    model = loaded(tiny_module(family, **sizes))
    assert slot_bytes(Parallel(2), model) < 1.1 * model.states.nbytes


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("mamba", {}),
        ("mamba2", {}),
        ("qwen3_5", {"num_attention_heads": 6, "num_key_value_heads": 3, "linear_num_key_heads": 3,
                     "linear_num_value_heads": 6}),
    ],
)  # fmt: skip
def test_three_workers_have_uneven_parts(family: str, sizes: dict[str, int]) -> None:
    try_together(family, sizes, Parallel(3))


@pytest.mark.parametrize("family", ["qwen3_5", "jamba", "falcon_h1"])
def test_parts_that_compute_something_else_are_refused(family: str) -> None:
    """Worker 1 forgets more slowly than it should."""
    with pytest.raises(UserError, match="together they compute other logits"):
        try_together(family, {}, Parallel(2), damage=True)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize(("family", "sizes"), KINDS[: len(STATEFUL)] + KINDS[-len(GROUPED) :])
def test_each_byte_of_a_state_is_written_by_one_worker(family: str, sizes: dict[str, int], parts: int) -> None:
    """And where layers are cut, a worker has less than all of it."""
    model = loaded(tiny_module(family, **sizes))
    states, division = states_of(model.module), plan_division(model.module, model.geometry)
    geometry, layers = replace(model.geometry, num_kv_heads=parts), len(division.layers)
    workers = shares(Parallel(parts), geometry, layers=layers)
    found = [share_states(model.module, division.layers, share) for share in workers]
    counts = np.zeros(model.states.nbytes, np.int64)
    for run in (run for share in found for run in share.written):
        counts[run.whole : run.whole + run.nbytes] += 1
    expected = np.zeros_like(counts)
    for part, offset in zip(model.states.parts, model.states.offsets, strict=False):
        expected[offset : offset + part.nbytes] = 1
    assert np.array_equal(counts, expected)
    cuts = [plan_cut(layer, states.geometry.parts, 1, parts) for layer in states.layers]
    is_cut = all(cuts)
    assert is_cut or not any(cuts)
    held = [share.held.nbytes for share in found]
    assert (max(held) < model.states.nbytes) == is_cut
    assert is_cut or parts > 2, "two workers share every family here"


def test_stages_know_how_many_layers_attend_before_them() -> None:
    """Layers of attention are counted in order, and those of another stage do not run."""
    model = loaded(tiny_module("qwen3_5"))  # the second of three layers attends
    for parallel, before in ((Parallel(1, 2), [0, 1]), (Parallel(1, 3), [0, 0, 1]), (Parallel(2), [0, 0])):
        _, modules, _ = divided_modules(model, parallel)
        assert [states_of(module).share.attending_before for module in modules] == before


def test_a_trial_notices_pages_of_other_heads() -> None:
    """The kernel would write them where another worker's are."""
    model = loaded(tiny_module("qwen3_5"))
    found, modules, vocabularies = divided_modules(model, Parallel(2))
    members, _regions = crews([replace(share, heads=(2, 2)) for share in found], vocabularies)
    works = [(crew, partial(follow_trial, part, "float32", crew)) for crew, part in zip(members, modules, strict=True)]
    with pytest.raises(UserError, match="has 1 KV heads, and this worker 2"):
        run_workers(works)


def test_memory_counts_what_all_workers_have_of_a_state() -> None:
    model = loaded(tiny_module("qwen3_5"))
    assert slot_bytes(Parallel(1), model) == slot_bytes(Parallel(1, 2), model) == model.states.nbytes
    assert slot_bytes(Parallel(2), model) == model.states.nbytes, "by heads: half each"
    whole = loaded(tiny_module("bamba", mamba_n_heads=1, mamba_d_head=64))
    assert slot_bytes(Parallel(2), whole) == 2 * whole.states.nbytes, "one head: both have it"


PARTS = StateGeometry(
    (StatePart(0, "conv", 0, (10, 3), "float32"), StatePart(0, "recurrent", 0, (6, 4, 5), "float32"),
     StatePart(2, "conv", 0, (7, 2), "bfloat16"))
)  # fmt: skip


def two_workers() -> list[StateShare]:
    """Worker 0 has the first layer's rows by turns with worker 1, and both have rows 4 and 5 of the first part, and the
    last part."""
    first = [[StateRange(0, 6, True)], [StateRange(0, 2, True)], [StateRange(0, 7, True)]]
    second = [[StateRange(4, 2, False), StateRange(6, 4, True)], [StateRange(2, 4, True)], [StateRange(0, 7, False)]]
    return [share_state(PARTS, ranges) for ranges in (first, second)]


@pytest.mark.parametrize(("page_bytes", "per_block"), [(128, 1), (200, 1), (4096, 1), (4096, 3)])
def test_a_snapshot_of_two_workers_is_that_of_one(page_bytes: int, per_block: int) -> None:
    """Written by two and read by one, and the other way; with pages that end within a part, and several in a block."""
    pages = torch.zeros((12, page_bytes), dtype=torch.uint8)
    needed = 1 if per_block > 1 else -(-PARTS.nbytes // page_bytes)
    places = [7] if per_block > 1 else list(range(11, 11 - needed, -1))
    whole = SlotStates(PARTS, 2, pages, per_block)
    both = [SlotStates(share.held, 2, pages, per_block, share=share) for share in two_workers()]
    generator = torch.Generator().manual_seed(3)
    for part in whole.parts:
        part[1] = torch.randn(part.shape[1:], generator=generator).to(part.dtype)
    whole.write_snapshot(places, whole.of_slot(1))
    before = pages.clone()
    for worker, share in zip(both, two_workers(), strict=True):
        worker.apply_order(LoadState(0, 32, places))
        for number, ranges in enumerate(([(0, 6), (4, 6)], [(0, 2), (2, 4)], [(0, 7), (0, 7)])):
            first, count = ranges[both.index(worker)]
            assert torch.equal(worker.parts[number][0], whole.parts[number][1, first : first + count])
        assert sum(run.nbytes for run in share.runs) == sum(part.nbytes for part in share.held.parts)
    pages.fill_(255)
    for worker in both:
        worker.write_snapshot(places, worker.of_slot(0))
    written = torch.zeros_like(pages, dtype=torch.bool)
    for run in (run for share in two_workers() for run in share.written):
        start = run.whole + (7 % per_block * PARTS.nbytes if per_block > 1 else 0)
        for place in range(start, start + run.nbytes):
            page, offset = divmod(place, page_bytes)
            written[7 // per_block if per_block > 1 else places[page], offset] = True
    assert torch.equal(pages[written], before[written]) and bool((pages[~written] == 255).all())
    whole.apply_order(LoadState(0, 32, places))
    assert all(torch.equal(part[0], part[1]) for part in whole.parts)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_no_worker_keeps_a_state_behind_a_late_draw(family: str) -> None:
    """Only the worker that leads knows of late draws; the other one is told."""
    model = loaded(tiny_module(family))
    driver = Driver.__new__(Driver)
    driver.device, driver.geometry, driver.steps = ThreadedWorkers(model, Parallel(2)), model.geometry, 0
    assert check_late_draws(driver, family, states=[LoadState(2, 0), LoadState(5, 0)])
