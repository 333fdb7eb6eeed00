"""Bad arguments to the attention kernels are ValueErrors that name the value; nothing is read or written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memserve import _kernels

ARENA = np.zeros(4 * 2 * 2 * 32 * 16, np.float32)  # 4 blocks, 2 layers, 2 kv heads, K and V of 8


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def batch(**changes: Any) -> _kernels.PagedBatch:
    arguments: dict[str, Any] = {
        "base": ARENA.ctypes.data,
        "geometry": (2, 2, 8, 8, 32, "float32", "auto"),
        "tables": np.array([[0, 1, 2], [3, -1, -1]], np.int32),
        "table_rows": ints(0, 1),
        "q_starts": ints(0, 2, 3),
        "contexts": ints(90, 30),
        "num_blocks": 4,
    }
    return _kernels.PagedBatch(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"geometry": (0, 2, 8, 8, 32, "float32", "auto")}, "num_layers is 0"),
        ({"geometry": (2, -1, 8, 8, 32, "float32", "auto")}, "num_kv_heads is -1"),
        ({"geometry": (2, 2, 12, 8, 32, "float32", "auto")}, "head_dim_k is 12"),
        ({"geometry": (2, 2, 8, 0, 32, "float32", "auto")}, "head_dim_v is 0"),
        ({"geometry": (2, 2, 8, 8, 24, "float32", "auto")}, "block_tokens is 24"),
        ({"geometry": (2, 2, 8, 8, 32, "int8", "auto")}, "dtype is 'int8'"),
        ({"geometry": (2, 2, 8, 8, 32, "float32", "int2")}, "kv_dtype is 'int2', not auto, int8, fp8 or int4"),
        ({"geometry": (2, 2, 8, 1032, 32, "float32", "fp8")}, "a head of 1032 elements is too large for KV as fp8"),
        ({"latent": True}, "latents are of one kv head"),
        ({"latent": True, "geometry": (2, 1, 8, 16, 32, "float32", "auto")}, "their values part of their keys"),
        ({"latent": True, "geometry": (2, 1, 16, 8, 32, "float32", "int8")}, "as computed"),
        ({"base": 0}, "base is 0"),
        ({"table_rows": ints(0)}, "table_rows has 1"),
        ({"table_rows": ints(0, 2)}, r"table_rows\[1\] is 2"),
        ({"table_rows": ints(-1, 1)}, r"table_rows\[0\] is -1"),
        ({"q_starts": ints(0, 2)}, "q_starts has 2"),
        ({"q_starts": ints(1, 2, 3)}, "q_starts begins with 1"),
        ({"q_starts": ints(0, 2, 1)}, "q_starts falls from 2 to 1"),
        ({"contexts": ints(90, 0)}, r"contexts\[1\] is 0"),
        ({"contexts": ints(97, 30)}, r"contexts\[0\] is 97"),
        ({"contexts": ints(90, 33)}, r"block id -1 at tables\[1, 1\]"),
        ({"num_blocks": 3}, r"block id 3 at tables\[1, 0\]"),
    ],
)
def test_bad_batches(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch(**changes)


def test_wrong_types_of_tables_are_type_errors() -> None:
    with pytest.raises(TypeError):
        batch(tables=np.zeros((2, 3), np.int64))
    with pytest.raises(TypeError):
        batch(tables=np.zeros(3, np.int32))


def test_unused_entries_of_a_table_may_be_anything() -> None:
    b = batch()
    assert (b.tokens, b.rows) == (3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": 2}, "layer is 2"),
        ({"layer": -1}, "layer is -1"),
        ({"heads": 3}, "heads is 3"),
        ({"heads": 0}, "heads is 0"),
        ({"scale": 0.0}, "scale is 0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"window": -1}, "window is -1"),
        ({"softcap": -1.0}, "softcap is -1"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks has 3"),
        ({"q": (0, 32, 8)}, "q's address is 0"),
        ({"out": (2, 32, 8)}, "out's address is 2"),
        ({"k": (1, 16, 8)}, "k's address is 1"),
    ],
)
def test_bad_calls(changes: dict[str, Any], message: str) -> None:
    rows = np.zeros((3, 4, 8), np.float32)
    wide, narrow = (rows.ctypes.data, 32, 8), (rows.ctypes.data, 16, 8)
    arguments = {"layer": 0, "heads": 4, "q": wide, "k": narrow, "v": narrow, "out": wide, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        _kernels.attend(batch(), **(arguments | changes))


def test_an_empty_step_does_nothing() -> None:
    none = batch(table_rows=ints(), q_starts=ints(0), contexts=ints())
    _kernels.attend(none, 0, 4, (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), 1.0)
    assert none.tokens == 0
