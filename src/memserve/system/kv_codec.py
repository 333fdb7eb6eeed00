"""KV in fewer bytes, without losing a bit, where it rests or travels (``src/core/codec/kv_codec.h``): when that pays.

::

    fewer bytes pay  <=>  time of a byte on the way * share of the bytes that is saved  >  time of the codec for a byte

All three are measured while serving: the way by the disk or link, the codec and what it saves here. Before the first
value the codec has been timed once in this process, on made-up KV. Both times are added, though they often overlap: a
way is only ever judged too fast for the codec, not too slow. It begins to pay where it saves much more than it takes,
and goes on until that is little more. The codec's time is that of the thread's CPU: on a busy machine encryption,
copies and checksums wait for a core as well, and are fewer with fewer bytes.
"""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.types import KvCodecMode
from memserve.base.units import KIB, MIB

_OPENS, _CLOSES = 4.0, 2.5
"""How many times its time the codec must save to be begun with, and to be gone on with: what comes encoded costs more
than that time. It lands in memory of its own, which no cache has, and waits for the core."""
_TRY_EVERY = 64
"""Where the codec did not pay, but might, so many values go by before the next is tried."""
_MEMORY_BYTES = 4 * MIB
"""A rate is that of about the last so many bytes."""
_SAMPLE_BYTES, _SAMPLE_PASSES = 256 * KIB, 4
_NO_OFFSET = np.zeros(1, np.int64)

Offsets = NDArray[np.int64]


class LearntRate:
    """Nanoseconds a byte, of the last few MiB. Read from any thread."""

    def __init__(self, byte_ns: float | None = None) -> None:
        self.byte_ns = byte_ns
        """None: unknown."""

    def note(self, nbytes: int, ns: float) -> None:
        """``nbytes`` took ``ns``."""
        latest, weight = ns / nbytes, nbytes / (nbytes + _MEMORY_BYTES)
        self.byte_ns = latest if self.byte_ns is None else self.byte_ns + weight * (latest - self.byte_ns)


@dataclass(frozen=True, slots=True)
class CodecRates:
    """What the codec takes for a byte of a value on one core, and what share of the bytes is left."""

    encode_byte_ns: float
    decode_byte_ns: float
    share: float


