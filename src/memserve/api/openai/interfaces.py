"""What the edge needs to know about the model and the engine: small interfaces."""

from __future__ import annotations

import itertools
import re
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer

from memserve.base.errors import UserError
from memserve.base.types import NamedPrefix, Pooling, PositionRegimes, Request, SamplingParams, TokenArray, TokenOutput
from memserve.host.engine import Rejected
from memserve.model.loading.lora import Adapter
from memserve.protocol.events import AdapterAnswered, AdapterNamesChanged
from memserve.protocol.kv_hints import HintResult, KvHinted
from memserve.protocol.messages import AdapterFiles
from memserve.protocol.records import DocumentDropped, DocumentPut
from memserve.router.placement.prefix_directory import PrefixNode


class ServedModel(Protocol):
    """The loaded model as the edge sees it."""

    @property
    def name(self) -> str:
        """The name under which clients ask for it."""

    @property
    def tokenizer(self) -> Any:
        """A transformers fast tokenizer: chat template and ``backend_tokenizer``."""

    @property
    def max_model_tokens(self) -> int:
        """The context that is served: prompt and generated tokens together."""

    @property
    def context_note(self) -> str:
        """Why that is less than the model's own context, and the flag that changes it; empty: it is not less."""

    @property
    def kv_dtype(self) -> str:
        """How KV lies in the first tier (:data:`memserve.base.types.KV_DTYPES`)."""

    @property
    def kv_lower_dtype(self) -> str:
        """How KV lies in the second tier (:data:`memserve.base.types.KV_DTYPES`)."""

    @property
    def quantization(self) -> str:
        """``auto``: some weights are computed with as they are stored; ``none``."""

    @property
    def activation_bits(self) -> int:
        """To how many bits activations are rounded that meet such weights; 0: they meet none."""

    @property
    def pooling(self) -> Pooling | None:
        """How it embeds. None: it generates."""

    @property
    def position_regimes(self) -> PositionRegimes:
        """What decides how positions are computed."""

    @property
    def vocab_size(self) -> int:
        """Token ids that the model can read and draw: ``[0, vocab_size)``. Its tokenizer may know others."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""

    @property
    def generation_defaults(self) -> Mapping[str, float]:
        """Sampling that the model's authors recommend, by OpenAI's names, for requests that set none."""

    @property
    def default_max_tokens(self) -> int | None:
        """Longest answer to a chat that names no ``max_tokens``; ``None``: whatever the context has room for."""


RECOMMENDED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""OpenAI's defaults, where a model's authors may recommend others."""


def sampling_params_of(model: ServedModel, request_fields: Mapping[str, Any], **further_fields: Any) -> SamplingParams:
    """What ``request_fields`` set (``None``: nothing), else what the model's authors recommend (as in vLLM), else
    OpenAI's defaults (:data:`RECOMMENDED`). ``further_fields`` go on as they are, the rest keep their defaults."""
    values = {**RECOMMENDED, **model.generation_defaults, **further_fields}
    values |= {name: value for name, value in request_fields.items() if value is not None}
    values["top_k"] = max(int(values["top_k"]), 0)  # -1: from all, in vLLM's words
    return SamplingParams(**values)


class ServingEngine(Protocol):
    """The engine as the edge sees it (:class:`memserve.host.engine.Engine`)."""

    @property
    def closing(self) -> bool:
        """Whether new requests are refused: the engine is closing, or broke."""

    def submit(self, request: Request, sink: Callable[[TokenOutput | Rejected], None]) -> None:
        """Run ``request``; ``sink`` is called from another thread."""

    def cancel(self, request_id: str) -> None:
        """End every sequence of the request."""

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence: its stop string was found."""

    def note_tool(self, request_id: str, tool: str) -> None:
        """The answer of the request calls ``tool``: its session waits for the result."""

    def stats(self) -> Any:
        """A snapshot of counters. May wait for the engine thread.

        Raises ``TimeoutError`` when it does not answer, :class:`EngineStopped` when it has ended.
        """


@runtime_checkable
class HearingEngine(ServingEngine, Protocol):
    """An engine that hears what other processes say."""

    def receive_messages_in(self, loop: AbstractEventLoop | None) -> None:
        """From now on ``loop``, from which this is called, reads it; None: a thread. Before ``loop`` ends."""


@runtime_checkable
class PinningEngine(ServingEngine, Protocol):
    """An engine that can keep a prefix from eviction under a name; names of different tenants are different names."""

    def pin_prefix(self, handle: str, tenant: str, tokens: TokenArray, ttl_ns: int, salt: str = "") -> None:
        """Keep what requests with ``salt`` have cached of ``tokens`` for ``ttl_ns``. A repeated call renews it."""

    def unpin_prefix(self, handle: str, tenant: str) -> None:
        """Remove the pin; unknown handles are ignored."""

    def pinned_tokens(self, handles: Sequence[str], tenant: str) -> list[int | None]:
        """Pinned tokens of each handle; ``None``: not known yet. May wait for the engine thread, once."""

    def named_prefixes(self, tenant: str) -> list[NamedPrefix]:
        """A tenant's named prefixes, least recently renewed first; their expiry is a ``time.monotonic_ns``. May wait
        for the engine thread."""


@runtime_checkable
class HintedEngine(ServingEngine, Protocol):
    """An engine that takes hints on KV."""

    def give_hint(self, hint: KvHinted) -> None:
        """Do it, after what it was asked for before."""

    def hint_results(self, hint_ids: Sequence[str]) -> list[HintResult | None]:
        """What became of each; ``None``: not known yet, or any more. May wait for the engine thread, once."""


@runtime_checkable
class MappedEngine(ServingEngine, Protocol):
    """An engine that knows which member holds which prefix."""

    def prefix_trees(self, tenant: str | None) -> dict[str, tuple[PrefixNode, ...]]:
        """The prefixes of the last prompts by tenant; ``None``: of all tenants. May wait for the engine thread."""


@runtime_checkable
class RememberingEngine(ServingEngine, Protocol):
    """An engine that keeps records for its successor."""

    def stored_documents(self) -> tuple[DocumentPut, ...]:
        """Documents in the records of the last engine."""

    def write_record(self, record: DocumentPut | DocumentDropped) -> Future[bool]:
        """Make ``record`` durable. The future says whether it is."""


@runtime_checkable
class AdaptingEngine(ServingEngine, Protocol):
    """An engine whose LoRA adapters come and go."""

    def stored_adapters(self) -> tuple[AdapterFiles, ...]:
        """Those in the records of the last engine."""

    def load_adapter(self, files: AdapterFiles) -> Future[AdapterAnswered]:
        """Have it ready for requests that name it. The future says what came of it, once it is durable."""

    def unload_adapter(self, name: str, *, is_fixed: bool = False) -> Future[AdapterAnswered]:
        """No new request names it; those that have begun with it go on. ``is_fixed``: it is one of the start."""


@runtime_checkable
class FollowingEngine(ServingEngine, Protocol):
    """An engine of a router that is not the owner, which says what adapters there are."""

    def follow_names(self, on_names: Callable[[AdapterNamesChanged], None]) -> None:
        """``on_names`` is called with the owner's names now, and when they change, from any thread."""


