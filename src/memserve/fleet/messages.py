"""What the fleet machine is told, and what it asks for; the options of one engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum

from memserve.base.errors import UserError
from memserve.base.options import MANY, check_ranges, option
from memserve.base.plugins import KV_EVENT_FORMATS
from memserve.base.types import Request, Role
from memserve.protocol.events import MessageArrived, RejectRequest, Send
from memserve.protocol.peers import Peer

ENGINE_HINT = "for example --engine vllm=http://10.0.0.1:8000,events=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5558"
SILENCE_S = 600.0
"""How long an engine may say nothing in the middle of a request, by default."""
PREFILL_TOKENS = 256
BOOTSTRAP_PORT = 8998
"""Where SGLang's servers that compute prompts are met by those that answer, unless they are told another port."""
_URL = re.compile(r"(https?://[^\s,/@?#]+:\d{1,5})(/[A-Za-z0-9._~/-]*)?")
_ENDPOINT = re.compile(r"tcp://[^\s,/@?#*]+:\d{1,5}|ipc://[^\s,]+")


class EngineKind(StrEnum):
    """Whose server it is: pages and metrics differ, and how prompts are handed over."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OPENAI = "openai"  # any server of OpenAI's interface, of which nothing else is known
    MEMSERVE = "memserve"  # a router with instances of its own

    @property
    def has_roles(self) -> bool:
        """Whether one server can compute what another one answers, and both publish KV events, and tokenize."""
        return self in (EngineKind.VLLM, EngineKind.SGLANG)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, as ``--engine`` names it."""

    kind: EngineKind
    url: str
    """``http://HOST:PORT[/BASE]``, or https."""
    events: str = ""
    """Where it publishes KV events; empty: it does not."""
    replay: str = ""
    """Where it repeats them; empty: it does not."""
    events_format: str = "vllm"
    """How it writes them."""
    role: Role = Role.COLOCATED
    """``prefill``: it computes long prompts for others; ``decode``: it answers, and reads what those have computed."""
    model: str = ""
    """Of the models that have instances: it serves the same, and is one more member there. Empty: it answers by itself,
    for the models that it lists."""
    bootstrap_port: int = BOOTSTRAP_PORT
    """Of SGLang with ``role=prefill``: where those that answer meet it."""

    @property
    def name(self) -> str:
        """``HOST:PORT[/BASE]``."""
        return self.url.partition("://")[2]

    @property
    def base_path(self) -> str:
        """What stands before each path; empty, or ``/BASE``."""
        _, slash, path = self.name.partition("/")
        return slash + path

    @property
    def host(self) -> str:
        """By which others reach it; of IPv6 in brackets."""
        return self.name.partition("/")[0].rpartition(":")[0]

    @property
    def computes_in_pairs(self) -> bool:
        """Whether it answers nothing alone: SGLang's servers with roles get each request together."""
        return self.kind is EngineKind.SGLANG and self.role is not Role.COLOCATED

    @property
    def may_be_handed_out(self) -> bool:
        """Whether a gateway may send it requests: it answers alone, at the paths that clients name."""
        return not self.computes_in_pairs and not self.base_path

    @property
    def text(self) -> str:
        """As ``--engine`` has it: :func:`read_engine` gives this engine again."""
        settings = {"events": self.events, "replay": self.replay}
        settings |= {"format": self.events_format} if self.events else {}
        settings |= {"role": self.role.value} if self.role is not Role.COLOCATED else {}
        settings |= {"model": self.model}
        settings |= {"bootstrap": str(self.bootstrap_port)} if self.bootstrap_port != BOOTSTRAP_PORT else {}
        return ",".join([f"{self.kind}={self.url}", *(f"{key}={value}" for key, value in settings.items() if value)])


