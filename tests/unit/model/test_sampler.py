"""Drawing tokens: the generator, the distributions, the filters, the penalties, and independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve import _kernels
from memserve.base.types import SamplingParams, StopParams
from memserve.instance.events import OpenSequence
from memserve.model.sampling import (
    Sampled,
    Truncation,
    best_logits,
    best_logprobs,
    draw,
    draw_native,
    log_normalisers,
    philox4x32,
    report_logprobs,
    sample,
    uniforms,
)
from memserve.model.slots import SlotTable


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter: tuple, key: tuple, expected: tuple) -> None:
    """Known answers of Random123 (kat_vectors, philox4x32 10 rounds)."""
    assert tuple(int(word[0]) for word in philox4x32(words(*counter), words(*key))) == expected


def test_uniforms_are_uniform_in_each_part_of_the_key() -> None:
    n = 20_000
    seeds, zeros = np.full(n, 7, np.uint64), np.zeros(n, np.int64)
    for values in (
        uniforms(seeds, zeros, np.arange(n)),
        uniforms(seeds, np.arange(n), zeros),
        uniforms(np.arange(n).astype(np.uint64), zeros, zeros),
    ):
        assert values.min() >= 0 and values.max() < 1
        counts = np.histogram(values, bins=50, range=(0, 1))[0]
        assert chi_square(counts, np.full(50, n / 50)) < 100  # 49 degrees of freedom: p < 1e-5
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.04


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def truncation(n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Truncation:
    """``n`` rows drawn alike, with uniforms that cover the unit interval evenly."""
    return Truncation(
        torch.full((n,), temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
        (torch.arange(n, dtype=torch.float64) + 0.5) / n,
    )


def kept_by(p: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The simple twin of the filters: sorted, one token after the other."""
    keep = np.zeros(len(p), bool)
    order = np.argsort(-p, kind="stable")[: top_k or len(p)]
    mass, before = p[order].sum(), 0.0
    for rank, token in enumerate(order):
        if rank and ((top_p < 1 and before >= top_p * mass) or p[token] < min_p * p.max()):
            break
        keep[token] = True
        before += p[token]
    return keep


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([1, 2, 13, 300, 700]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 1, 5, 270, 10_000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_filters_keep_what_the_simple_twin_keeps(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """An even sweep of the uniforms draws every kept token as often as its probability says, and no other."""
    n = 500
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, vocab).astype(np.float32))
    p = torch.softmax(logits.double() / temperature, -1).numpy()
    kept = np.where(kept_by(p, top_k, top_p, min_p), p, 0.0)
    kept /= kept.sum()
    how = truncation(n, temperature, top_k, top_p, min_p)
    native = draw_native(logits[None], torch.zeros(n, dtype=torch.int64), how)
    for tokens in (draw(logits.expand(n, vocab), how).numpy(), native):
        counts = np.bincount(tokens, minlength=vocab)
        assert (counts[kept == 0] == 0).all()
        assert np.abs(counts / n - kept).max() <= 1.5 / n + 1e-5


@pytest.mark.parametrize("isa", _kernels.supported_isas())
@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_kernel_samples_the_same_as_torch(isa: str, spread: float) -> None:
    """Every instruction set, filters mixed in one batch, flat and peaked rows of a whole vocabulary: the same tokens.

    Of 400 draws, at most two may fall within rounding of a boundary.
    """
    rng = np.random.default_rng(int(spread * 10))
    n, vocab = 400, 5003
    logits = torch.from_numpy(rng.normal(0, spread, (40, vocab)).astype(np.float32))
    rows = torch.from_numpy(rng.integers(0, 40, n))
    how = Truncation(
        torch.from_numpy(rng.choice([0.2, 0.7, 1.0, 1.5], n).astype(np.float32)),
        torch.from_numpy(rng.choice([0, 1, 7, 40, 300, 9000], n)),
        torch.from_numpy(rng.choice([1.0, 0.95, 0.5, 0.01], n).astype(np.float32)),
        torch.from_numpy(rng.choice([0.0, 0.02, 1.0], n).astype(np.float32)),
        torch.from_numpy(rng.random(n)),
    )
    _kernels.force_isa(isa)
    try:
        native = draw_native(logits, rows, how)
    finally:
        _kernels.force_isa(None)
    assert (native != draw(logits[rows], how).numpy()).sum() <= 2


def test_the_kernel_keeps_the_lower_ids_of_equal_tokens() -> None:
    """Ties are decided by id, whichever filter cuts through them."""
    logits, rows = torch.zeros(1, 600), torch.zeros(64, dtype=torch.int64)
    assert set(draw_native(logits, rows, truncation(64, 1.0, top_k=3)).tolist()) == {0, 1, 2}
    assert set(draw_native(logits, rows, truncation(64, 1.0, top_p=0.01)).tolist()) == set(range(6))


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_the_kernel_survives_rows_without_a_possible_token(bad: float) -> None:
    rows = torch.zeros(4, dtype=torch.int64)
    for how in (truncation(4, 1.0), truncation(4, 1.0, top_k=3, top_p=0.5)):
        assert ((draw_native(torch.full((1, 300), bad), rows, how) >= 0).all()) and (
            draw_native(torch.full((1, 300), bad), rows, how) < 300
        ).all()