class ModelNames:
    """The names by which clients may ask for the served model, and for its adapters."""

    def __init__(
        self, served: str, aliases: Sequence[str] = (), further: Sequence[str] = (), adapters: Sequence[Adapter] = ()
    ) -> None:
        """``served`` is the name that answers carry; ``further`` ones are listed, ``aliases`` are not. Letter case does
        not matter. Raises :class:`UserError` for an adapter with a name of the model's."""
        self.served = served
        self.shown = tuple(dict.fromkeys((served, *further)))
        self._model_names = {name.casefold() for name in (*self.shown, *aliases)}
        self._fixed = {adapter.name.casefold(): adapter for adapter in adapters}
        self._adapters = dict(self._fixed)
        if shared_names := self._model_names & self._adapters.keys():
            hint = "give the adapter another name: --lora NAME=FOLDER"
            raise UserError(f"{min(shared_names)!r} is a name of the model itself", hint=hint, param="lora")

    def __contains__(self, name: str) -> bool:
        return name.casefold() in self._model_names or name.casefold() in self._adapters

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All of them, in the order in which they came."""
        return tuple(self._adapters.values())

    def is_model(self, name: str) -> bool:
        """Whether it is one of the model's own."""
        return name.casefold() in self._model_names

    def is_listed(self, name: str) -> bool:
        """Whether clients are shown it: it is no alias."""
        shown = (shown_name.casefold() for shown_name in self.shown)
        return name.casefold() in self._adapters or name.casefold() in shown

    def put_adapter(self, adapter: Adapter) -> None:
        """From now on its name leads to it."""
        self._adapters[adapter.name.casefold()] = adapter

    def remove_adapter(self, adapter: Adapter) -> None:
        """From now on its name leads nowhere."""
        self._adapters.pop(adapter.name.casefold(), None)

    def is_fixed(self, name: str) -> bool:
        """Whether an adapter of the start has this name."""
        return name.casefold() in self._fixed

    def replace_adapters(self, adapters: Iterable[Adapter], unnamed: Iterable[str]) -> None:
        """From now on there are ``adapters``, and those of the start whose names are not ``unnamed``."""
        gone = {name.casefold() for name in unnamed}
        fixed = {name: adapter for name, adapter in self._fixed.items() if name not in gone}
        self._adapters = fixed | {adapter.name.casefold(): adapter for adapter in adapters}

    def find_adapter(self, name: str) -> Adapter | None:
        """The adapter of this name; ``None``: it is the model's own name, or none."""
        return self._adapters.get(name.casefold())


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The inverse of GPT-2's table of printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    fresh = itertools.count(256)
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(next(fresh)): byte for byte in unprintable}


class TokenNames:
    """The text and the exact bytes of single tokens, for logprobs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._names: dict[int, tuple[str, bytes]] = {}

    def name(self, token: int) -> tuple[str, bytes]:
        """Text and bytes; a piece of a character reads ``bytes:\\xe4\\xb8``, as OpenAI writes it."""
        if token not in self._names:
            data = self._token_bytes(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._names[token] = (text, data)
        return self._names[token]

    def _token_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_of_char()
            return b"".join(bytes([table[char]]) if char in table else char.encode() for char in piece)
        if fallback := _BYTE_FALLBACK.fullmatch(piece):
            return bytes([int(fallback.group(1), 16)])
        return piece.replace("\u2581", " ").encode()
