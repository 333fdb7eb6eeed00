"""Gives pages of a module's weights back to the system as soon as they were used, so that a start holds a model once.

Weights are mapped from their files: whatever reads them makes their pages resident. Pages of such a map that nothing
has written to can be dropped at any time, and come again from the file when they are read. So a forward before the
weights are packed has only the layers resident that it computes (:meth:`WeightPages.one_layer_at_a_time`), and packing
drops each weight behind itself (:meth:`WeightPages.release_values`).

Weights that were computed at load (of another dtype than their file's, or joined from several tensors) lie in memory
of this process alone. Their pages are dropped as well once they are packed, and are zeros then;
:meth:`WeightPages.restore_dropped` reads them again, for the rare module that turns out not to be captured after its
weights were packed.
"""

from __future__ import annotations

import bisect
import ctypes
import io
import logging
import math
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memserve.base.units import MIB

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)

LARGE_BYTES = 512 * MIB
"""Up to here mapped weights may be resident beside packed ones: to drop their pages between two forwards, and read them
again, would only take time."""
_PAGE = mmap.PAGESIZE
_MADV_DONTNEED = 4
_MAP_NORESERVE = 0x4000
_ATTRIBUTE = "memserve_pages"
_PAGE_WORD = np.dtype(np.uint64)
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))  # in /proc/self/pagemap
_MAP = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ +(.*)$")


class WeightPages:
    """The pages of one module's weights. Nothing may write to the weights while it is used."""

    def __init__(self, module: Any = None, files: Sequence[Path] = (), reload: Callable[[], Any] | None = None) -> None:
        """``files``: those that ``module`` may be mapped from. ``reload``: gives the module again; None: weights that
        are not mapped are left alone."""
        self._maps = sorted(_clean_maps({str(file.resolve()) for file in files}))
        self._starts = [start for start, _ in self._maps]
        self._reload, self._owned = reload, {}
        #: names of weights whose pages are zeros now
        self._dropped: dict[str, Tensor] = {}
        if module is not None and reload is not None:
            self._owned = {
                value.data_ptr(): (name, value.numel())
                for name, value in module.named_parameters()
                if value.device.type == "cpu" and self._map_of(value) is None
            }
        #: the maps themselves: while one is used its addresses are no other memory's
        self._alive = [value.untyped_storage() for value in module.parameters()] if self._maps else []
        self.mapped_bytes = sum(end - start for start, end in self._maps)

    def is_mapped(self, value: Tensor) -> bool:
        """Whether ``value`` lies in a map of one of the files."""
        return self._map_of(value) is not None

    def release_values(self, *values: Tensor) -> None:
        """Drop the pages of ``values``, as far as they are weights of this module."""
        for value in values:
            place, start = self._map_of(value), value.data_ptr()
            end = start + value.numel() * value.element_size()
            if place is not None:
                _drop(max(place[0], start // _PAGE * _PAGE), min(place[1], -(-end // _PAGE) * _PAGE))
            elif self._owned.get(start, ("", 0))[1] == value.numel() > 0:
                name, _ = self._owned[start]
                self._dropped[name] = value.detach()
                _drop(-(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE)

    def release_maps(self) -> None:
        """Drop all pages that come from a file."""
        for start, end in self._maps:
            _drop(start, end)

    def stop_tracking(self) -> None:
        """Leave the weights alone from now on, and let go of their files."""
        self._maps, self._starts, self._alive, self.mapped_bytes = [], [], [], 0
        self._owned.clear()
        self._dropped.clear()

    def restore_dropped(self) -> None:
        """Give weights that are zeros since :meth:`release_values` their values again."""
        if self._dropped and self._reload is not None:
            fresh = dict(self._reload().named_parameters())
            for name, value in self._dropped.items():
                source = fresh[name]
                value.copy_(source if source.shape == value.shape else source.t())
            self._dropped.clear()

    @contextmanager
    def one_layer_at_a_time(self, module: Any) -> Iterator[None]:
        """Inside, forwards of ``module`` leave none of its mapped weights resident, if they are large."""
        if self.mapped_bytes < LARGE_BYTES:
            yield
            return
        self.release_maps()
        handles = []
        for part in module.modules():
            weights = [value for value in part.parameters(recurse=False) if self.is_mapped(value)]
            if weights:
                handles.append(part.register_forward_hook(_releasing(self, weights)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.release_maps()

    def _map_of(self, value: Tensor) -> tuple[int, int] | None:
        if not self._maps or value.device.type != "cpu":
            return None
        start = value.data_ptr()
        index = bisect.bisect_right(self._starts, start) - 1
        return self._maps[index] if index >= 0 and start < self._maps[index][1] else None


def remember_pages(module: Any, files: Sequence[Path], reload: Callable[[], Any]) -> None:
    """From now on :func:`pages_of` knows the pages of ``module``."""
    setattr(module, _ATTRIBUTE, WeightPages(module, files, reload))


def pages_of(module: Any) -> WeightPages:
    """The pages of the weights of ``module``."""
    pages = getattr(module, _ATTRIBUTE, NO_PAGES)
    return pages if isinstance(pages, WeightPages) else NO_PAGES


def reserve_weight(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of ``shape`` that take no memory unless they are written to."""
    import torch

    size_bytes = dtype.itemsize * math.prod(shape)
    # nothing is promised by the system: those of a large model would not fit
    area = mmap.mmap(-1, max(1, size_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(area, dtype=torch.uint8)[:size_bytes].view(dtype).view(*shape)


def drop_file_pages(value: Tensor) -> None:
    """Drop the pages of ``value``, which lies in a map of a file that nothing has written to."""
    start = value.data_ptr()
    end = start + value.numel() * value.element_size()
    _drop(-(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE)


def _releasing(pages: WeightPages, weights: list[Any]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        pages.release_values(*weights)

    return hook


def _drop(start: int, end: int) -> None:
    if end > start:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _clean_maps(files: set[str]) -> Iterator[tuple[int, int]]:
    """Addresses of private maps of ``files`` without a page that this process has written to: those would be lost."""
    if not files:
        return
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for line in lines:
                found = _MAP.match(line) if line.endswith(tuple(files)) else None
                if found and found[4] in files and found[3].endswith("p"):
                    place = int(found[1], 16), int(found[2], 16)
                    if not _is_written(pages, *place):
                        yield place
    except OSError as error:
        log.info("pages of weights stay resident until all are packed: %s", error)


def _is_written(pages: io.RawIOBase, start: int, end: int) -> bool:
    """Whether a page of a private map of a file is this process' own. ``pages``: the kernel's word of 64 bits on each
    page; ``smaps`` tells the same, of all maps, in 10 ms."""
    pages.seek(start // _PAGE * _PAGE_WORD.itemsize)
    left_bytes = (end - start) // _PAGE * _PAGE_WORD.itemsize
    while left_bytes > 0 and (piece := pages.read(min(left_bytes, MIB))):
        words = np.frombuffer(piece, _PAGE_WORD)
        is_own = (words & _SWAPPED != 0) | (words & (_PRESENT | _OF_FILE) == _PRESENT)
        if is_own.any():
            return True
        left_bytes -= len(piece)
    return left_bytes > 0


NO_PAGES = WeightPages()
"""Of a module that was not loaded from files: nothing is dropped."""