def test_tiny_temperatures_and_impossible_tokens_are_safe() -> None:
    logits = torch.tensor([[3.0, -math.inf, 2.999, -math.inf]]).expand(64, 4).contiguous()
    assert set(draw(logits, truncation(64, 1e-38)).tolist()) == {0}
    assert set(draw(logits, truncation(64, 100.0)).tolist()) == {0, 2}
    rows = torch.arange(64)
    assert set(draw_native(logits, rows, truncation(64, 1e-38)).tolist()) == {0}
    assert set(draw_native(logits, rows, truncation(64, 100.0)).tolist()) == {0, 2}


def table_of(samplings: list[SamplingParams], tokens: list[list[int]], prompt: int, **more: object) -> SlotTable:
    table = SlotTable(len(samplings), 64, 32)
    for slot, (sampling, known) in enumerate(zip(samplings, tokens, strict=True)):
        table.open_slot(OpenSequence(slot, np.array(known, np.int32), prompt, slot, sampling, [slot], **more))
    return table


def sample_all(table: SlotTable, logits: torch.Tensor) -> Sampled:
    slots = np.arange(len(logits))
    return sample(logits.clone(), slots, slots, table)


def test_samples_do_not_depend_on_the_batch() -> None:
    """Whatever else is in the batch, however the rows are ordered: same seed, index and position, same token."""
    rng = np.random.default_rng(0)
    choices = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.05)]
    samplings = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=seed, frequency_penalty=0.3 * (seed % 2))
        for seed, (t, k, p, m) in enumerate(choices * 4)
    ]
    tokens = [rng.integers(0, 500, 5 + seed).tolist() for seed in range(20)]
    logits = torch.from_numpy(rng.normal(0, 2, (20, 500)).astype(np.float32))
    together = sample_all(table_of(samplings, tokens, 4), logits).tokens
    table = table_of(samplings, tokens, 4)
    alone = [int(sample(logits[[s]].clone(), np.array([0]), np.array([s]), table).tokens[0]) for s in range(20)]
    order = rng.permutation(20)
    shuffled = sample(logits[order].clone(), np.arange(20), order, table).tokens
    assert together.tolist() == alone and shuffled.tolist() == together[order].tolist()


