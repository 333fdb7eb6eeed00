"""The device against the family's own eager path: hand-written plans, tiny random models, float32, greedy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from geometries import CODED_SHAPES, SHAPES
from late_grammar import check_late_draws
from memserve.base.errors import InvariantError
from memserve.base.types import KV_DTYPES, CopyBlocks, SamplingParams, StopParams, Tier
from memserve.instance.events import OpenSequence
from memserve.model.attention.context import step_attention
from memserve.model.attention.reference import CodedReferencePages, ReferenceAttention, ReferencePages
from memserve.model.forward import EagerForward
from memserve.model.loading.loader import LoadedModel
from tiny_models import FAMILIES, GREEDY, VOCAB, Driver, greedy_tokens, loaded, prompt, sequence, tiny_module


@pytest.fixture
def llama() -> tuple[object, Driver]:
    return tiny_module("llama"), Driver(loaded(tiny_module("llama")))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_mixed_batches_give_the_reference_tokens(family: str) -> None:
    """Two prompts in chunks of odd sizes beside each other's decodes; windows, caps and sinks all bite."""
    first, second = prompt(75, 1), prompt(41, 2)
    module = tiny_module(family)
    expected = greedy_tokens(module, first, 6), greedy_tokens(module, second, 4)

    driver = Driver(loaded(tiny_module(family)))
    driver.step([(3, 0, 50, ())], open=[sequence(3, first, [9, 2])])
    got_second = driver.step(
        [(3, 50, 5, ()), (6, 0, 41, (6,))], grow=[(3, [33])], open=[sequence(6, second, [7, 40])]
    ).tokens
    mixed = driver.step([(6, 41, 1, (6,)), (3, 55, 20, (3,))]).tokens
    got_first, got_second = mixed[1:], [*got_second, *mixed[:1]]
    for offset in range(2):
        tokens = driver.step([(3, 75 + offset, 1, (3,)), (6, 42 + offset, 1, (6,))]).tokens
        got_first, got_second = [*got_first, tokens[0]], [*got_second, tokens[1]]
    got_first += driver.decode(3, 77, 3)
    assert (got_first, got_second) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_families_own(family: str) -> None:
    """Whole logits of a prompt in two chunks, through the kernel, packed and plain."""
    tokens = prompt(60, 3)
    module = tiny_module(family)
    with torch.inference_mode():
        expected = module(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    for pack in (False, True):
        model = loaded(tiny_module(family))
        seen: list[torch.Tensor] = []
        forward = EagerForward(model.module, pack=pack)
        driver = Driver(model, forward=lambda *inputs, call=forward, out=seen: out.append(call(*inputs)) or out[-1])
        driver.step([(0, 0, 33, ())], open=[sequence(0, tokens, [5, 1])], prompt_logprob_rows=[0])
        driver.step([(0, 33, 27, ())], prompt_logprob_rows=[0])
        torch.testing.assert_close(torch.cat(seen), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_kernel_and_reference_agree_on_the_device(family: str, kv_dtype: str) -> None:
    """The fallback for devices without a kernel gives the same tokens."""
    tokens, module = prompt(70, 5), tiny_module(family)
    model = loaded(tiny_module(family), kv_dtype=kv_dtype)
    is_exact = kv_dtype == "auto"
    expected = greedy_tokens(module, tokens, 3) if is_exact else kept_whole(model, tokens, 3)
    arena = torch.zeros(16 * model.geometry.block_bytes, dtype=torch.uint8)
    pages = (ReferencePages if is_exact else CodedReferencePages)(arena, model.geometry)
    driver = Driver(model, attention=partial(ReferenceAttention, pages))
    got = driver.step([(0, 0, 70, (0,))], open=[sequence(0, tokens, [8, 3, 12])]).tokens
    assert got + driver.decode(0, 70, 2) == expected


def test_forks_draw_from_one_prompt_and_go_their_own_ways(llama: tuple[object, Driver]) -> None:
    """Two sequences of one prompt share its full block; one gets a copy of the partial one (copy-on-write)."""
    module, driver = llama
    tokens = prompt(40, 7)
    banned = greedy_tokens(module, tokens, 1)[0]
    other = SamplingParams(temperature=0, logit_bias=((banned, -100.0),))
    forks = [sequence(0, tokens, [4, 5]), sequence(1, tokens, [4, 5], other, index=1)]
    first = driver.step([(0, 0, 40, (0, 1))], open=forks).tokens
    assert first[0] == banned != first[1]
    copy = CopyBlocks(Tier.HBM, Tier.HBM, [5], [20])
    second = driver.step([(0, 40, 1, (0,)), (1, 40, 1, (1,))], copies=[copy], replace=[(1, 1, 20)]).tokens
    rest = driver.step([(0, 41, 1, (0,)), (1, 41, 1, (1,))]).tokens
    assert [first[0], second[0], rest[0]] == greedy_tokens(module, tokens, 3)
    forked = torch.from_numpy(np.append(tokens, first[1]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = module(input_ids=forked, use_cache=False).logits[0, -1].index_fill(0, torch.tensor(banned), -1e9)
    assert second[1] == int(logits.argmax())


def test_a_sequence_survives_a_trip_to_host_memory(llama: tuple[object, Driver]) -> None:
    """Swap out, let another sequence overwrite the blocks, swap in elsewhere, reopen in another slot, go on."""
    module, driver = llama
    tokens, intruder = prompt(50, 8), prompt(64, 9)
    expected = greedy_tokens(module, tokens, 4)
    got = driver.step([(0, 0, 50, (0,))], open=[sequence(0, tokens, [1, 2])]).tokens
    got += driver.decode(0, 50, 1)
    out = CopyBlocks(Tier.HBM, Tier.DRAM, [1, 2], [6, 0])
    driver.step([(0, 0, 64, ())], close=[0], copies=[out], open=[sequence(0, intruder, [2, 1])])
    back = CopyBlocks(Tier.DRAM, Tier.HBM, [6, 0], [11, 10])
    known = np.concatenate([tokens, got]).astype(np.int32)
    resumed = OpenSequence(5, known, 50, 0, SamplingParams(temperature=0), [11, 10])
    got += driver.step([(5, 51, 1, (5,))], copies=[back], open=[resumed]).tokens
    assert got + driver.decode(5, 52, 1) == expected


def kept_whole(model: LoadedModel, tokens: np.ndarray, count: int) -> list[int]:
    """What a device draws behind a prompt that it computes in one step, and whose KV stays where it is."""
    driver = Driver(model, blocks=8)
    blocks = list(range(-(-(len(tokens) + count) // model.geometry.block_tokens)))
    drawn = driver.step([(0, 0, len(tokens), (0,))], open=[sequence(0, tokens, blocks)]).tokens
    return drawn + driver.decode(0, len(tokens), count - 1)


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [*((name, "auto") for name in SHAPES), *((name, "int8") for name in CODED_SHAPES)]
)
def test_real_geometries_survive_chunks_and_a_trip(name: str, kv_dtype: str) -> None:
    """A prompt in two chunks, out to DRAM, its blocks overwritten, back in elsewhere."""
    shape, tokens = SHAPES[name].with_codes(kv_dtype), prompt(100, 8)
    sizes = {"block_tokens": shape.kv.block_tokens, "kv_dtype": kv_dtype}
    driver = Driver(loaded(shape.module(), **sizes), blocks=8, dram_blocks=4)
    assert driver.geometry == shape.in_dtype("float32")
    used = slice(-(-104 // shape.kv.block_tokens))
    here, below, there = [6, 1, 4, 3][used], [3, 0, 2, 1][used], [0, 7, 2, 5][used]
    driver.step([(0, 0, 47, ())], open=[sequence(0, tokens, here)])
    got = driver.step([(0, 47, 53, (0,))]).tokens
    out, back = CopyBlocks(Tier.HBM, Tier.DRAM, here, below), CopyBlocks(Tier.DRAM, Tier.HBM, below, there)
    driver.step([(1, 0, 100, ())], close=[0], copies=[out], open=[sequence(1, prompt(100, 9), here)])
    known = np.concatenate([tokens, got]).astype(np.int32)
    resumed = OpenSequence(2, known, 100, 0, GREEDY, there)
    got += driver.step([(2, 100, 1, (2,))], copies=[back], open=[resumed]).tokens
    got += driver.decode(2, 101, 1)
    is_exact = kv_dtype == "auto"
    assert got == (greedy_tokens if is_exact else kept_whole)(
        shape.module() if is_exact else loaded(shape.module(), **sizes), tokens, 3
    )


def test_copies_run_in_order(llama: tuple[object, Driver]) -> None:
    """A later copy reads what an earlier one of the same plan has written."""
    module, driver = llama
    tokens = prompt(32, 10)
    driver.step([(0, 0, 31, ())], open=[sequence(0, tokens, [1])])
    chain = [CopyBlocks(Tier.HBM, Tier.HBM, [1, 2], [2, 3]), CopyBlocks(Tier.HBM, Tier.HBM, [3], [4])]
    got = driver.step([(0, 31, 1, (0,))], copies=chain, replace=[(0, 0, 4)]).tokens
    assert got == greedy_tokens(module, tokens, 1)


def test_prompt_logprobs_come_in_chunks(llama: tuple[object, Driver]) -> None:
    """Entry ``j`` of a row belongs to the prompt token behind the row's ``j``-th; the last has none behind it."""
    module, driver = llama
    tokens = prompt(20, 11)
    opened = sequence(0, tokens, [1], SamplingParams(temperature=0, logprobs=2, prompt_logprobs=True))
    head = driver.step([(0, 0, 12, ())], open=[opened], prompt_logprob_rows=[0]).prompt_logprobs[0]
    last = driver.step([(0, 12, 8, (0,))], prompt_logprob_rows=[0])
    entries = head + last.prompt_logprobs[0]
    with torch.inference_mode():
        logits = module(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    expected = logits.log_softmax(-1)
    assert entries[-1] is None and len(entries) == 20
    for place, entry in enumerate(entries[:-1]):
        assert entry.token == tokens[place + 1] and len(entry.top) == 2
        assert entry.logprob == pytest.approx(float(expected[place, entry.token]), abs=1e-4)
        assert entry.top[0][0] == int(expected[place].argmax())
    assert last.logprobs[0].token == last.tokens[0] == int(expected[-1].argmax())


def test_beam_candidates_and_minimum_tokens(llama: tuple[object, Driver]) -> None:
    """A beam row reports its best candidates; a stop token is impossible before ``min_tokens``."""
    module, driver = llama
    tokens = prompt(30, 12)
    best = greedy_tokens(module, tokens, 1)[0]
    stop = StopParams(min_tokens=1, stop_token_ids=(best,))
    beams = [sequence(0, tokens, [1], beam_candidates=4), sequence(1, tokens, [1], stop=stop)]
    finished = driver.step([(0, 0, 30, (0, 1))], open=beams)
    with torch.inference_mode():
        scores, ids = (
            module(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1].log_softmax(-1).topk(4)
        )
    assert [token for token, _ in finished.candidates[0]] == ids.tolist()
    assert [score for _, score in finished.candidates[0]] == pytest.approx(scores.tolist(), abs=1e-4)
    assert finished.tokens == [best, int(ids[1])]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=5)], ids=["greedy", "random"])
def test_drafts_give_the_tokens_of_one_step_each(sampling: SamplingParams) -> None:
    """Right ones up to each place, wrong ones, another sequence beside them."""
    first, second, drivers = prompt(40, 8), prompt(21, 9), [Driver(loaded(tiny_module("llama"))) for _ in range(2)]
    for driver in drivers:
        driver.step([(0, 0, 40, (0,)), (1, 0, 21, (1,))],
                    open=[sequence(0, first, [4, 7], sampling), sequence(1, second, [9, 11], sampling)])  # fmt: skip
    plain, drafting = drivers
    want = [plain.step([(1, 21 + at, 1, (1,)), (0, 40 + at, 1, (0,))]).tokens for at in range(12)]
    beside, expected = [one for one, _ in want], [one for _, one in want]
    got: list[int] = []
    others: list[int] = []
    for at, right in enumerate((3, 0, 1, 2)):
        drafts = [(token + (place >= right)) % VOCAB for place, token in enumerate(expected[len(got) :][:3])]
        rows = [(1, 21 + at, 1, (1,)), (0, 40 + len(got), 4, (0,))]
        done = drafting.step(rows, drafts={1: drafts})
        assert len(done.accepted_drafts[0]) == right
        others.append(done.tokens[0])
        got += [done.tokens[1], *done.accepted_drafts[0]]
    assert got == expected[: len(got)] and others == beside[:4]
    got += drafting.decode(0, 40 + len(got), 2)
    assert got == expected[: len(got)] and len(got) == 12


def test_late_sample_equals_the_timely_one(llama: tuple[object, Driver]) -> None:
    assert check_late_draws(llama[1])


def test_broken_plans_are_refused(llama: tuple[object, Driver]) -> None:
    _, driver = llama
    driver.step(open=[sequence(0, prompt(40, 13), [1])])
    with pytest.raises(InvariantError, match="has 1 blocks"):
        driver.step([(0, 0, 40, (0,))])
    with pytest.raises(InvariantError, match="knows 40 tokens"):
        driver.step([(0, 40, 1, (0,))])
    with pytest.raises(InvariantError, match="open: False"):
        driver.step([(2, 0, 1, (2,))])
    with pytest.raises(InvariantError, match="opened twice"):
        driver.step(open=[sequence(0, prompt(4, 14), [2])])
    with pytest.raises(InvariantError, match="not open"):
        driver.step(close=[3])


def test_attention_outside_a_step_is_a_bug() -> None:
    model = loaded(tiny_module("llama"))
    with pytest.raises(InvariantError, match="outside a step"):
        EagerForward(model.module)(*(torch.arange(3) for _ in range(3)))
    with step_attention(None), pytest.raises(InvariantError):
        EagerForward(model.module)(*(torch.arange(3) for _ in range(3)))
