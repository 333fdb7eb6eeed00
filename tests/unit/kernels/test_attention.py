"""Paged CPU attention against a float64 twin: random ragged batches on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memserve import _kernels
from memserve.base.types import KV_DTYPES, KVGeometry
from memserve.model.attention.reference import CodedReferencePages, round_kv, values_of

LAYERS = 2
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}  # relative, in the Euclidean norm of a sequence


@pytest.fixture(autouse=True)
def defaults_again() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    _kernels.force_isa(None)
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """Sequences with ``done[i]`` cached and ``new[i]`` new tokens, and what a model may ask of attention."""

    done: tuple[int, ...]
    new: tuple[int, ...]
    kv_heads: int = 1
    group: int = 1
    dim_k: int = 64
    dim_v: int = 64
    block_tokens: int = 32
    dtype: str = "float32"
    kv_dtype: str = "auto"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    isa: str = "portable"
    threads: int = 2
    seed: int = 0
    latent: bool = False
    chunk: int = 0
    beside: int = 0
    """Bytes of other layers' pages behind those of each block."""

    @property
    def contexts(self) -> list[int]:
        return [d + n for d, n in zip(self.done, self.new, strict=True)]

    @property
    def geometry(self) -> KVGeometry:
        return KVGeometry(LAYERS, self.kv_heads, self.dim_k, self.dim_v, self.dtype, self.block_tokens, self.kv_dtype)