def read_engine(text: str) -> EngineSpec:
    """``vllm=http://HOST:PORT[,events=tcp://HOST:PORT][,replay=tcp://HOST:PORT][,format=NAME][,role=prefill]``, or
    ``sglang=`` with ``,bootstrap=PORT`` beside ``role=prefill``, or ``llamacpp=``, ``openai=`` or
    ``memserve=http://HOST:PORT[/BASE]``.

    Raises :class:`UserError` for anything else.
    """
    first, *more = text.split(",")
    kind_name, _, url = first.partition("=")
    kind = EngineKind(kind_name) if kind_name in tuple(EngineKind) else None
    match = _URL.fullmatch(url.rstrip("/"))
    if kind is None or match is None or not _is_port(match[1]) or (match[2] and kind.has_roles):
        raise UserError(f"{text[:200]!r} names no engine", hint=ENGINE_HINT, param="engine")
    # clients of OpenAI write /v1 as a part of the base, and it is a part of each path here
    url = match[1] + (match[2] or "").removesuffix("/v1")
    settings = dict(part.partition("=")[::2] for part in more)
    if kind is EngineKind.MEMSERVE and settings:
        hint = "leave them out of --engine: requests that begin alike go to one router, which knows its instances"
        raise UserError("routers of memserve publish no KV events, and are no members", hint=hint, param="engine")
    parts = {"model"} if kind is not EngineKind.OPENAI else set[str]()  # which does not speak in tokens
    parts |= {"events", "replay", "format", "role", "bootstrap"} if kind.has_roles else set()
    if len(settings) < len(more) or settings.keys() - parts:
        raise UserError(f"{text[:200]!r} has an unknown or repeated part", hint=ENGINE_HINT, param="engine")
    role, bootstrap_port = _read_role(kind, settings.pop("role", Role.COLOCATED), settings.pop("bootstrap", None))
    model = settings.pop("model", "")
    if model and role is not Role.COLOCATED:
        hint = "leave role= or model= out"
        raise UserError("a member of a model's cluster computes and answers", hint=hint, param="engine")
    events_format = settings.pop("format", kind) if kind.has_roles else EngineKind.VLLM
    KV_EVENT_FORMATS.load(events_format)
    wrong = [value for value in settings.values() if not _ENDPOINT.fullmatch(value)]
    if wrong:
        raise UserError(f"{wrong[0][:200]!r} is no address of ZeroMQ", hint=ENGINE_HINT, param="engine")
    if "events" not in settings and ("replay" in settings or (kind.has_roles and events_format != kind)):
        raise UserError("only events that an engine publishes are repeated, or read", hint=ENGINE_HINT, param="engine")
    return EngineSpec(
        kind, url, **settings, events_format=events_format, role=role, model=model, bootstrap_port=bootstrap_port
    )


def _read_role(kind: EngineKind, role: str, bootstrap: str | None) -> tuple[Role, int]:
    if role not in (Role.PREFILL, Role.DECODE, Role.COLOCATED):
        raise UserError(f"an engine has no role {role[:200]!r}", hint="role=prefill, or role=decode", param="engine")
    if bootstrap is None:
        return Role(role), BOOTSTRAP_PORT
    if kind is not EngineKind.SGLANG or role != Role.PREFILL:
        hint = "it is of sglang=...,role=prefill, as its --disaggregation-bootstrap-port says"
        raise UserError("an engine that has no bootstrap port", hint=hint, param="engine")
    if not bootstrap.isdecimal() or not bootstrap.isascii() or not 0 < int(bootstrap) < 65536:
        raise UserError(f"{bootstrap[:200]!r} is no port", hint="for example bootstrap=8998", param="engine")
    return Role(role), int(bootstrap)


