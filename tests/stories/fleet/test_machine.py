"""The fleet machine in virtual time: placement, retries, silence, admission, and random lives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kv_event_words import BLOCK, batch, stored
from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Admission, Request
from memserve.base.units import NS_PER_S
from memserve.fleet.machine import Fleet
from memserve.fleet.messages import (
    Abort,
    AnswerBegan,
    AnsweredElsewhere,
    AnswerEnded,
    AttemptFailed,
    EngineAnswered,
    EngineGone,
    EngineJoined,
    EngineLeft,
    EngineMissed,
    EngineReport,
    FleetAction,
    FleetEvent,
    ForwardRequest,
    GiveUp,
    KvReceived,
    Prefill,
    PromptArrived,
    PromptComputed,
    PromptSpace,
    ReplayEnded,
    RequestReplay,
    TimePassed,
    read_engine,
)
from memserve.protocol.events import RejectRequest

NAMES = ("a:1", "b:2", "c:3")
PROMPT = list(range(1, 1 + 16 * BLOCK))


class World:
    """The machine, its clock, and what became of each request."""

    def __init__(
        self, config: ClusterConfig | None = None, *, events: bool = False, up: bool = True, roles: str = "ccc"
    ) -> None:
        """``roles``: a letter for each engine: prefill, decode, colocated; in capitals: of SGLang."""
        more = ",events=tcp://x:1,replay=tcp://x:2" if events else ""
        role = {"p": ",role=prefill", "d": ",role=decode", "c": ""}
        kinds = ["sglang" if letter.isupper() else "vllm" for letter in roles]
        specs = [
            read_engine(f"{kind}=http://{name}{more}{role[letter.lower()]}")
            for name, kind, letter in zip(NAMES, kinds, roles, strict=False)
        ]
        self.machine, self.now = Fleet(specs, config or ClusterConfig(policy="prompt-tree")), NS_PER_S
        self.at: dict[str, str] = {}
        self.pairs: dict[str, tuple[str, str]] = {}
        self.computing: dict[str, str] = {}
        self.fallbacks: dict[str, tuple[str, ...]] = {}
        self.ended: dict[str, FleetAction] = {}
        self.aborted: list[Abort] = []
        self.replays: list[RequestReplay] = []
        self.gone: list[str] = []
        for name in NAMES[: len(roles)] if up else ():
            self.well(name)

    def tell(self, event: FleetEvent, after_ns: int = 0) -> None:
        self.now += after_ns
        for action in self.machine.handle(event, self.now):
            if isinstance(action, ForwardRequest | Prefill):
                assert action.request_id not in self.ended
                if isinstance(action, ForwardRequest) and action.computed_by:
                    self.pairs[action.request_id] = action.computed_by, action.engine
                else:
                    self.pairs.pop(action.request_id, None)
                at, other = (
                    (self.at, self.computing) if isinstance(action, ForwardRequest) else (self.computing, self.at)
                )
                at[action.request_id] = action.engine
                if isinstance(action, ForwardRequest):
                    self.fallbacks[action.request_id] = action.fallbacks
                other.pop(action.request_id, None)
            elif isinstance(action, GiveUp | RejectRequest):
                assert action.request_id not in self.ended, "it ended twice"
                self.ended[action.request_id] = action
                self.at.pop(action.request_id, None)
                self.computing.pop(action.request_id, None)
            elif isinstance(action, Abort):
                self.aborted.append(action)
            elif isinstance(action, EngineGone):
                self.gone.append(action.name)
            else:
                self.replays.append(action)
        self.machine.check_invariants()

    def well(self, name: str, models: tuple[str, ...] = ("m",), **report: Any) -> None:
        self.tell(EngineAnswered(name, EngineReport({model: model for model in models}, **report)))

    def ask(self, name: str, model: str = "m", tokens: list[int] = PROMPT, **request: Any) -> str | None:
        prompt = Request(name, np.array(tokens, np.int32), **request)
        self.tell(PromptArrived(prompt, model, PromptSpace.TOKENS))
        return self.at.get(name)

    def hand_out(self, name: str, model: str = "m", tokens: list[int] = PROMPT, **arrival: Any) -> tuple[str, ...]:
        """The engines that a gateway is told, in order."""
        prompt = Request(name, np.array(tokens, np.int32))
        self.tell(PromptArrived(prompt, model, PromptSpace.TOKENS, is_handed_out=True, **arrival))
        return (self.at[name], *self.fallbacks[name]) if name in self.at else ()

    def fail(self, name: str, status: int = 502) -> str | None:
        self.tell(AttemptFailed(name, "it broke", status))
        return self.at.get(name)

    def fail_partner(self, name: str) -> tuple[str, str] | None:
        """The engine that computes the prompt of a pair fails. Returns the next pair."""
        self.tell(AttemptFailed(name, "it broke", is_of_partner=True))
        return self.pairs.get(name)


def test_each_engine_is_tried_once_and_then_none() -> None:
    world = World()
    tried = [world.ask("r"), world.fail("r"), world.fail("r")]
    assert sorted(str(name) for name in tried) == list(NAMES) and world.fail("r", 504) is None
    end = world.ended["r"]
    assert isinstance(end, GiveUp) and end.status == 504 and all(name in end.reason for name in NAMES)


def test_fallbacks_are_the_engines_that_would_be_tried() -> None:
    world, twin = World(), World()
    for other in (world, twin):  # another load at each
        for number, count in enumerate((3, 2)):
            for request in range(count):
                other.ask(f"{number}{request}", tokens=[number + 1] * 64)
    names = world.hand_out("r", tokens=[9] * 400)
    tried = [twin.ask("r", tokens=[9] * 400), twin.fail("r"), twin.fail("r")]
    assert list(names) == tried and sorted(names) == list(NAMES)
    assert world.ask("relayed") and not world.fallbacks["relayed"]


def test_fallbacks_are_as_many_as_attempts() -> None:
    world = World(ClusterConfig(policy="prompt-tree", attempts_max=2))
    assert len(world.hand_out("r")) == 2


def test_engines_that_are_ruled_out_get_nothing() -> None:
    world = World()
    assert world.hand_out("r", engines=frozenset({"b:2", "x:9"})) == ("b:2",)
    assert world.hand_out("none", engines=frozenset({"x:9"})) == ()
    end = world.ended["none"]
    assert isinstance(end, GiveUp) and end.status == 503


def test_a_request_without_a_model_may_go_to_any_engine() -> None:
    world = World()
    world.well("a:1", ("other",))
    assert sorted(world.hand_out("r", model="")) == list(NAMES)
    assert sorted(world.hand_out("q")) == ["b:2", "c:3"]


def test_pairs_are_not_handed_out() -> None:
    """A gateway asks one engine at a time, and of these each waits for the other."""
    world = World(roles="ccc")
    for name, role in (("p:1", "prefill"), ("d:2", "decode")):
        world.tell(EngineJoined(read_engine(f"sglang=http://{name},role={role}")))
        world.well(name)
    assert sorted(world.hand_out("r", tokens=[9] * 4000)) == list(NAMES)


def test_the_engine_that_answers_is_charged() -> None:
    world = World()
    first, second, third = world.hand_out("r")
    world.tell(AnsweredElsewhere("r", second))
    views = {view.name: view for view in world.machine.engine_views()}
    assert (views[first].failed, views[first].requests_open) == (1, 0)
    assert (views[second].failed, views[second].requests_open, views[third].requests) == (0, 1, 0)
    for event in (AnsweredElsewhere("r", second), AnsweredElsewhere("r", "x:9"), AnsweredElsewhere("gone", third)):
        world.tell(event)  # known already, no engine, no request
    world.tell(AnswerEnded("r"))
    assert world.ask("next", tokens=[*PROMPT, 1]) in (first, second)  # it has computed the prompt


def test_a_prefix_is_followed_but_not_into_a_queue() -> None:
    world = World()
    first = world.ask("r0")
    world.tell(AnswerBegan("r0"))
    world.tell(AnswerEnded("r0"))
    assert all(world.ask(f"r{at}", tokens=[*PROMPT, at]) == first for at in range(1, 4))
    long = [7] * 20_000
    assert world.ask("long", tokens=[*PROMPT, *long]) == first
    assert world.ask("late", tokens=[*PROMPT, 5]) != first


def test_salts_and_models_share_no_prefix() -> None:
    world = World()
    first = world.ask("r0")
    assert world.ask("r1", salt="s") != first
    for name in NAMES:
        world.well(name, ("m", "other"))
    assert world.ask("r2", model="other") not in (first, world.at["r1"])


def test_published_blocks_decide() -> None:
    world = World(events=True)
    assert sorted(ask.engine for ask in world.replays) == list(NAMES)
    world.tell(KvReceived("c:3", 0, batch(stored(list(range(1, 17)), None, PROMPT))))
    assert world.ask("r") == "c:3"
    assert world.machine.kv_counts("c:3") == dict.fromkeys(range(1, 17), (1, 0))
    world.tell(AnswerEnded("r"))
    world.well("c:3", started_s=5.0)  # it has restarted
    assert world.machine.engine_views()[2].cached_blocks == 0


def test_a_gap_asks_for_a_replay() -> None:
    world = World(events=True)
    world.tell(ReplayEnded("a:1"))
    world.replays.clear()
    world.tell(KvReceived("a:1", 3, batch()))
    assert world.replays == [RequestReplay("a:1", 0)]
    world.tell(KvReceived("a:1", 0, b"garbage", replayed=True))
    world.tell(ReplayEnded("a:1"))
    assert world.ask("r") is not None


def test_an_engine_that_publishes_nothing_is_asked() -> None:
    world = World(events=True)
    name = world.ask("r")
    for engine in NAMES:
        world.tell(ReplayEnded(engine))
    world.replays.clear()
    world.now += 6 * NS_PER_S
    assert name is not None
    world.well(name)
    assert [ask.engine for ask in world.replays] == [name]


def test_gap_during_a_replay_is_requested_after_it() -> None:
    world = World(events=True)
    world.tell(ReplayEnded("a:1"))
    world.replays.clear()
    world.tell(KvReceived("a:1", 0, batch()))
    world.tell(KvReceived("a:1", 2, batch()))
    world.tell(KvReceived("a:1", 1, batch(), replayed=True))
    world.tell(KvReceived("a:1", 4, batch()))
    assert world.replays == [RequestReplay("a:1", 1)]
    world.tell(ReplayEnded("a:1"))
    assert world.replays == [RequestReplay("a:1", 1), RequestReplay("a:1", 3)]
    world.tell(ReplayEnded("a:1"))
    assert world.machine.engine_views()[0].kv_gaps == 2 and len(world.replays) == 2


def test_recovered_engine_is_queried_once_more() -> None:
    """The last batch may be lost, with none behind it to show a gap."""
    world = World(events=True)
    world.tell(ReplayEnded("a:1"))
    world.replays.clear()
    world.tell(KvReceived("a:1", 0, batch()))
    world.well("a:1")
    assert not world.replays
    for _ in range(3):
        world.now += 6 * NS_PER_S
        world.well("a:1")
    assert world.replays == [RequestReplay("a:1", 1)]


def test_text_prompts_are_tracked_as_if_without_kv_events() -> None:
    """KV events name no text: none confirms where such a prompt was sent."""
    world = World(events=True)

    for name in ("first", "second"):
        prompt = Request(name, np.array(PROMPT * 8, np.int32))
        world.tell(PromptArrived(prompt, "m", PromptSpace.TEXT))
        world.tell(AnswerEnded(name))
        world.tell(TimePassed(), 300 * NS_PER_S)
    assert sum(view.matched_tokens for view in world.machine.engine_views()) > 0


def test_silence_aborts_and_refusal_does_not() -> None:
    world = World()
    name = str(world.ask("r"))
    world.tell(EngineMissed(name, "it says 503", refuses=True))
    assert not world.aborted and world.ask("s") != name
    world.tell(EngineMissed(name, "no answer"), 6 * NS_PER_S)
    assert [abort.request_id for abort in world.aborted] == ["r"]
    assert world.fail("r") not in (None, name)


def test_an_engine_that_streams_is_not_silent() -> None:
    world = World()
    name = str(world.ask("r"))
    world.now += 20 * NS_PER_S
    world.tell(EngineMissed(name, "no answer", last_seen_ns=world.now - NS_PER_S))
    assert not world.aborted and world.machine.engine_views()[NAMES.index(name)].up


def test_an_engine_joins_and_leaves() -> None:
    """It gets no new requests at once, and is gone with its last one; another one takes its place."""
    world = World(ClusterConfig(policy="least-load"), events=True)
    world.tell(EngineJoined(read_engine("sglang=http://d:4,events=tcp://x:1")))
    assert not world.machine.engine_views()[3].up
    world.well("d:4")
    names = {world.ask(f"r{number}") for number in range(4)}
    assert names == {*NAMES, "d:4"}
    (request,) = (name for name, engine in world.at.items() if engine == "a:1")
    world.tell(KvReceived("a:1", 0, batch(stored([1], None, PROMPT[:BLOCK]))))
    world.tell(EngineLeft("a:1"))
    world.well("a:1")
    assert world.ask("late") != "a:1" and not world.gone
    world.tell(AnswerEnded(request))
    assert world.gone == ["a:1"] and [view.name for view in world.machine.engine_views()] == ["b:2", "c:3", "d:4"]
    world.tell(EngineJoined(read_engine("vllm=http://e:5")))
    assert world.machine.engine_views()[3].cached_blocks == 0
    world.tell(EngineLeft("e:5"))
    assert world.gone == ["a:1", "e:5"]


def test_no_engine_is_one_clear_error() -> None:
    world = World(up=False)
    assert world.ask("r") is None
    end = world.ended["r"]
    assert isinstance(end, GiveUp) and end.status == 503 and end.retry_after_s and "not answered yet" in end.reason


def test_load_that_engines_report_counts() -> None:
    world = World(ClusterConfig(policy="least-load"))
    world.well("a:1", running=3, waiting=1)
    world.well("b:2", running=0)
    world.well("c:3", running=8, kv_usage=0.9, kv_tokens=100_000)
    assert world.ask("r") == "b:2"


def test_admission_queues_by_tenant_and_time() -> None:
    admission = AdmissionConfig(mode=Admission.BOUNDED, active_max=1, waiting_max=2, wait_ns=5 * NS_PER_S)
    world = World(ClusterConfig(policy="least-load", admission=admission))
    assert world.ask("r0", tenant="x") is not None
    assert world.ask("r1", tenant="x") is None and world.ask("r2", tenant="y") is None
    world.ask("r3", tenant="x")
    assert list(world.ended) == ["r3"]
    world.tell(AnswerEnded("r0"))
    assert set(world.at) - {"r0"} == {"r2"}  # the other tenant had its turn
    world.tell(TimePassed(), 6 * NS_PER_S)
    end = world.ended["r1"]
    assert isinstance(end, RejectRequest) and end.overloaded and end.retry_after_s


# -- roles

LONG = list(range(1, 400))


def test_long_prompt_is_prefilled_and_decoded_at_two_engines() -> None:
    world = World(roles="pdd")
    assert world.ask("r", tokens=LONG) is None and world.computing == {"r": "a:1"}
    world.tell(PromptComputed("r"))
    assert world.at["r"] in ("b:2", "c:3") and world.fail("r") in ("b:2", "c:3")
    assert world.fail("r") == "a:1", "any engine with the model can answer"
    world.tell(AnswerEnded("r"))
    assert [view.prefills for view in world.machine.engine_views()] == [1, 0, 0]


def test_cached_prompt_is_not_prefilled_elsewhere() -> None:
    """Whichever engine has it: all that was computed is in the pool."""
    world = World(roles="pdd")
    assert world.ask("short", tokens=LONG[:200]) in ("b:2", "c:3") and not world.computing
    world.ask("r", tokens=LONG)
    world.tell(PromptComputed("r"))
    assert world.ask("next", tokens=[*LONG, *range(1000, 1100)]) in ("b:2", "c:3")
    assert world.ask("far", tokens=[*LONG, *range(1000, 1400)]) is None and world.computing == {"far": "a:1"}


def test_prompt_is_answered_when_its_prefill_engine_fails() -> None:
    world = World(roles="pdd")
    world.ask("r", tokens=LONG)
    assert world.fail("r") in ("b:2", "c:3")
    world.ask("s", tokens=LONG[::-1])
    world.tell(AttemptFailed("s", "its port is closed", refuses=True))
    assert world.at["s"] in ("b:2", "c:3") and not world.machine.engine_views()[0].up
    assert world.ask("t", tokens=[*LONG, *LONG]) in ("b:2", "c:3") and not world.computing


def test_silent_engine_gets_no_prefills() -> None:
    world = World(roles="pdd")
    world.ask("r", tokens=LONG)
    world.tell(EngineMissed("a:1", "no answer"), 6 * NS_PER_S)
    assert [abort.request_id for abort in world.aborted] == ["r"] and world.fail("r") in ("b:2", "c:3")


def test_engines_without_a_counterpart_do_both_parts() -> None:
    world = World(roles="pdc")
    world.tell(EngineMissed("b:2", "refused", refuses=True))
    assert world.ask("r", tokens=LONG) == "c:3"
    world.tell(EngineMissed("c:3", "refused", refuses=True))
    assert world.ask("s", tokens=LONG) == "a:1" and not world.computing
    world.well("b:2")
    world.tell(PromptArrived(Request("t", np.array(LONG[::-1], np.int32)), "m", PromptSpace.TOKENS, may_split=False))
    assert world.at["t"] == "b:2"


def test_engines_that_need_two_are_asked_together() -> None:
    world = World(roles="PDD")
    world.ask("short", tokens=PROMPT[:8])
    computing, answering = world.pairs["short"]
    assert computing == "a:1" and answering in ("b:2", "c:3")
    assert [view.requests_open for view in world.machine.engine_views()] == [
        1,
        *(int(answering == n) for n in NAMES[1:]),
    ]
    world.tell(PromptComputed("short"))
    assert [view.prefills for view in world.machine.engine_views()] == [1, 0, 0]
    assert world.machine.engine_views()[0].requests_open == 0, "its part is done"
    world.tell(AnswerBegan("short"))
    world.tell(AnswerEnded("short"))
    assert world.machine.engine_views()[0].prefills == 1


def test_an_answer_that_begins_ends_the_prompts_part() -> None:
    world = World(roles="PDD")
    world.ask("r")
    world.tell(AnswerBegan("r"))
    view = world.machine.engine_views()[0]
    assert (view.prefills, view.requests_open) == (1, 0)
    world.tell(PromptComputed("r"))
    assert world.machine.engine_views()[0].prefills == 1, "that it says so as well changes nothing"


def test_one_of_a_pair_fails_and_the_other_stays() -> None:
    world = World(roles="PPD")
    world.ask("r")
    first, _ = world.pairs["r"]
    other = "b:2" if first == "a:1" else "a:1"
    assert world.fail_partner("r") == (other, "c:3")
    assert world.fail("r") is None and "c:3: it broke" in world.ended["r"].reason
    failed = {view.name: view.failed for view in world.machine.engine_views()}
    assert failed == {first: 1, other: 0, "c:3": 1}
    world = World(roles="PDD")
    world.ask("r")
    _, first = world.pairs["r"]
    assert world.fail("r") == ("c:3" if first == "b:2" else "b:2") and world.pairs["r"][0] == "a:1"


def test_half_a_pair_answers_nothing() -> None:
    world = World(roles="PDD")
    for name in NAMES[1:]:
        world.tell(EngineMissed(name, "refused", refuses=True))
    assert world.ask("r") is None
    assert "b:2: refused" in world.ended["r"].reason and "a:1: it answers in a pair alone" in world.ended["r"].reason


def test_both_of_a_pair_are_given_up_when_silent() -> None:
    for silent in range(2):
        world = World(roles="PD")
        world.ask("r")
        name = world.pairs["r"][silent]
        world.tell(EngineMissed(name, "no answer"), 6 * NS_PER_S)
        assert [(abort.request_id, abort.engine) for abort in world.aborted] == [("r", name)]


def test_a_pair_is_for_prompts_that_are_worth_it() -> None:
    """Where an engine answers alone."""
    world = World(roles="PDC")
    assert world.ask("short", tokens=PROMPT[:8]) == "c:3" and "short" not in world.pairs
    world.ask("r", tokens=LONG)
    assert world.pairs["r"] == ("a:1", "b:2")
    assert world.fail("r") == "c:3" and "r" not in world.pairs


def test_engines_of_a_pair_leave_when_their_parts_end() -> None:
    world = World(roles="PD")
    world.ask("r")
    world.tell(EngineLeft("a:1"))
    world.tell(EngineLeft("b:2"))
    assert not world.gone
    world.tell(AnswerBegan("r"))
    assert world.gone == ["a:1"]
    world.tell(AnswerEnded("r"))
    assert world.gone == ["a:1", "b:2"]


@pytest.mark.parametrize("seed", range(90))
def test_random_lives(seed: int) -> None:
    """Every request ends once, whatever engines and clients do; all accounts are checked after each event."""
    draw = random.Random(seed)
    policy = draw.choice(["cost", "prompt-tree", "least-load", "affinity", "best-fit", "session"])
    bounded = AdmissionConfig(mode=Admission.BOUNDED, active_max=3, waiting_max=3, wait_ns=3 * NS_PER_S)
    admission = bounded if draw.random() < 0.5 else AdmissionConfig()
    roles = draw.choice(["ccc", "pdc", "ppd", "pdd", "PDc", "PPD", "PDD"])
    world = World(ClusterConfig(policy=policy, admission=admission), events=draw.random() < 0.5, roles=roles)
    live: list[str] = []
    for step in range(150):
        world.now += draw.randrange(NS_PER_S)
        live = [name for name in live if name not in world.ended]
        choice, engine = draw.random(), draw.choice(NAMES)
        present = {view.name for view in world.machine.engine_views()}
        if engine not in present:
            spec = draw.choice(["vllm={},events=tcp://x:1", "sglang={},role=decode", "sglang={},role=prefill"])
            world.tell(EngineJoined(read_engine(spec.format(f"http://{engine}"))))
        elif choice < 0.05:
            world.tell(EngineLeft(engine))
        elif choice < 0.3:
            live.append(f"r{step}")
            tokens = [step, *LONG] if draw.random() < 0.3 else PROMPT[: draw.randrange(1, 64)]
            if draw.random() < 0.7:
                world.ask(live[-1], tokens=tokens, model=draw.choice(["m", "m", "m2"]))
            else:
                engines = draw.choice([None, frozenset(draw.sample(NAMES, 2))])
                world.hand_out(live[-1], draw.choice(["m", "m2", ""]), tokens, engines=engines)
        elif choice < 0.4:
            world.well(engine, draw.choice([("m",), ("m", "m2"), ()]), running=draw.randrange(5))
        elif choice < 0.5:
            world.tell(EngineMissed(engine, "no answer", refuses=draw.random() < 0.5))
        elif choice < 0.6:
            world.tell(KvReceived(engine, draw.randrange(30), batch(stored([step], None, PROMPT[:BLOCK]))))
        elif live:
            name = draw.choice(live)
            failed = AttemptFailed(name, "x", refuses=True)
            if name in world.computing:
                event = draw.choice([PromptComputed(name), AnswerEnded(name), failed])
            elif name in world.pairs:
                of_partner = AttemptFailed(name, "x", is_of_partner=True)
                event = draw.choice([PromptComputed(name), AnswerBegan(name), AnswerEnded(name), failed, of_partner])
            else:
                event = draw.choice([AnswerBegan(name), AnswerEnded(name), failed, AnsweredElsewhere(name, engine)])
            if isinstance(event, AnswerEnded) or name in world.at or name in world.computing:
                world.tell(event)
            if isinstance(event, AnswerEnded):
                live.remove(name)
                world.at.pop(name, None)
                world.computing.pop(name, None)
    for name in [name for name in live if name not in world.ended]:
        world.tell(AnswerEnded(name))
    assert world.machine.admission_stats().active == 0 and not any(
        view.requests_open for view in world.machine.engine_views()
    )