def test_draws_follow_the_softmax_over_positions_and_indices() -> None:
    """Chi-square of 4,000 tokens drawn along one sequence, and of 4,000 sequences of one request."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0])
    expected = torch.softmax(logits / 0.8, -1).numpy() * 4000
    sampling = SamplingParams(temperature=0.8, seed=123)
    positions, indices = np.zeros(6), np.zeros(6)
    table = SlotTable(4000, 8, 32)
    for slot in range(4000):
        table.open_slot(OpenSequence(slot, np.zeros(4, np.int32), 4, slot, sampling, [0]))
    drawn = sample(logits.repeat(4000, 1), np.arange(4000), np.arange(4000), table)
    indices += np.bincount(drawn.tokens, minlength=6)
    table.index[:], table.prompt_tokens[:] = 0, -np.arange(4000)  # as if slot ``s`` had generated ``4 + s`` tokens
    drawn = sample(logits.repeat(4000, 1), np.arange(4000), np.arange(4000), table)
    positions += np.bincount(drawn.tokens, minlength=6)
    assert chi_square(indices, expected) < 25 and chi_square(positions, expected) < 25  # 5 degrees: p < 2e-4


def test_penalties_and_bias_match_openai_and_transformers() -> None:
    """Repetition counts the prompt too, presence and frequency only the output; then the bias is added."""
    known, prompt = [1, 2, 2, 3, 3, 4], 3  # prompt 1 2 2, output 3 3 4
    base = torch.tensor([0.5, 1.0, -1.0, 2.0, 3.0, -0.5])
    sampling = SamplingParams(
        temperature=0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((5, 10.0), (0, 1.0)),
        logprobs=6,
    )
    expected = torch.tensor([1.5, 0.5, -2.0, 1.0 - 0.5 - 0.5, 1.5 - 0.5 - 0.25, 9.5]).log_softmax(-1)
    drawn = sample_all(table_of([sampling], [known], prompt), base[None])
    assert drawn.tokens.tolist() == [5]
    got = dict(drawn.logprobs[0].top)
    assert [got[i] for i in range(6)] == pytest.approx(expected.tolist(), abs=1e-5)
    assert drawn.logprobs[0].logprob == pytest.approx(float(expected[5]), abs=1e-5)


def test_logprobs_are_before_temperature() -> None:
    sampling = SamplingParams(temperature=0.2, top_k=1, logprobs=1)
    drawn = sample_all(table_of([sampling], [[1]], 1), torch.tensor([[0.0, 1.0, 2.0]]))
    assert drawn.logprobs[0].logprob == pytest.approx(math.log(math.exp(2) / (1 + math.e + math.exp(2))), abs=1e-5)


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    stop = StopParams(min_tokens=2, stop_token_ids=(1,))
    greedy = SamplingParams(temperature=0, logprobs=3)
    early = sample_all(table_of([greedy], [[0, 0, 0]], 2, stop=stop), logits)
    assert early.tokens.tolist() == [2] and 1 not in dict(early.logprobs[0].top)  # an impossible token is not reported
    late = sample_all(table_of([greedy], [[0, 0, 0]], 1, stop=stop), logits)
    assert late.tokens.tolist() == [1]


def test_several_draws_from_one_row_do_not_disturb_each_other() -> None:
    """Parallel sampling: one row of logits, three sequences, one of them biased."""
    biased = SamplingParams(temperature=0, logit_bias=((0, 100.0),))
    greedy = SamplingParams(temperature=0)
    table = table_of([greedy, biased, greedy], [[0]] * 3, 1)
    drawn = sample(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), np.array([0, 0, 1]), np.arange(3), table)
    assert drawn.tokens.tolist() == [1, 0, 0]


@pytest.mark.parametrize("vocab", [3, 300, 5003])
def test_native_logprobs_equal_torchs(vocab: int) -> None:
    """Normalisers and best tokens, with impossible tokens among them, for more best tokens than chunks as well."""
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(0, 4, (5, vocab)).astype(np.float32))
    logits[:, 1] = -math.inf
    torch.testing.assert_close(log_normalisers(logits), logits.logsumexp(-1))
    for count in (1, 2, 25):
        values, tokens = logits.topk(min(count, vocab), dim=-1)
        want = [
            [t for t, v in zip(*row, strict=True) if v > -math.inf]
            for row in zip(tokens.tolist(), values.tolist(), strict=True)
        ]
        got = best_logprobs(logits, logits.logsumexp(-1), count)
        assert [[token for token, _ in row] for row in got] == want


def test_long_reports_are_cut_into_slices() -> None:
    logits = torch.randn((150, 11), generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(150) % 11
    reports = report_logprobs(logits, tokens, 2)
    expected = logits.log_softmax(-1)[torch.arange(150), tokens]
    assert [report.logprob for report in reports] == pytest.approx(expected.tolist(), abs=1e-5)
    assert [report.top[0][0] for report in reports] == logits.argmax(-1).tolist()


_ODD = [0.0, -1.0, 1e-45, 1e-30, 1e-3, 1.0, 1 - 2**-24, 1 + 2**-23, 1e30, math.inf, -math.inf, math.nan]


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 255, 256, 257, 700, 5003]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 10.0, 200.0, 1e30]),
    blots=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38]), max_size=3),
    everywhere=st.booleans(),
    temperature=st.sampled_from(_ODD),
    top_k=st.sampled_from([-(2**63), -1, 0, 1, 2, 255, 256, 300, 1000, 5002, 5003, 5004, 2**63 - 1]),
    top_p=st.sampled_from(_ODD),
    min_p=st.sampled_from(_ODD),
    uniform=st.sampled_from([0.0, 0.5, 1 - 2**-53, 1.0, -1.0, math.inf, math.nan]),
    best=st.sampled_from([1, 2, 20, 300, 5003]),
)
def test_native_sampling_stays_in_its_row_whatever_it_is_asked(
    seed: int, vocab: int, spread: float, blots: list[float], everywhere: bool,
    temperature: float, top_k: int, top_p: float, min_p: float, uniform: float, best: int,
) -> None:  # fmt: skip
    """A large ``top_k`` at a low temperature once read before the beginning of an empty list."""
    rng = np.random.default_rng(seed)
    row = (rng.normal(0, 1, vocab) * spread).astype(np.float32)
    for blot in blots:
        row[rng.integers(0, vocab, vocab if everywhere else 1)] = blot
    logits = torch.from_numpy(row)[None]
    how = Truncation(
        torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]),
        torch.tensor([uniform], dtype=torch.float64),
    )  # fmt: skip
    token = int(draw_native(logits, torch.zeros(1, dtype=torch.int64), how)[0])
    assert 0 <= token < vocab
    possible = np.isfinite(row).all() and math.isfinite(temperature)
    if possible and top_p > 0 and 0 <= min_p <= 1 and 0 <= uniform < 1:
        cold = max(temperature, 1e-30)
        assert (np.float32(row[token]) - row.max()) / np.float32(cold) > -88, "an impossible token was drawn"
    values, tokens = best_logits(logits, min(best, vocab))
    assert ((tokens >= 0) & (tokens < vocab)).all() and not values.isnan().any()
    log_normalisers(logits)
