"""Messages as bytes: every message comes back equal; whatever else arrives is a ``WireError``."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass
from types import UnionType

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base import types
from memserve.protocol import codec as wire
from memserve.protocol import messages
from memserve.protocol import store as store_messages
from memserve.protocol.messages import AnyMessage, Cancel, KvSnapshot, MoreBlocks, Offer, Ready, Tokens
from memserve.protocol.peers import Peer

MESSAGES = typing.get_args(AnyMessage)
A, B = Peer("a", 1), Peer("b", 2)


def arbitrary(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of a field's type, at the edges of what it may hold."""
    if typing.get_origin(kind) is np.ndarray:
        ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
        return ids.map(lambda values: np.array(values, np.int32))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        meta = arguments[1]
        if arguments[0] is str:
            return st.text(max_size=4)
        if arguments[0] is bytes:
            return st.binary(min_size=meta.min_length or 0, max_size=min(32, meta.max_length))
        if arguments[0] is not int:
            return arbitrary(arguments[0])
        if meta.ge is not None and meta.ge > 0:
            return st.integers(meta.ge, meta.le)
        return st.integers(0, meta.le if meta.le is not None else 2**64 - 1)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(arbitrary(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(arbitrary(a) for a in arguments))
    if origin is dict:
        return st.dictionaries(*(arbitrary(a) for a in arguments), max_size=3)
    if origin is typing.Union or isinstance(kind, UnionType):
        return st.one_of(*(arbitrary(a) for a in arguments))
    simple = {
        type(None): st.none(), bool: st.booleans(), str: st.text(max_size=4), bytes: st.binary(max_size=32),
        int: st.integers(-(2**63), 2**63 - 1), float: st.floats(allow_nan=False),
    }  # fmt: skip
    if kind in simple:
        return simple[kind]
    if kind is types.KVGeometry:  # one that cannot be is refused: see below
        sizes = st.integers(1, 1 << 20)
        return st.builds(kind, sizes, sizes, sizes, sizes, st.sampled_from(["float32", "bfloat16", "float16"]), sizes)
    if is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        return struct(kind)
    return st.sampled_from(list(kind))


def struct(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Instances of a dataclass or struct."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: arbitrary(hints[name]) for name in names(kind)})


def names(kind: typing.Any) -> list[str]:
    """Fields of a dataclass or struct."""
    return [f.name for f in fields(kind)] if is_dataclass(kind) else list(kind.__struct_fields__)


def plain(value: typing.Any) -> typing.Any:
    """A value that ``==`` compares in full."""
    if isinstance(value, np.ndarray):
        assert value.dtype == np.int32 and value.ndim == 1
        return value.tolist()
    if is_dataclass(value) or isinstance(value, msgspec.Struct):
        return type(value), [plain(getattr(value, name)) for name in names(type(value))]
    if isinstance(value, tuple):
        return tuple(plain(v) for v in value)
    return value


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(MESSAGES).flatmap(struct))
def test_every_message_comes_back_equal(message: AnyMessage) -> None:
    assert plain(wire.decode(wire.encode(message))) == plain(message)


def test_every_message_is_covered() -> None:
    """A message that is missing in ``AnyMessage`` could be sent but not read."""
    words = [*vars(messages).values(), *vars(store_messages).values()]
    tagged = {c for c in words if isinstance(c, type) and issubclass(c, messages.Message)}
    assert {c for c in tagged if c.__struct_config__.tag is not None} == set(MESSAGES)


def filled(kind: typing.Any) -> typing.Any:
    """One value of a field's type with something in every part of it."""
    if typing.get_origin(kind) is np.ndarray:
        return np.array([5, 2**31 - 1], np.int32)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Annotated, typing.Union) or isinstance(kind, UnionType):
        return filled(arguments[0])
    if origin is tuple:
        return tuple(filled(a) for a in arguments if a is not Ellipsis)
    if origin is dict:
        return {filled(arguments[0]): filled(arguments[1])}
    simple = {bool: True, str: "text", bytes: bytes(16), int: 300, float: 0.5}
    if kind in simple:
        return simple[kind]
    if kind is types.KVGeometry:
        return types.KVGeometry(300, 300, 300, 300, "float32")
    if is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{name: filled(hints[name]) for name in names(kind)})
    return next(iter(kind))


LETTERS = [wire.seal(A, "tcp://h:1", B, 1 << 33, wire.encode(filled(kind))) for kind in MESSAGES]
"""One of every kind."""


def read(letter: bytes) -> bool:
    """Whether ``letter`` is one; anything but a ``WireError`` is a failure."""
    try:
        wire.decode(wire.unseal(letter).message)
    except wire.WireError:
        return False
    return True


def test_truncated_letters_are_refused() -> None:
    assert all(map(read, LETTERS))
    for letter in LETTERS:
        assert not any(read(letter[:end]) for end in range(len(letter)))


def test_bytes_behind_the_end_are_refused() -> None:
    assert not any(read(letter + b"\x00") for letter in LETTERS)


def test_flipped_bits_never_raise_anything_else() -> None:
    refused = 0
    for letter in LETTERS:
        for position in range(min(len(letter), 300) * 8):
            broken = bytearray(letter)
            broken[position // 8] ^= 1 << position % 8
            refused += not read(bytes(broken))
    assert refused > 1000


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.booleans(), st.sampled_from(LETTERS), st.data())
def test_noise_never_raises_anything_else(noise: bytes, inside: bool, letter: bytes, data: st.DataObject) -> None:
    if inside:
        at = data.draw(st.integers(0, len(letter)))
        letter = letter[:at] + noise + letter[at + data.draw(st.integers(0, 8)) :]
    else:
        letter = letter[:4] + noise
    read(letter)