@functools.cache
def measured_rates() -> CodecRates:
    """Of this machine, by the best of a few passes over random floats: about a millisecond, once a process."""
    values = np.random.default_rng(1).standard_normal(_SAMPLE_BYTES // 2, np.float32)
    value = (values.view(np.uint32) >> 16).astype(np.uint16)
    encoded = np.empty(_core.kv_encoded_bytes_max(value.nbytes), np.uint8)
    codec, encode_ns, decode_ns = KvCodec("always", CodecRates(0.0, 0.0, 1.0)), [], []
    for _ in range(_SAMPLE_PASSES):
        encode_from_ns = time.thread_time_ns()
        nbytes = codec.encode(value.ctypes.data, _NO_OFFSET, value.nbytes, encoded)
        decode_from_ns = time.thread_time_ns()
        codec.decode(encoded.ctypes.data, nbytes, value.ctypes.data, _NO_OFFSET, value.nbytes)
        encode_ns.append(decode_from_ns - encode_from_ns)
        decode_ns.append(time.thread_time_ns() - decode_from_ns)
    return CodecRates(min(encode_ns) / value.nbytes, min(decode_ns) / value.nbytes, nbytes / value.nbytes)


@dataclass(slots=True)
class CodecCounters:
    """What the codec did in one place since the start."""

    values_encoded: int = 0
    values_raw: int = 0
    """Tried, and left as they are: they do not become shorter."""
    encoded_from_bytes: int = 0
    encoded_to_bytes: int = 0
    encode_ns: int = 0
    values_decoded: int = 0
    values_damaged: int = 0
    """What came is no encoding of the length that was expected."""
    decoded_bytes: int = 0
    decode_ns: int = 0


class KvCodec:
    """Encodes and decodes, and remembers what that took. Thread-safe."""

    def __init__(self, mode: KvCodecMode, rates: CodecRates | None = None) -> None:
        """``rates``: as they are taken to be at first; None: :func:`measured_rates`."""
        self.mode = mode
        rates = rates or (measured_rates() if mode == "auto" else CodecRates(0.0, 0.0, 1.0))
        #: what they are when nothing else needs the core
        self.least = rates
        self._encode, self._decode = LearntRate(rates.encode_byte_ns), LearntRate(rates.decode_byte_ns)
        self._share = LearntRate(rates.share)
        self._lock = threading.Lock()
        self._counters = CodecCounters()

    @property
    def rates(self) -> CodecRates:
        """As they are now."""
        encode, decode, share = self._encode.byte_ns, self._decode.byte_ns, self._share.byte_ns
        assert encode is not None and decode is not None and share is not None
        return CodecRates(encode, decode, share)

    def counters(self) -> dict[str, int]:
        """:class:`CodecCounters`, by name."""
        with self._lock:
            return asdict(self._counters)

    def encode(self, base: int, offsets: Offsets, range_bytes: int, out: NDArray[np.uint8]) -> int:
        """Encode ranges, ``offsets`` bytes behind ``base``, one after the other; returns the bytes written to ``out``,
        which has :func:`memserve._core.kv_encoded_bytes_max`. 0: they do not become shorter."""
        return self.encode_to(base, offsets, range_bytes, out.ctypes.data, out.nbytes)

    def encode_to(self, base: int, offsets: Offsets, range_bytes: int, out: int, out_bytes: int) -> int:
        """As :meth:`encode`, to ``out_bytes`` at the address ``out``."""
        began_ns, total_bytes = time.thread_time_ns(), len(offsets) * range_bytes
        nbytes = _core.kv_encode_ranges(base, offsets, range_bytes, None, out, out_bytes)
        spent_ns = time.thread_time_ns() - began_ns
        with self._lock:
            self._counters.encode_ns += spent_ns
            self._share.note(total_bytes, float(nbytes or total_bytes))
            if nbytes:  # what is given up is given up early
                self._encode.note(total_bytes, spent_ns)
                self._counters.values_encoded += len(offsets)
                self._counters.encoded_from_bytes += total_bytes
                self._counters.encoded_to_bytes += nbytes
            else:
                self._counters.values_raw += len(offsets)
        return nbytes

    def decode(
        self, source: int, nbytes: int, base: int, offsets: Offsets, range_bytes: int
    ) -> NDArray[np.uint64] | None:
        """Decode ranges to ``offsets`` bytes behind ``base``; returns the checksum of each. None: damaged."""
        began_ns, total_bytes = time.thread_time_ns(), len(offsets) * range_bytes
        seals = _core.kv_decode_ranges(source, nbytes, base, offsets, range_bytes)
        spent_ns = time.thread_time_ns() - began_ns
        with self._lock:
            self._counters.decode_ns += spent_ns
            if seals is None:
                self._counters.values_damaged += len(offsets)
            else:
                self._decode.note(total_bytes, spent_ns)
                self._counters.values_decoded += len(offsets)
                self._counters.decoded_bytes += total_bytes
        return seals


class CodecGate:
    """Whether the codec pays on one way. For one thread at a time."""

    def __init__(self, mode: KvCodecMode, least_byte_ns: float = 0.0) -> None:
        """``least_byte_ns``: what the codec takes for a byte on this way when nothing else needs the core."""
        self._mode, self._least_byte_ns = mode, least_byte_ns
        self._is_open = False
        self._passed_by = 0

    def lets_encode(self, way_byte_ns: float | None, cost_byte_ns: float, share: float) -> bool:
        """Whether a value is to be encoded. ``way_byte_ns``: what a byte takes on the way, as it is sent; None:
        unknown, and then not. ``cost_byte_ns``: what the codec takes for a byte of the value. ``share``: of the bytes,
        what encoding has left of late."""
        if self._mode != "auto":
            return self._mode == "always"
        if way_byte_ns is None:
            return False
        needed_ns = cost_byte_ns * (_CLOSES if self._is_open else _OPENS)
        self._is_open = way_byte_ns * (1 - share) > needed_ns
        share_least = min(share, measured_rates().share)
        if self._is_open or way_byte_ns * (1 - share_least) <= self._least_byte_ns * _OPENS:
            return self._is_open
        # The core may have less to do by now, and other values become shorter again: without a try that is never known.
        self._passed_by = (self._passed_by + 1) % _TRY_EVERY
        return self._passed_by == 0
