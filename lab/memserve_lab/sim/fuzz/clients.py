"""The clients of a cluster in virtual time, and the referee of what they get.

A client's conversation is a list of turns; each turn's prompt contains everything before it. The referee knows what a
request gets from an instance of its own (``truth``), and compares every output with it at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random

import numpy as np

from memserve.base.types import FinishReason, Request, SamplingParams, StopParams, TokenOutput
from memserve.base.units import NS_PER_MS
from memserve.instance.scheduler.capacity import lies_whole
from memserve.router.requests.lifecycle import DEADLY
from memserve_lab.sim.reference.oracle import lone_beams, lone_tokens, require

VOCAB = 12
FLOOD, QUIET = "flood", "quiet"
"""Tenants of scenarios with a flood: one sends everything at once, the other one short request behind it."""


@dataclass
class Turn:
    """What a client asks next, once the turn before has ended."""

    new_tokens: list[int]
    think_ns: int
    max_tokens: int = 8
    n: int = 1
    beam_width: int = 0
    stops: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    lifetime_ns: int | None = None
    cancel_after_ns: int | None = None
    stop_string_after: int | None = None  # tokens of sequence 0 after which the edge finds a stop string
    priority: int = 0
    use_cache: bool = True


@dataclass
class Conversation:
    """One client: a tenant, a session, its turns."""

    name: str
    tenant: str
    session: str
    prefix: list[int]
    turns: list[Turn]
    starts_ns: int
    pin_ns: int | None = None
    """After its first turn the conversation so far is pinned under its session's name, for this long."""
    unpin: bool = False
    """The name is given up when the conversation ends."""
    salt: str = ""
    context: list[int] = field(default_factory=list)
    done: int = 0


def flood(random: Random, count: int) -> list[Conversation]:
    """One tenant's ``count`` requests at once, and a short one of another tenant behind them."""
    conversations = []
    for number in range(count):
        turn = Turn([random.randrange(VOCAB) for _ in range(8)], 0, max_tokens=8, priority=-(1 << 31))
        salt = str(number) if number % 2 else ""
        conversations.append(Conversation(f"f{number}", FLOOD, "", [], [turn], 0, salt=salt))
    turn = Turn([random.randrange(VOCAB) for _ in range(4)], 0, max_tokens=3, priority=7)
    return [*conversations, Conversation("q", QUIET, "", [], [turn], random.randint(1, 20) * NS_PER_MS)]


@dataclass
class Ask:
    """One request that is being judged."""

    request: Request
    turn: Turn
    got: dict[int, list[int]] = field(default_factory=dict)
    final: dict[int, FinishReason] = field(default_factory=dict)
    rejected: str | None = None
    cancelled: bool = False
    lost: bool = False
    """The router died while the request was under way."""
    row_failed: bool = False
    """A single row of the request failed on some device."""
    failed_attempt: int = 0
    """Which of its attempts that was. 0: one that the router had given up before, or none."""
    failure_unheard: bool = False
    """The router has given that attempt up before it heard of the row."""
    stopped: set[int] = field(default_factory=set)
    stopped_before: set[int] = field(default_factory=set)
    """On an earlier connection, of a request with a key."""
    returned: bool = False
    """Its client was away: it may have come back long after the last token was drawn."""
    arrived_ns: int = 0
    ended_ns: int | None = None
    _expected: dict[int, list[int]] = field(default_factory=dict)

    def expected_tokens(self, index: int, limit: int) -> list[int]:
        """What sequence ``index`` would get from an instance of its own without stop tokens."""
        if index not in self._expected:
            request = self.request
            self._expected[index] = lone_tokens(request.prompt, limit + 1, request.sampling.seed, index, VOCAB)
        return self._expected[index]

    def starts_over(self) -> None:
        """Its client reads the answer from the beginning, on another connection."""
        self.returned = True
        self.got.clear()
        self.final.clear()
        self.stopped_before |= self.stopped
        self.stopped.clear()

    @property
    def over(self) -> bool:
        """Whether the client waits for nothing more."""
        return self.lost or self.rejected is not None or len(self.final) == self.request.n