def _is_port(address: str) -> bool:
    return 0 < int(address.rpartition(":")[2]) < 65536


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Servers of other projects behind the router."""

    engines: tuple[str, ...] = option((), "--engine", form=MANY)
    """``vllm=http://HOST:PORT[,events=tcp://HOST:PORT][,replay=tcp://HOST:PORT]``, or ``sglang=``: serve through this
    server, alone or beside the instances of --model. Repeatable. With ``,role=prefill`` and ``,role=decode`` one server
    computes prompts and another one answers. With ``,format=NAME`` a plug-in reads its events (`memserve doctor` lists
    them). ``llamacpp=http://HOST:PORT``: llama.cpp's server; ``memserve=``: another router;
    ``openai=http://HOST:PORT[/BASE]``: any of OpenAI's interface. With ``,model=NAME`` it is a member beside the
    instances of that model."""
    key_file: str | None = option(None, "--engine-key-file")
    """File with the API key of the servers that ``--engine`` names."""
    admin_key_file: str | None = option(None, "--engine-admin-key-file")
    """File with a key of its own, with which servers join and leave at run time: `memserve engine join`. Without it
    they do not; with it the router may start without any."""
    silence_s: float = option(SILENCE_S, "--engine-silence-s", least=0.1)
    """Seconds that a server of ``--engine`` may say nothing in the middle of a request."""
    prefill_tokens: int = option(PREFILL_TOKENS, "--engine-prefill-tokens", least=1)
    """A prompt goes to a ``role=prefill`` server if it has at least so many tokens that no server is known to have
    cached; others are computed where they are answered."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if len({spec.name for spec in self.read_specs()}) < len(self.engines):
            raise UserError("a server is named twice", hint="give every server one --engine", param="engines")
        for kind in EngineKind:
            roles = {spec.role for spec in self.read_specs() if spec.kind is kind}
            if (Role.PREFILL in roles) != (Role.DECODE in roles):
                hint = "give one server role=prefill and one of the same kind role=decode, or leave role= out"
                raise UserError("a role without its counterpart", hint=hint, param="engines")

    @property
    def member_specs(self) -> tuple[EngineSpec, ...]:
        """Those that are members of a model's cluster."""
        return tuple(spec for spec in self.read_specs() if spec.model)

    @property
    def relays(self) -> FleetOptions:
        """With the others: requests are handed on to them as they come."""
        return replace(self, engines=tuple(spec.text for spec in self.read_specs() if not spec.model))

    @property
    def are_given(self) -> bool:
        """Whether there are engines, or may be."""
        return bool(self.engines) or self.admin_key_file is not None

    def read_specs(self) -> list[EngineSpec]:
        """The servers. Raises :class:`UserError` for one that is malformed."""
        return [read_engine(text) for text in self.engines]


class PromptSpace(StrEnum):
    """What the numbers of a prompt are. Prompts of two spaces never match."""

    TOKENS = "tokens"  # the model's token ids, as KV events name them
    TEXT = "text"  # four bytes of the prompt's text each: about as many as tokens


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine says about itself when it is asked whether it is well."""

    models: dict[str, str]
    """Names under which requests may ask, each with the name of the weights behind it: equal where KV is shared."""
    running: int | None = None
    """Requests that it computes. ``None``: it shows no metrics."""
    waiting: int = 0
    kv_usage: float = 0.0
    """Share (0 to 1) of its KV memory that requests hold."""
    kv_tokens: int = 0
    """Tokens that its KV memory holds; 0: unknown."""
    started_s: float = 0.0
    """When its process started; 0: unknown. Another value: it has restarted, and its cache is empty."""


# -- events


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """One more engine. Its name must be new."""

    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """It gets no new requests, and is gone when those that it has have ended."""

    name: str


@dataclass(frozen=True, slots=True)
class EngineAnswered:
    """It is well."""

    name: str
    report: EngineReport


@dataclass(frozen=True, slots=True)
class EngineMissed:
    """It did not answer in time, or not well."""

    name: str
    reason: str
    refuses: bool = False
    """It said so itself, or its port is closed: it takes no new requests. Else it may only be slow."""
    last_seen_ns: int = 0
    """When bytes of an answer came from it last."""


@dataclass(frozen=True, slots=True)
class PromptArrived:
    """A request to be answered by an engine. ``request.prompt`` is in ``space``."""

    request: Request
    model: str
    """Empty: any engine will do."""
    space: PromptSpace
    may_split: bool = True
    """One engine may compute its prompt, and another one answer."""
    engines: frozenset[str] | None = None
    """Those that may have it; ``None``: all."""
    is_handed_out: bool = False
    """It is sent by something else, a gateway, which goes on to other engines by itself: it is told them in order."""


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The engine that was asked to has computed the prompt; another one can answer now."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AnswerBegan:
    """The client has the first bytes: its prompt is computed, and no other engine can answer any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The request needs no engine any more: it was answered, cut off, or its client left."""

    request_id: str
    is_cut: bool = False
    """Its engine broke the answer off."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The engine gave no answer, or did not compute the prompt, and the client has nothing yet."""

    request_id: str
    reason: str
    status: int = 502
    """What the client gets if no other engine answers."""
    retry_after_s: float | None = None
    refuses: bool = False
    """The engine's port is closed."""
    is_of_partner: bool = False
    """It was the engine that computed the prompt while the other one waited to answer."""


