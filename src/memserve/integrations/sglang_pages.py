"""Pages of SGLang's own pools as values: where their pieces lie, and copies of one layer of many pages at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from memserve.client.views import View
from memserve.integrations.values import Piece, address, copied


def piece_bytes(entry: Any) -> list[int]:
    """Of a page: one piece for each buffer of each component, as they lie one behind the other in a value."""
    return [nbytes for component in entry.buffer_meta for _, _, nbytes in component]


def is_host(entry: Any) -> bool:
    """Whether this process can address the pool."""
    return all(buffer.device.type == "cpu" for buffer in entry.get_hybrid_pool_buffer())


def load_layer(entry: Any, rows: list[int], views: Sequence[View], layer: int, threads: int) -> None:
    """Copy one layer of the pages in ``views`` to ``rows``. Raises :class:`RuntimeError` for bytes that disagree with
    their checksums."""
    meta = entry.get_prepared_layer_range_meta(rows, layer)
    if meta is None:
        return
    if not is_host(entry):
        _to_device(entry, rows, views, layer)
        return
    moves, expected, numbers = list[tuple[int, int, int]](), list[int](), _numbers(entry)
    for view, targets, sizes, offsets in zip(views, *meta, strict=True):
        base = address(view.data)
        seals = np.frombuffer(view.data, "<u8", len(numbers), len(view.data) - 8 * len(numbers))
        moves += [(to, base + at, nbytes) for to, at, nbytes in zip(targets, offsets, sizes, strict=True)]
        expected += [int(seals[numbers[at]]) for at in offsets]
    if copied(moves, threads).tolist() != expected:
        raise RuntimeError(f"KV of layer {layer} changed after it was compared")


def pages_of(entry: Any, indices: Any, copies: list[Any]) -> list[list[Piece]]:
    """Where each page lies; of a device's memory in copies, which are added to ``copies`` and must be kept."""
    each = len(piece_bytes(entry))
    if is_host(entry):
        pieces: list[Piece] = list(zip(*entry.get_page_buffer_meta(indices), strict=True))
        return [pieces[at : at + each] for at in range(0, len(pieces), each)]
    pages = []
    for row in entry.prepare_locations(indices):
        page = [_bytes_of(entry, one, row).cpu() for component in entry.components for one in component]
        copies += page
        pages.append([(one.data_ptr(), one.numel()) for one in page])
    return pages


def _numbers(entry: Any) -> dict[int, int]:
    """Where a piece begins in a value -> its number."""
    return {at: number for number, at in enumerate(accumulate(piece_bytes(entry)[:-1], initial=0))}


def _to_device(entry: Any, rows: list[int], views: Sequence[View], layer: int) -> None:
    """Each copy is over when its call returns: SGLang's stream waits for the layer's mark, and for no event."""
    starts = list(_numbers(entry))
    mapped = entry.layer_mapping[layer]
    first = 0
    for component, buffers in zip(entry.buffer_meta, entry.components, strict=True):
        for number in [mapped] if isinstance(mapped, int) else mapped:
            for row, view in zip(rows, views, strict=True):
                source = np.frombuffer(view.data, np.uint8, component[number][2], starts[first + number])
                _bytes_of(entry, buffers[number], row).copy_(torch.from_numpy(source.copy()))
        first += len(buffers)


def _bytes_of(entry: Any, buffer: torch.Tensor, row: int) -> torch.Tensor:
    """A page's piece."""
    return buffer[row : row + entry._row_span].view(-1).view(torch.uint8)