class OutputChecker:
    """Judges every output as it arrives, and at the end that each request ended once."""

    def __init__(
        self, contexts: list[int], caching: bool, grammars: Random | None = None, *, whole: int | None = None
    ) -> None:
        """``grammars``: which requests have one. None: none has. ``whole``: the context of those that never lie by
        layer. None: as of all others."""
        self.contexts, self.caching, self._grammars = sorted(set(contexts)), caching, grammars
        self._whole = self.contexts[-1] if whole is None else whole
        self.asks: dict[str, Ask] = {}
        self.dispatched_twice: Collection[str] = ()
        """Requests that may run twice at one instance."""
        self.excused = False
        """Something has gone wrong in the world: errors and rejections are allowed."""
        self.tokens_judged = 0

    def new_request(self, conversation: Conversation, now_ns: int) -> Request:
        """The next turn's request."""
        turn = conversation.turns[conversation.done]
        conversation.context += turn.new_tokens
        is_whole = turn.n > 1 or turn.beam_width > 0 or turn.prompt_logprobs
        prompt = (conversation.prefix + conversation.context)[-(self._context_of(is_whole) - 1) :]
        request = Request(
            f"{conversation.name}.{conversation.done}",
            np.asarray(prompt, dtype=np.int32),
            SamplingParams(
                seed=turn.seed,
                logprobs=turn.logprobs,
                prompt_logprobs=turn.prompt_logprobs,
                grammar=self._draw_grammar(turn),
            ),
            StopParams(turn.max_tokens, turn.min_tokens, turn.stops),
            n=turn.n,
            beam_width=turn.beam_width,
            tenant=conversation.tenant,
            session=conversation.session,
            priority=turn.priority,
            use_cache=turn.use_cache,
            deadline_ns=None if turn.lifetime_ns is None else now_ns + turn.lifetime_ns,
            salt=conversation.salt,
        )
        self.asks[request.request_id] = Ask(request, turn, arrived_ns=now_ns)
        return request

    def _draw_grammar(self, turn: Turn) -> str:
        """One that admits everything; its masks may be late."""
        has_one = self._grammars is not None and self._grammars.random() < 0.4 and not turn.beam_width
        return f"g{turn.seed % 3}" if has_one else ""

    # -- outputs

    def check_output(self, output: TokenOutput, now_ns: int) -> Ask:
        """One output has reached the client."""
        ask = self.asks[output.request_id]
        require(not ask.lost, f"{output.request_id}: an output of a router that is dead")
        key = f"{output.request_id}/{output.index}"
        require(ask.rejected is None, f"{key}: an output after the rejection")
        require(output.index not in ask.final, f"{key}: an output after the final one")
        require(0 <= output.index < ask.request.n, f"{key}: no such sequence")
        tokens_got = ask.got.setdefault(output.index, [])
        if output.prompt_logprobs is not None:
            self._judge_prompt_logprobs(ask, output, key)
        if output.cached_tokens or (output.tokens and not tokens_got):
            self._judge_cached(ask, output, key)
        tokens_got.extend(output.tokens)
        self.tokens_judged += len(output.tokens)
        if ask.request.sampling.logprobs is not None:
            require([entry.token for entry in output.logprobs] == list(output.tokens), f"{key}: logprobs {output}")
        if output.finish_reason is not None:
            ask.final[output.index] = output.finish_reason
        if ask.request.beam_width:
            self._judge_beam(ask, output, key)
        else:
            self._judge_tokens(ask, output, key, tokens_got)
        self._judge_reason(ask, output, key, now_ns)
        if ask.over:
            ask.ended_ns = now_ns
        return ask

    def _judge_cached(self, ask: Ask, output: TokenOutput, key: str) -> None:
        """Reused KV was computed for the same tenant and salt. The first output of a first attempt says how many
        tokens."""
        request, cached = ask.request, output.cached_tokens
        require(0 <= cached < len(request.prompt), f"{key}: {cached} cached tokens of {len(request.prompt)}")
        if not self.caching or not request.use_cache or request.sampling.prompt_logprobs:
            require(not cached, f"{key}: {cached} cached tokens, although nothing may be reused")
        ran_before = dict(output.story).get("attempts", 1) != 1 or request.request_id in self.dispatched_twice
        if request.beam_width or ran_before or request.key:
            return  # it may reuse its own KV
        shared_tokens = max((self._shared_tokens(ask, earlier) for earlier in self.asks.values()), default=0)
        require(
            cached <= shared_tokens,
            f"{key}: {cached} cached tokens, its tenant has said {shared_tokens} of them before",
        )

    def _shared_tokens(self, ask: Ask, earlier: Ask) -> int:
        """How many of the prompt's tokens another request of the same isolation begins with: its prompt and its answer,
        including tokens that were computed but have not reached the client."""
        request = earlier.request
        if earlier is ask or request.isolation != ask.request.isolation or not request.use_cache:
            return 0
        prompt, other_prompt, best = ask.request.prompt.tolist(), request.prompt.tolist(), 0
        if request.beam_width and prompt[: len(other_prompt)] == other_prompt:
            return len(prompt)  # the tokens that beams have tried are not known
        for answer in [[], *(earlier.expected_tokens(index, self._token_limit(request)) for index in range(request.n))]:
            text_tokens = other_prompt + answer
            same = next((i for i, (a, b) in enumerate(zip(prompt, text_tokens, strict=False)) if a != b), None)
            best = max(best, min(len(prompt), len(text_tokens)) if same is None else same)
        return best

    def check_rejection(self, request_id: str, reason: str, now_ns: int, *, by_gate: bool = False) -> Ask:
        """The request was rejected; ``by_gate``: for a reason that the gate's judge has accepted."""
        ask = self.asks[request_id]
        require(ask.rejected is None, f"{request_id}: rejected twice")
        require(not ask.final and not any(ask.got.values()), f"{request_id}: rejected after outputs: {reason}")
        require(self.excused or by_gate, f"{request_id}: rejected in a healthy world: {reason}")
        ask.rejected, ask.ended_ns = reason, now_ns
        return ask

    def _token_limit(self, request: Request) -> int:
        return min(request.stop.max_tokens, self._context_of(lies_whole(request)) - len(request.prompt))

    def _context_of(self, is_whole: bool) -> int:
        return min(self._whole, self.contexts[-1]) if is_whole else self.contexts[-1]

    def _judge_tokens(self, ask: Ask, output: TokenOutput, key: str, tokens_got: list[int]) -> None:
        request, reason = ask.request, output.finish_reason
        expected = ask.expected_tokens(output.index, self._token_limit(request))
        require(tokens_got == expected[: len(tokens_got)], f"{key}: {tokens_got} instead of {expected}")
        stop = request.stop
        ends = [i for i, token in enumerate(tokens_got, 1) if token in stop.stop_token_ids and i >= stop.min_tokens]
        if ends:
            require(ends == [len(tokens_got)], f"{key}: went on behind a stop token: {tokens_got}")
            require(reason in (FinishReason.STOP, FinishReason.CANCELLED, FinishReason.DEADLINE), f"{key}: {reason}")
        require(
            len(tokens_got) <= self._token_limit(request),
            f"{key}: {len(tokens_got)} tokens, {self._token_limit(request)} at most",
        )
        if reason is FinishReason.STOP:
            require(ends or output.index in ask.stopped | ask.stopped_before, f"{key}: STOP without a reason")
        if reason is FinishReason.LENGTH:
            contexts = [min(self._whole, context) if lies_whole(request) else context for context in self.contexts]
            room = [context - len(request.prompt) for context in contexts]
            limits = [min(request.stop.max_tokens, max(1, tokens)) for tokens in room]
            # a request that was moved to an instance with less room ends there at once
            fits = len(tokens_got) in limits or (self.excused and min(limits) < len(tokens_got) < max(limits))
            require(fits, f"{key}: LENGTH after {len(tokens_got)} tokens, not {limits}")
        if reason is None:
            require(len(tokens_got) < self._token_limit(request), f"{key}: full length, but not finished")

    def _judge_beam(self, ask: Ask, output: TokenOutput, key: str) -> None:
        require(output.finish_reason is not None, f"{key}: beams are delivered when they are finished")
        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        expected = lone_beams(ask.request, self._context_of(True), VOCAB)
        if output.index < len(expected):
            tokens, total, reason = expected[output.index]
            require(output.tokens == tokens, f"{key}: beam {output.tokens} instead of {tokens}")
            require(abs((output.cumulative_logprob or 0.0) - total) < 1e-9 and output.finish_reason is reason, key)
        else:
            require(output.tokens == (), key)

    def row_failed(self, request_id: str, attempt: int) -> None:
        """A row of the request is about to fail by itself, in its attempt number ``attempt`` (from 1). 0: in one that
        the router has given up."""
        ask = self.asks[request_id]
        ask.row_failed, ask.failed_attempt = True, attempt or ask.failed_attempt

    def attempt_refused(self, request_id: str) -> None:
        """The other instance of its attempt gave up, and the router tries again: what fails there is not heard of."""
        ask = self.asks.get(request_id)
        if ask is not None and ask.row_failed and not ask.final:
            ask.failure_unheard = True

    def _judge_reason(self, ask: Ask, output: TokenOutput, key: str, now_ns: int) -> None:
        reason, deadline_ns = output.finish_reason, ask.request.deadline_ns
        if reason is FinishReason.CANCELLED:
            require(ask.cancelled, f"{key}: no client cancelled it")
        elif reason is FinishReason.DEADLINE:
            require(deadline_ns is not None and deadline_ns <= now_ns, f"{key}: DEADLINE {deadline_ns} at {now_ns}")
        elif reason is FinishReason.ERROR and output.error == DEADLY and ask.request.sampling.grammar:
            require(self.excused, f"{key}: no instance has died")
        elif reason is FinishReason.ERROR:
            require(self.excused or ask.row_failed, f"{key}: ERROR in a healthy world")
            require(bool(output.error) <= ask.row_failed, f"{key}: an error of a row that did not fail")
            if not self.excused:
                require(output.error, f"{key}: the row's own error is not told")
                attempts = dict(output.story).get("attempts", 1)
                require(attempts == ask.failed_attempt, f"{key}: tried again, though its row had failed")

    @staticmethod
    def _judge_prompt_logprobs(ask: Ask, output: TokenOutput, key: str) -> None:
        require(not ask.got.get(output.index), f"{key}: prompt logprobs behind the first token")
        entries = output.prompt_logprobs or ()
        expected = [(int(token), -float(index)) for index, token in enumerate(ask.request.prompt) if index]
        require([(e.token, e.logprob) if e else None for e in entries] == [None, *expected], f"{key}: prompt logprobs")

    # -- the end

    def check_starvation(self) -> None:
        """One request of a tenant ends before a quarter of another tenant's flood, however large the flood is."""
        for name, ask in self.asks.items():
            flood = [flood_ask for flood_ask in self.asks.values() if flood_ask.request.tenant == FLOOD]
            before = [flood_ask for flood_ask in flood if flood_ask.arrived_ns <= ask.arrived_ns]
            excused = self.excused or ask.returned
            if ask.request.tenant == QUIET and ask.ended_ns is not None and not excused:
                later = sum((flood_ask.ended_ns or 0) > ask.ended_ns for flood_ask in before)
                require(4 * later >= len(before), f"{name} starves: {later} of {len(before)} before it ended after it")

    def check_all_ended(self, patience_ns: int) -> None:
        """Every request has its endings, and those with a deadline had them in time."""
        for name, ask in self.asks.items():
            finals = sorted(ask.final)
            if ask.lost:
                continue
            require(ask.over, f"{name} hangs: {finals} of {ask.request.n} ended, got {ask.got}")
            require(finals == ([] if ask.rejected is not None else list(range(ask.request.n))), f"{name}: {finals}")
            deadline_ns = ask.request.deadline_ns
            if ask.failed_attempt and not (ask.failure_unheard or self.excused):
                ends = {FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.DEADLINE}
                require(
                    ends & set(ask.final.values()) or ask.stopped, f"{name}: a row failed, and it ended {ask.final}"
                )
            if deadline_ns is not None:
                late_ns = (ask.ended_ns or 0) - deadline_ns
                require(late_ns <= patience_ns, f"{name}: ended {late_ns / 1e6:.1f} ms after its deadline")