@dataclass(frozen=True, slots=True)
class AnsweredElsewhere:
    """The gateway has gone on: this engine answers the request, and the one that was chosen gave no answer."""

    request_id: str
    engine: str


@dataclass(frozen=True, slots=True)
class KvReceived:
    """A batch of KV events, as it came."""

    name: str
    sequence: int
    payload: bytes
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class ReplayEnded:
    """All that the engine still has of what was asked for has come, or nothing did in time."""

    name: str


@dataclass(frozen=True, slots=True)
class RouterJoined:
    """Another router of these engines is connected: a follower, or, for a follower, the owner."""

    peer: Peer
    """Another one for each connection."""


@dataclass(frozen=True, slots=True)
class RouterLeft:
    """Its connection has ended."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Deadlines may have passed."""


FleetEvent = (
    EngineJoined | EngineLeft | EngineAnswered | EngineMissed | PromptArrived | PromptComputed | AnswerBegan
    | AnswerEnded | AnsweredElsewhere | AttemptFailed | KvReceived | ReplayEnded | RouterJoined | RouterLeft
    | MessageArrived | TimePassed
)  # fmt: skip


# -- actions


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """Send the request to this engine."""

    request_id: str
    engine: str
    reason: str
    space: PromptSpace = PromptSpace.TOKENS
    prompt_tokens: int = 0
    matched_tokens: int = 0
    """Of the prompt, what this engine is believed to have cached; of a pair, the one that computes it."""
    computed_by: str = ""
    """Send it to this engine at the same time: it computes the prompt. Empty: the one that answers does."""
    fallbacks: tuple[str, ...] = ()
    """Of a request that is handed out: the engines that come next where this one gives no answer, in order."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Have this engine compute the request's prompt: another one will answer."""

    request_id: str
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Answer the request with an error: no engine could."""

    request_id: str
    status: int
    reason: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """The engine has fallen silent: wait for this attempt no longer, and report how it ended."""

    request_id: str
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask the engine for its batches of KV events from ``first`` on."""

    engine: str
    first: int


@dataclass(frozen=True, slots=True)
class EngineGone:
    """Look at this engine no more: it has left."""

    name: str


FleetAction = ForwardRequest | Prefill | RejectRequest | GiveUp | Abort | RequestReplay | EngineGone | Send


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine, for metrics."""

    name: str
    kind: str
    up: bool
    models: tuple[str, ...] = ()
    requests_open: int = 0
    requests: int = 0
    """Attempts sent there."""
    failed: int = 0
    """Of them: ended without an answer, or in the middle of it."""
    prefills: int = 0
    """Prompts that it has computed for another engine's answer."""
    prompt_tokens: int = 0
    matched_tokens: int = 0
    """Of these prompts, what the engine was believed to have cached."""
    cached_blocks: int = 0
    kv_batches: int = 0
    kv_gaps: int = 0
    kv_forgotten: int = 0
    """Times that all its blocks were forgotten: a gap that no replay filled, a restart, or malformed events."""
    report: EngineReport = field(default_factory=lambda: EngineReport({}))