class World:
    """An arena full of NaN, block tables over scattered blocks, and the dense truth beside it."""

    def __init__(self, case: Case) -> None:
        self.case = c = case
        random = torch.Generator().manual_seed(c.seed)
        self.kind = getattr(torch, c.dtype)
        self.scale = c.dim_k**-0.5

        def draw(heads: int, dim: int) -> list[Tensor]:
            return [torch.randn(n, heads, dim, generator=random).to(self.kind) for n in c.contexts]

        heads = c.kv_heads * c.group
        self.q, self.k, self.v = draw(heads, c.dim_k), draw(c.kv_heads, c.dim_k), draw(c.kv_heads, c.dim_v)
        if c.latent:
            self.v = [key[..., : c.dim_v] for key in self.k]
        self.sinks = torch.randn(heads, generator=random) if c.sinks else None
        needed = [-(-n // c.block_tokens) for n in c.contexts]
        self.blocks = sum(needed) + 2
        ids = torch.randperm(self.blocks, generator=random).numpy().astype(np.int32)
        self.tables = np.full((len(needed) + 1, max(needed) + 1), -1, np.int32)  # row 0 belongs to nobody
        for row, (count, start) in enumerate(zip(needed, np.cumsum([0, *needed]), strict=False)):
            self.tables[row + 1, :count] = ids[start : start + count]
        if c.kv_dtype == "auto":
            head = c.block_tokens * (c.dim_k + c.dim_v * (not c.latent))
            size = LAYERS * c.kv_heads * head + c.beside // self.kind.itemsize
            self.arena = torch.full((self.blocks, size), torch.nan, dtype=self.kind)
        else:
            size = self.blocks * (c.geometry.block_bytes + c.beside)
            self.arena = torch.full((size,), 0xFF, dtype=torch.uint8)  # maxima: NaN

    def step(
        self, layer: int, first: list[int], end: list[int], write: bool = True, heads: int | None = None
    ) -> list[Tensor]:
        """Tokens [first, end) of every sequence in one call; returns each sequence's outputs. ``heads``: only so many
        ask."""
        c = self.case
        counts = [e - f for f, e in zip(first, end, strict=True)]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        batch = _kernels.PagedBatch(
            self.arena.data_ptr(),
            (LAYERS, c.kv_heads, c.dim_k, c.dim_v, c.block_tokens, c.dtype, c.kv_dtype),
            self.tables,
            np.arange(1, len(counts) + 1, dtype=np.int32),
            starts,
            np.array(end, np.int32),
            num_blocks=self.blocks,
            latent=c.latent,
            block_stride=self.arena.nbytes // self.blocks if c.beside else 0,
        )

        def gather(parts: list[Tensor]) -> Tensor:
            rows = torch.cat([p[f:e] for p, f, e in zip(parts, first, end, strict=True)])
            return rows.transpose(0, 1).contiguous().transpose(0, 1)  # heads outermost, as [1, H, T, D] arrives

        q, k, v = gather([part[:, :heads] for part in self.q]), gather(self.k), gather(self.v)
        out = torch.full((q.shape[0], q.shape[1], c.dim_v), torch.nan, dtype=self.kind)
        addresses = [(t.data_ptr(), t.stride(0), t.stride(1)) for t in (q, k, v, out)]
        sinks = None if self.sinks is None else self.sinks[:heads].numpy()
        _kernels.attend(
            batch,
            layer,
            q.shape[1],
            *addresses,
            self.scale,
            c.window,
            c.softcap,
            sinks=sinks,
            write=write,
            chunk=c.chunk,
        )
        return list(out.split(counts))

    def truth(self, row: int, first: int = 0) -> Tensor:
        """Positions from ``first`` on of one sequence in float64, from the same inputs, of which codes are made."""
        c = self.case
        k, v = self.k[row], self.v[row]
        if c.kv_dtype != "auto":
            k, v = (values_of(*round_kv(t, c.geometry), c.geometry) for t in (k, v))
        q, k, v = (t.double().transpose(0, 1) for t in (self.q[row][first:], k, v))
        grouped = q.unflatten(0, (c.kv_heads, c.group))
        scores = (grouped @ k.transpose(1, 2)[:, None]).flatten(0, 1) * self.scale
        if c.softcap:
            scores = c.softcap * torch.tanh(scores / c.softcap)
        n = scores.shape[-1]
        age = torch.arange(first, n)[:, None] - torch.arange(n)
        hidden = (age < 0) | (age >= c.window) if c.window else age < 0
        if c.chunk:
            hidden |= torch.arange(n) < (torch.arange(first, n) // c.chunk * c.chunk)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, n - first, 1)], -1)
        shares = scores.softmax(-1)[..., :n].unflatten(0, (c.kv_heads, c.group))
        return (shares @ v[:, None]).flatten(0, 1).transpose(0, 1)


def run(case: Case) -> World:
    """Cache the prefixes, attend to the new tokens, compare with the truth; layer 1 of 2."""
    _kernels.force_isa(case.isa)
    torch.set_num_threads(case.threads)
    world = World(case)
    none = [0] * len(case.done)
    if any(case.done):  # to be written: what is attended to does not matter
        world.step(1, none, list(case.done), heads=case.kv_heads)
    outputs = world.step(1, list(case.done), case.contexts)
    for row, out in enumerate(outputs):
        want = world.truth(row, case.done[row])
        error = float((out.double() - want).norm()) / max(float(want.norm()), 1e-9)
        assert out.isfinite().all() and error < TOLERANCE[case.dtype], f"row {row}: relative error {error}"
    return world


LENGTHS = st.integers(0, 20) | st.integers(0, 150)
ROWS = st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=5).filter(lambda rows: any(n for _, n in rows))
CASES = st.builds(
    Case,
    done=st.just(()),
    new=st.just(()),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 7, 13]),
    dim_k=st.sampled_from([8, 16, 32, 64, 80, 96, 112, 128, 192, 256]),
    dim_v=st.sampled_from([8, 16, 32, 64, 72, 96, 128, 256]),
    block_tokens=st.sampled_from([32, 32, 16, 48, 64]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    kv_dtype=st.sampled_from(["auto", *KV_DTYPES]),
    window=st.sampled_from([0, 0, 1, 7, 40, 1000]),
    softcap=st.sampled_from([0.0, 0.0, 0.5, 20.0]),
    sinks=st.booleans(),
    isa=st.sampled_from(_kernels.supported_isas()),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
    chunk=st.sampled_from([0, 0, 0, 5, 48, 100]),
    beside=st.sampled_from([0, 0, 4096]),
)


@settings(max_examples=150, deadline=None)
@given(CASES, ROWS)
def test_any_ragged_batch_equals_the_float64_twin(case: Case, rows: list[tuple[int, int]]) -> None:
    done, new = zip(*rows, strict=True)
    run(replace(case, done=done, new=new))


@settings(max_examples=100, deadline=None)
@given(CASES, ROWS)
def test_latents_are_keys_whose_beginning_is_the_value(case: Case, rows: list[tuple[int, int]]) -> None:
    """One KV head; the pages have no values of their own, so the arena is too small for a kernel that reads any."""
    done, new = zip(*rows, strict=True)
    latents = {"latent": True, "kv_heads": 1, "kv_dtype": "auto", "dim_v": min(case.dim_k, case.dim_v)}
    run(replace(case, done=done, new=new, **latents))


@pytest.mark.parametrize("isa", _kernels.supported_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads", [16, 128])
def test_latents_have_the_shape_of_deepseek(heads: int, dtype: str, isa: str) -> None:
    """A long decode in parts, a short one, a chunk; more heads than a tile has rows."""
    run(Case((530, 60, 0), (1, 1, 5), 1, heads, 576, 512, 32, dtype, isa=isa, latent=True))


@pytest.mark.parametrize("isa", _kernels.supported_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_long_decode_split_over_threads_beside_short_ones(isa: str, dtype: str) -> None:
    """The long context is cut into parts that are merged at last; the parts of the wider tile set the slot size."""
    run(Case((999, 60, 0), (1, 40, 3), 2, 3, 64, 64, 32, dtype, isa=isa, sinks=True))
    run(Case((1100,), (1,), 1, 4, 64, 128, 32, dtype, window=700, isa=isa))
    run(Case((1100, 1024), (1, 3), 1, 4, 64, 128, 32, dtype, chunk=512, isa=isa, beside=8192))


@pytest.mark.parametrize("isa", _kernels.supported_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=8, deadline=None)
@given(chunks=st.lists(st.integers(1, 90), min_size=1, max_size=6))
def test_chunks_do_not_change_the_result(isa: str, dtype: str, chunks: list[int]) -> None:
    case = Case((0, 0), (sum(chunks), 37), 2, 3, 64, 64, 32, dtype, isa=isa)
    _kernels.force_isa(isa)
    whole = World(case).step(0, [0, 0], case.contexts)
    world, got, first = World(case), [], 0
    for chunk in chunks:
        done = 37 if first else 0  # the other row comes along with the first chunk, then idles
        got.append(world.step(0, [first, done], [first + chunk, 37])[0])
        first += chunk
    torch.testing.assert_close(torch.cat(got), whole[0], rtol=0, atol=2e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("isa", _kernels.supported_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
@settings(max_examples=3, deadline=None)
@given(chunks=st.lists(st.integers(1, 90), min_size=1, max_size=6), block_tokens=st.sampled_from([16, 32, 64]))
def test_codes_are_those_of_their_token_in_any_chunks(
    kv_dtype: str, dtype: str, isa: str, chunks: list[int], block_tokens: int
) -> None:
    """To the last bit, on each instruction set, whatever else is computed with a token; all other bytes stay."""
    case = Case((0, 0), (sum(chunks), 37), 2, 3, 40, 72, block_tokens, dtype, kv_dtype, isa=isa)
    _kernels.force_isa(isa)
    world, first = World(case), 0
    expected = torch.full_like(world.arena, 0xFF)
    pages = CodedReferencePages(expected, case.geometry)
    for row, context in enumerate(case.contexts):
        places = torch.arange(context)
        blocks = torch.from_numpy(world.tables[row + 1]).long()[places // block_tokens]
        pages.write_kv(1, blocks, places % block_tokens, world.k[row], world.v[row])
    for chunk in chunks:
        world.step(1, [first, 37 if first else 0], [first + chunk, 37])
        first += chunk
    assert torch.equal(world.arena, expected)


SHAPES = {"smollm2": (3, 3, 64), "llama3": (8, 4, 128), "mqa": (1, 32, 256), "phi": (2, 4, 80), "phi3": (2, 1, 96)}


@pytest.mark.parametrize("isa", _kernels.supported_isas())
@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_coded_attention_has_the_shapes_of_models(shape: str, kv_dtype: str, isa: str) -> None:
    """A long decode, a short one and a chunk; then decodes alone, with all that a model may ask for."""
    kv_heads, group, dim = SHAPES[shape]
    rows = (290, 60, 0), (1, 40, 3)
    run(Case(*rows, kv_heads, group, dim, dim, 32, "bfloat16", kv_dtype, isa=isa))
    run(Case((330, 31), (1, 2), kv_heads, group, dim, dim, 32, "float32", kv_dtype, 200, 20.0, sinks=True, isa=isa))


@pytest.mark.parametrize("isa", _kernels.supported_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_what_is_no_number_makes_its_own_row_none(kv_dtype: str, dtype: str, isa: str) -> None:
    """A decode over a value that is none; the other row shares no block with it."""
    _kernels.force_isa(isa)
    world = World(Case((300, 80), (1, 1), 1, 2, 64, 64, 32, dtype, kv_dtype, isa=isa))
    world.v[0][300, 0, 5] = torch.nan
    world.step(1, [0, 0], [300, 80])
    broken, whole = world.step(1, [300, 80], [301, 81])
    assert bool(broken[0, 0].isnan().any()) and bool(whole.isfinite().all())


@pytest.mark.parametrize("isa", _kernels.supported_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_only_the_slots_of_new_tokens(isa: str, dtype: str) -> None:
    """Every slot but those of the context still holds the NaN it was born with, in this layer and the other."""
    world = run(Case((5, 0, 64), (9, 70, 1), 2, 2, 32, 16, 32, dtype, isa=isa))
    c = world.case
    expected = torch.full_like(world.arena, torch.nan)
    heads = expected.unflatten(-1, (LAYERS, c.kv_heads, -1))
    k, v = heads.split([c.dim_k * 32, c.dim_v * 32], dim=-1)
    k, v = k.unflatten(-1, (c.dim_k, 32)), v.unflatten(-1, (32, c.dim_v))
    for row, context in enumerate(c.contexts):
        for token in range(context):
            block, slot = world.tables[row + 1, token // 32], token % 32
            k[block, 1, :, :, slot] = world.k[row][token]
            v[block, 1, :, slot] = world.v[row][token]
    torch.testing.assert_close(world.arena, expected, rtol=0, atol=0, equal_nan=True)


def test_write_false_reads_what_lies_in_the_pages() -> None:
    world = run(Case((40,), (3,), 2, 2))
    before = world.arena.clone()
    first = world.step(1, [40], [43])
    world.k = [t * torch.nan for t in world.k]
    again = world.step(1, [40], [43], write=False)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    torch.testing.assert_close(world.arena, before, rtol=0, atol=0, equal_nan=True)


def test_row_reads_blocks_another_row_writes_in_the_same_step() -> None:
    """Two requests with one prefix, scheduled together: the second one's table names the first one's blocks."""
    world = World(Case((0, 0), (32, 70), 2, 2))  # the second row costs more, so its tiles would run first
    torch.set_num_threads(1)
    world.tables[2, 0] = world.tables[1, 0]
    for parts in (world.q, world.k, world.v):
        parts[1][:32] = parts[0]
    out = world.step(0, [0, 32], [32, 70])
    torch.testing.assert_close(out[1].double(), world.truth(1)[32:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("magnitude", [1e-3, 30.0, 200.0])
@pytest.mark.parametrize("isa", _kernels.supported_isas())
def test_scores_of_any_size(isa: str, magnitude: float) -> None:
    """Flat, peaked and one-hot softmax: no overflow, and small weights vanish instead of turning into noise."""
    _kernels.force_isa(isa)
    world = World(Case((0,), (130,), 1, 2, 64, 64, isa=isa))
    world.q = [t * magnitude for t in world.q]
    out = world.step(0, [0], [130])[0]
    want = world.truth(0)
    assert float((out.double() - want).norm() / want.norm()) < 2e-6 * max(1.0, magnitude)


def test_isa_can_be_forced_and_is_checked() -> None:
    assert _kernels.isa() == _kernels.supported_isas()[-1]
    for name in _kernels.supported_isas():
        _kernels.force_isa(name)
        assert _kernels.isa() == name
    with pytest.raises(ValueError, match="mmx"):
        _kernels.force_isa("mmx")