def test_fields_of_another_type_are_refused() -> None:
    """Every field of every message, replaced by values that it never has."""
    confused = [{"a": [1]}, [[[]]], -1.5, "text", b"\x01\x02\x03", -(2**63), [None], True]
    for letter in LETTERS:
        message = msgspec.msgpack.decode(wire.unseal(letter).message)
        for index in range(len(message)):
            taken = []
            for value in confused:
                broken = [*message[:index], value, *message[index + 1 :]]
                try:
                    wire.decode(msgspec.msgpack.encode(broken))
                    taken.append(value)
                except wire.WireError:
                    pass
            assert len(taken) <= 4, f"{message[0]} field {index} takes {taken}"


def test_hostile_shapes_are_refused() -> None:
    name = b"\xaaMoreBlocks\xa1t\x00"
    claims = {
        "four billion blocks": b"\x94" + name + b"\xdd\xff\xff\xff\xff",
        "a fixed array longer than the rest": b"\x94" + name + b"\xdc\xff\xff\x01",
        "nested too deeply": b"\x95" + name + b"\x90" + b"\x91" * 200_000,
        "text that is no UTF-8": b"\x94\xaaMoreBlocks\xa1\xff\x00\x90",
        "an unknown tag": b"\x94\xaaOtherWords\xa1t\x00\x90",
        "no tag": b"\x90",
        "too few fields": b"\x92\xaaMoreBlocks\xa1t",
        "nothing": b"",
        "a map": b"\x81\x01\x01",
    }
    for what, data in claims.items():
        with pytest.raises(wire.WireError):
            wire.decode(data)
            pytest.fail(what)
    assert wire.decode(b"\x94" + name + b"\x92\x01\x02") == MoreBlocks("t", 0, (1, 2))


def offer(tokens: object) -> bytes:
    good = Offer("t", "", np.arange(3, dtype=np.int32), b"", types.Tier.HBM, 0, (1,), 5)
    raw = msgspec.msgpack.decode(wire.encode(good))
    return msgspec.msgpack.encode([*raw[:3], tokens, *raw[4:]])


def test_token_arrays_are_whole_and_never_negative() -> None:
    message = wire.decode(offer(np.array([1, 2**31 - 1], "<i4").tobytes()))
    assert isinstance(message, Offer) and message.tokens.tolist() == [1, 2**31 - 1]
    assert not message.tokens.flags.writeable
    for bad in (b"\x01\x02\x03", np.array([-1], "<i4").tobytes(), bytes(4 * wire.TOKENS_MAX + 4), [1, 2], "abcd"):
        with pytest.raises(wire.WireError):
            wire.decode(offer(bad))


def test_other_token_types_are_sent_as_int32() -> None:
    """A machine may hold a slice, or int64: the wire has one form."""
    wide = np.arange(10, dtype=np.int64)[::2]
    message = wire.decode(wire.encode(Offer("t", "", wide, b"", types.Tier.HBM, 0, (), 5)))
    assert isinstance(message, Offer) and message.tokens.tolist() == [0, 2, 4, 6, 8]


def test_numbers_are_natural() -> None:
    assert wire.decode(wire.encode(Ready("t", 0, 0, 1, (2**64 - 1,)))) == Ready("t", 0, 0, 1, (2**64 - 1,))
    for bad in (MoreBlocks("t", -1, ()), MoreBlocks("t", 0, (3, -3)), MoreBlocks("t", 1 << 63, ())):
        with pytest.raises(wire.WireError):
            wire.decode(wire.encode(bad))
    for bad in (MoreBlocks("t", 1 << 64, ()), Cancel(object())):
        with pytest.raises(wire.WireError):
            wire.encode(bad)


def test_another_version_is_told_from_nonsense() -> None:
    letter = wire.seal(A, "tcp://h:1", B, 3, wire.encode(Tokens(())))
    with pytest.raises(wire.WireVersionError):
        wire.unseal(letter[:3] + bytes([wire.VERSION + 1]) + b"whatever it says")
    with pytest.raises(wire.WireError) as caught:
        wire.unseal(b"MSS" + letter[3:])
    assert not isinstance(caught.value, wire.WireVersionError)
    newer = [*msgspec.msgpack.decode(wire.encode(Cancel("r"))), "a field that came later"]
    assert wire.decode(msgspec.msgpack.encode(newer)) == Cancel("r")


def test_an_envelope_carries_its_message_unread() -> None:
    """A letter that is not for us, or not new, costs no more than its envelope."""
    envelope = wire.unseal(wire.seal(A, "tcp://h:1", Peer("b", 0), 3, b"\x90"))
    assert (envelope.sender, envelope.reply_to, envelope.receiver, envelope.number) == (A, "tcp://h:1", Peer("b", 0), 3)
    with pytest.raises(wire.WireError):
        wire.decode(envelope.message)


def test_snapshot_of_a_million_blocks_fits() -> None:
    letter = wire.seal(A, "", B, 1, wire.encode(KvSnapshot(0, bytes(16_000_000), b"")))
    assert len(letter) < wire.FRAME_BYTES_MAX and read(letter)


def test_impossible_geometry_is_no_message() -> None:
    good = messages.PeerInfo(
        A, types.Role.STORE, "tcp://127.0.0.1:1", "n", types.KVGeometry(2, 1, 8, 8, "float32"), 1, 0, 0, True
    )
    packed = wire.encode(messages.PeerJoined(good))
    assert wire.decode(packed) == messages.PeerJoined(good)
    for bad in (packed.replace(b"float32", b"float31"), packed.replace(b"\xaanum_layers\x02", b"\xaanum_layers\x00")):
        assert bad != packed
        with pytest.raises(wire.WireError):
            wire.decode(bad)
