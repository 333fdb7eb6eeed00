"""Which scenarios have clients that name their requests.

KV by layer in a scenario, for those that have it: memory that long prompts do not fit into, and such prompts.

Sequences that instances share, for scenarios that have them: small memories, and prompts that fit none of them.

The store of a scenario, for those that have one: its memory, its disks, and what goes wrong with it.

Drafts in a scenario, for those that have them: some that are right, some that are not.

Instances of several workers, for scenarios that have them: each computes its part of a plan at its own pace.

In production they meet (``model/workers/group.py``) before the end of a plan is told. Until the slowest one is through,
others would find its part of the pages as it was before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from memserve.base.config import AdmissionConfig
from memserve.base.layer_kv import WindowPages
from memserve.base.states import StatePages
from memserve.base.types import Admission
from memserve.base.units import NS_PER_MS
from memserve.instance.machine import Instance
from memserve.instance.scheduler.sequence import Sequence
from memserve.instance.speculation.drafts import LEAST, Draft, Price, Worth
from memserve.kv.costs import CopyCurve, CostModel, PrefillCurve
from memserve.store.disks.events import DisksConfig, Sync
from memserve.store.machine.events import MoveConfig, StoreConfig
from memserve_lab.sim.fuzz.clients import FLOOD, QUIET, VOCAB, Conversation, Turn
from memserve_lab.sim.reference.oracle import lone_tokens

MIGRATING_SHARE = 0.1
"""Of all scenarios with faults and several instances, those where instances drain while they decode."""
KEYED_SHARE = 0.1
"""Of all scenarios."""
STREAM = "keys 52904"
"""Of the numbers that decide. Its name was chosen so that seeds that tests and the guide name keep their scenarios."""
FOLLOWED_SHARE = 0.08
"""Of all scenarios, those with several routers at once."""
DEATHS = (1, 1, 2, 3)
"""Of routers, in scenarios with faults."""
FOLLOWER_FAULTS = ("follower-kill", "follower-kill", "follower-pause", "follower-cut")
LONG, SLOW_STEP_NS = (24, 40), (3 * NS_PER_MS, 10 * NS_PER_MS)
"""Tokens of answers, and steps, that take long enough for a router to die, and its client to come again, while they are
written."""


class Drawn(Protocol):
    """A scenario, as far as it is drawn."""

    seed: int
    setting: Any
    conversations: list[Conversation]
    faults: list[Any]
    remembers: bool
    keyed: bool
    followers: int
    migration: str
    shared: SharedSetup | None
    step_ns: tuple[int, int]
    admission: AdmissionConfig


def put_keys(scenario: Drawn) -> list[int]:
    """Some scenarios have clients with keys; those with faults also have routers that die, and mostly remember. Drawn
    from a stream of its own. Returns when the router dies, in milliseconds."""
    random = Random(f"{scenario.seed}/{scenario.setting}/{STREAM}")
    if random.random() >= KEYED_SHARE or any(fault.kind == "row" for fault in scenario.faults):
        return []
    turns = _name_all(scenario)
    if not scenario.faults:
        return []
    if random.random() < 0.5:  # else they die beside all that goes wrong anyway
        scenario.faults = []
    scenario.remembers = random.random() < 0.85
    if random.random() < 0.5:
        _slow_down(random, scenario, turns)
    return [random.randint(0, random.choice([60, 400])) for _ in range(random.choice(DEATHS))]


def _slow_down(random: Random, scenario: Drawn, turns: list[Turn]) -> None:
    """Requests run for so long that something happens to their router meanwhile."""
    scenario.step_ns = SLOW_STEP_NS
    for turn in turns:
        turn.max_tokens = turn.max_tokens if turn.beam_width else random.choice(LONG)


def _name_all(scenario: Drawn) -> list[Turn]:
    """All requests have keys; none is called off, or has a deadline."""
    scenario.keyed = True
    turns = [turn for conversation in scenario.conversations for turn in conversation.turns]
    for turn in turns:
        turn.cancel_after_ns = turn.lifetime_ns = None
    return turns


def put_migrations(scenario: Drawn, instances: int) -> list[tuple[int, int, int]]:
    """In some scenarios with faults instances drain while they decode. Drawn from a stream of its own. Returns when,
    for how long (ms), and which."""
    random = Random(f"{scenario.seed}/{scenario.setting}/migrations")
    unfit = instances == 1 or scenario.setting.weather == "healthy" or scenario.shared is not None
    if random.random() >= MIGRATING_SHARE or unfit:
        return []
    scenario.migration = random.choice(["auto", "auto", "drain"])
    for conversation in scenario.conversations:
        for turn in conversation.turns:
            if turn.n == 1 and not turn.beam_width and turn.max_tokens > 1 and random.random() < 0.7:
                turn.max_tokens = random.choice(LONG)
    places = [random.randrange(instances) for _ in range(random.choice([1, 2, 4]))]
    return [(random.randint(5, 300), random.choice([40, 300]), place) for place in places]


def put_followers(scenario: Drawn, routers: int | None) -> list[tuple[str, int, int, int]]:
    """Some scenarios have several routers, and clients with keys, which any of them serves; ``routers``: so many.
    Drawn from a stream of its own. Returns faults of followers: kind, when and for how long (ms), which."""
    random = Random(f"{scenario.seed}/{scenario.setting}/followers")
    is_drawn = random.random() < FOLLOWED_SHARE
    unfit = any(conversation.tenant == FLOOD for conversation in scenario.conversations)
    unfit = unfit or any(fault.kind == "row" for fault in scenario.faults)
    if unfit or routers == 1 or not (is_drawn or routers):
        return []
    scenario.followers = routers - 1 if routers else random.choice([1, 2])
    turns = _name_all(scenario)
    if scenario.setting.weather == "healthy":
        return []
    if random.random() < 0.5:  # else they die beside all that goes wrong anyway
        scenario.faults = [fault for fault in scenario.faults if fault.kind == "router-restart"]
    kinds = random.choices(FOLLOWER_FAULTS, k=random.choice([1, 2, 3]))
    faults = [(kind, random.randint(0, 400), random.choice([5, 300, 1500]), random.randrange(2)) for kind in kinds]
    if scenario.admission.mode != Admission.NONE and random.random() < 0.6:
        _slow_down(random, scenario, turns)
        faults += [("follower-asks", random.randint(0, 100), 2500, number) for number in range(2)]
    return faults


LAYERWISE = ("auto", "off")
GROUPS = ("states", "windows")
LAYERED_SHARE = 0.1
"""Of all scenarios, those with KV by layer."""
LAYERED_FAULTS = ("row", "device", "device", "kill", "slow-device", "slow-tier")
"""Where anything goes wrong at all, some of these do as well: each ends or delays what is being moved."""


STREAMED_SHARE = 0.4
"""Of the scenarios with KV by layer: some of their sequences have no room whole."""


@dataclass(frozen=True)
class LayeredSetup:
    """What a seed decides of KV by layer. All instances have as many layers: they exchange KV."""

    context_tokens: int
    hbm_blocks: tuple[int, ...]
    """Of each instance: the context fits, and at most one more; or a part of it, and the rest streams."""
    dram_blocks: tuple[int, ...]
    chunk: int
    link_bytes_s: float | None
    """Of the link between the tiers. None: it carries everything."""
    step_ns: tuple[int, int]
    layers: int = 5


def draw_layered(random: Random, instances: int, block_tokens: int) -> LayeredSetup:
    """Pools of which a long prompt takes more than half."""
    context = random.choice([80, 112, 144])
    least = -(-context // block_tokens) + 1
    setup = LayeredSetup(
        context,
        tuple(least + random.randint(least // 4, 3 * least // 4) for _ in range(instances)),
        tuple(random.choice([least, 3 * least, 6 * least]) for _ in range(instances)),
        random.choice([4, 4, 4, 8, 12]),
        random.choice([None, 125_000.0, 500_000.0, 2_000_000.0]),
        random.choice(
            [(1 * NS_PER_MS, 6 * NS_PER_MS), (1 * NS_PER_MS, 6 * NS_PER_MS), (4 * NS_PER_MS, 20 * NS_PER_MS)]
        ),
    )
    if random.random() >= STREAMED_SHARE:
        return setup
    streamed = 2 * -(-least // setup.layers)  # through which all layers pass, and a third more for what is written
    hbm_blocks = (random.randint(4 + streamed * 4 // 3, least),) * instances  # what lies whole ends alike everywhere
    dram_blocks = tuple(random.choice([1, 2, 5]) * least for _ in range(instances))
    return replace(setup, hbm_blocks=hbm_blocks, dram_blocks=dram_blocks)


def crowd(random: Random, conversations: list[Conversation], instances: int, context_tokens: int) -> list[Conversation]:
    """A few of the clients, the whole flood if there is one, and clients that begin at once, each with a long document
    that others may have, too."""
    documents = [[random.randrange(VOCAB) for _ in range(context_tokens)] for _ in range(3)]
    few = [conversation for conversation in conversations if conversation.tenant in (FLOOD, QUIET)]
    few += [conversation for conversation in conversations if conversation not in few][:3]
    tenants = sorted({conversation.tenant for conversation in few} - {FLOOD, QUIET}) or [""]
    hurry_ns = random.choice([1, 20, 100, 300]) * NS_PER_MS
    return few + [
        Conversation(
            f"d{number}",
            random.choice(tenants),
            random.choice(["", f"d{number}"]),
            random.choice(documents)[: int(random.choice([0.4, 0.6, 0.75, 0.85]) * context_tokens)],
            [_turn(random) for _ in range(random.choice([1, 2, 3]))],
            random.randint(0, hurry_ns),
        )
        for number in range(instances // 2 + random.randint(3, 6))
    ]


def _turn(random: Random) -> Turn:
    """One line of tokens, often a long one: sequences that part do not lie by layer."""
    return Turn(
        [random.randrange(VOCAB) for _ in range(random.choice([0, 1, 3, 5]))],
        random.choice([0, 0, 20 * NS_PER_MS]),
        max_tokens=random.choice([1, 8, 16, 32, 32]),
        seed=random.randrange(1000),
        lifetime_ns=random.choice([None, None, None, None, 60 * NS_PER_MS]),
        cancel_after_ns=random.choice([None, None, None, random.randint(0, 200) * NS_PER_MS]),
        stop_string_after=random.choice([None, None, None, 3]),
        use_cache=random.random() < 0.9,
    )


STATES_SHARE = 0.08
"""Of all scenarios, those with recurrent states."""
STATES_STREAM = "states 153"
"""As ``STREAM``."""
_STATES = (StatePages(10, 1, draft_states=9), StatePages(74, 2, draft_states=4), StatePages(192, 3, draft_states=20))
"""Of blocks of 64 bytes in two layers: a page, a block and a page, three blocks."""


def draw_states(seed: int, setting: object, share: float = STATES_SHARE) -> StatePages | None:
    """How the snapshots of a scenario's instances lie, in a ``share`` of all. None: layers keep KV alone."""
    random = Random(f"{seed}/{setting}/{STATES_STREAM}")
    return random.choice(_STATES) if random.random() < share else None


WINDOWS_SHARE = 0.08
"""Of all scenarios, those whose windows' KV lies apart."""
WINDOWS_STREAM = "windows 160"
"""As ``STREAM``."""


def draw_windows(
    seed: int, setting: object, block_tokens: int, step_tokens: int, share: float = WINDOWS_SHARE
) -> WindowPages | None:
    """How KV of windows lies in a scenario's instances, in a ``share`` of all. None: with that of all other layers."""
    random = Random(f"{seed}/{setting}/{WINDOWS_STREAM}")
    if random.random() >= share:
        return None
    window, part_blocks = random.randint(1, 6 * block_tokens), random.randint(1, 3)
    chunk = random.choice((0, 0, random.randint(1, 6 * block_tokens)))
    window = random.choice((0, window)) if chunk else window
    return WindowPages(window, part_blocks, block_tokens, step_tokens, chunk)


SHARED_SHARE = 0.08
"""Of all scenarios with several instances, those with such sequences."""
SHARED_FAULTS = ("device", "device", "kill", "pause", "lose", "delay", "drain")
"""Where anything goes wrong at all, some of these do as well: each ends a part, or delays word of it."""


@dataclass(frozen=True)
class SharedSetup:
    """What a seed decides of them."""

    context_tokens: int
    """The longest sequence: nearly what two instances hold."""
    hbm_blocks: tuple[int, ...]


def draw_shared(random: Random, instances: int, block_tokens: int) -> SharedSetup:
    """Memories that hold about half of the context each."""
    blocks = random.choice([8, 12, 18])
    return SharedSetup(
        (2 * blocks - 1) * block_tokens, tuple(blocks + random.choice([0, 0, 0, 3]) for _ in range(instances))
    )


def long_prompts(random: Random, conversations: list[Conversation], setup: SharedSetup) -> list[Conversation]:
    """A few of the clients, without what keeps a sequence at one instance, and clients with long documents."""
    few = conversations[:4]
    for turn in (turn for conversation in few for turn in conversation.turns):
        turn.beam_width, turn.prompt_logprobs = 0, False
    documents = [[random.randrange(VOCAB) for _ in range(setup.context_tokens)] for _ in range(2)]
    tenants = sorted({conversation.tenant for conversation in few}) or [""]
    return few + [
        Conversation(
            f"l{number}",
            random.choice(tenants),
            random.choice(["", f"l{number}"]),
            random.choice(documents)[: int(random.choice([0.6, 0.7, 0.8]) * setup.context_tokens)],
            [_shared_turn(random) for _ in range(random.choice([1, 1, 2]))],
            random.randint(0, 300) * NS_PER_MS,
        )
        for number in range(random.randint(2, 3))
    ]


def _shared_turn(random: Random) -> Turn:
    return Turn(
        [random.randrange(VOCAB) for _ in range(random.choice([0, 1, 3]))],
        random.choice([0, 20 * NS_PER_MS]),
        max_tokens=random.choice([1, 2, 6, 6]),
        n=random.choice([1, 1, 1, 2]),
        seed=random.randrange(1000),
        lifetime_ns=random.choice([None, None, None, None, 60 * NS_PER_MS]),
        cancel_after_ns=random.choice([None, None, None, random.randint(0, 200) * NS_PER_MS]),
        use_cache=random.random() < 0.8,
    )


STRIPED_SHARE, STRIPED_STREAM = 0.06, "stripes 6358"
"""Of all scenarios with several instances, those where prompts are computed in stripes: all compute and decode. Of the
numbers that decide, whose name was chosen as that of ``STREAM``."""
STRIPED_FAULTS = ("device", "kill", "pause", "lose", "delay", "partition", "slow-link", "corrupt")
STRIPED_COSTS = CostModel(
    machine="stripes", prefill=PrefillCurve(NS_PER_MS, NS_PER_MS, 0.0), report_ns=0.0,
    same_host=CopyCurve(0.0, 0.0, 0.0), network=CopyCurve(0.0, 0.0, 0.0),
)  # fmt: skip
"""Computing is slow and moving is quick: stripes pay from two steps on."""


@dataclass(frozen=True)
class StripedSetup:
    """What a seed decides of prompts in stripes."""

    context_tokens: int
    step_tokens: int
    chunk: int
    layers: int
    documents: tuple[tuple[int, ...], ...]
    """Which prompts begin with."""


def draw_striped(random: Random, block_tokens: int) -> StripedSetup:
    """Prompts of several steps."""
    context = random.choice([96, 128, 192])
    documents = tuple(tuple(random.randrange(VOCAB) for _ in range(context)) for _ in range(2))
    step_tokens = random.choice([2, 3, 4]) * block_tokens
    return StripedSetup(
        context, step_tokens + random.choice([0, 3]), step_tokens - random.choice([0, 0, block_tokens]),
        random.choice([2, 3, 5]), documents,
    )  # fmt: skip


def striped_prompts(random: Random, conversations: list[Conversation], setup: StripedSetup) -> list[Conversation]:
    """Some of the clients, and clients with long documents."""
    few = conversations[: random.choice([1, 4])]
    tenants = sorted({conversation.tenant for conversation in few}) or [""]
    return few + [
        Conversation(
            f"s{number}",
            random.choice(tenants),
            random.choice(["", f"s{number}"]),
            list(random.choice(setup.documents)[: int(random.choice([0.5, 0.7, 0.8]) * setup.context_tokens)]),
            [_shared_turn(random) for _ in range(random.choice([1, 1, 2]))],
            random.randint(0, 400) * NS_PER_MS,
        )
        for number in range(random.randint(2, 4))
    ]


STORE_FAULTS = (
    "store-kill",
    "store-power",
    "store-drain",
    "store-pause",
    "store-cut",
    "store-corrupt",
    "store-slow-link",
    "store-rot",
    "store-disk-errors",
    "store-disk-full",
    "store-slow-disk",
    "store-disk-hang",
)
"""No request depends on a store: none of these is an excuse for any."""

_WRONG_BYTES = ("store-rot", "store-kill", "store-power")
"""Those behind which a store finds something else than it has written: each scenario with faults has one of them."""
_WANTED = CostModel(
    machine="fetches",
    prefill=PrefillCurve(step_ns=20.0 * NS_PER_MS, token_ns=50.0 * NS_PER_MS),
    network=CopyCurve(40.0 * NS_PER_MS, 0.0, 0.0),
    disk=CopyCurve(40.0 * NS_PER_MS, 0.0, 0.0),
)
_SYNCS: tuple[Sync, ...] = ("none", "segment", "always")


@dataclass(frozen=True)
class StoreSetup:
    """What a seed decides of a store."""

    blocks: int
    """Of its memory."""
    segments: tuple[int, ...]
    """Of each disk."""
    disks: DisksConfig
    config: StoreConfig
    io_ns: tuple[int, int]
    """How long a disk takes for a job."""
    is_wanted: bool
    """Instances take computing to be slow, and their caches make room for something else between two turns: what comes
    again is asked of the store."""
    kinds: tuple[str, ...] = ()
    """Faults that are drawn."""
    dies_at_turns: float = 0.0
    """How likely it is killed when a turn ends, to be back at once: the next turn asks for what its memory has kept."""
    is_called: bool = False
    """It was told of no router, and joins the one that calls it."""
    count: int = 1
    """Stores, all alike, which are as one."""
    copies: int = 1
    """In how many of them each block is to lie."""

    @property
    def costs(self) -> CostModel | None:
        """Of all members. None: each has its own."""
        return _WANTED if self.is_wanted else None


def draw_store(random: Random) -> StoreSetup:
    """A small store: most of what it is given makes room for something else."""
    disks = DisksConfig(
        sync=random.choice(_SYNCS),
        writes_per_day_bytes=random.choice([0, 0, 0, 1 << 18]),
        move_share=random.choice([0.0, 0.25, 0.5]),
        reads_max=random.choice([2, 256]),
        writes_max=random.choice([2, 32]),
        read_deadline_ns=random.choice([20, 200, 2000]) * NS_PER_MS,
        admission=random.choice(["all", "all", "second-hit"]),
        frequency_keys=1 << 10,
        failures_max=random.choice([3, 8]),
    )
    config = StoreConfig(
        fetch_deadline_ns=random.choice([30, 300, 2000]) * NS_PER_MS,
        loads_max=random.choice([1, 4, 128]),
        fetches_max=random.choice([1, 4096]),
    )
    setup = StoreSetup(
        blocks=random.choice([6, 12, 24, 64]),
        segments=tuple(random.randint(4, 8) for _ in range(random.choice([0, 1, 1, 1, 2]))),
        disks=disks,
        config=config,
        io_ns=random.choice([(20_000, 200_000), (100_000, 4 * NS_PER_MS), (1 * NS_PER_MS, 30 * NS_PER_MS)]),
        is_wanted=random.random() < 0.8,
        kinds=(random.choice(_WRONG_BYTES), *random.sample(STORE_FAULTS, random.choice([0, 1, 2, 6]))),
    )
    return replace(setup, dies_at_turns=random.choice([0.0, 0.0, 0.05, 0.15]))


def with_others(setup: StoreSetup, random: Random) -> StoreSetup:
    """Half of the stores are not alone."""
    if random.random() < 0.5:
        return setup
    moves = MoveConfig(
        bytes_per_s=random.choice([1 << 14, 1 << 30]),
        batch_bytes=random.choice([1, 1 << 12, 1 << 20]),
        scan_keys=random.choice([1, 3, 4096]),
        answer_ns=random.choice([20, 300]) * NS_PER_MS,
        again_ns=random.choice([20, 300]) * NS_PER_MS,
        passes_max=random.choice([1, 4]),
        hot_lends=random.choice([1, 2, 8]),
        hot_part=random.choice([1, 16]),
    )
    config = replace(setup.config, moves=moves)
    return replace(setup, config=config, count=random.choice([2, 2, 3, 4]), copies=random.choice([1, 1, 2, 3]))


DRAFTING_SHARE = 0.3
"""Of all scenarios, those with drafts."""


class Always(Worth):
    """What steps take here says nothing."""

    def drafts_pay(self, sequences: int) -> bool:
        return True

    def draft_price(self, sequences: int) -> Price:
        return Price(1e9, 0.0)


def draft_tokens(seed: int) -> int:
    """How many a row may have in the scenario of ``seed``. 0: none."""
    random = Random(f"{seed}/drafts")
    return random.choice([1, 2, 3, 8]) if random.random() < DRAFTING_SHARE else 0


def foretell(instance: Instance, random: Random) -> None:
    """Let an instance with drafts find any: what will be drawn, that with a mistake, what production code finds."""
    speculation = instance.planner.speculation
    if speculation is None:
        return
    look_up, speculation.worth = speculation.look_up, Always()

    def propose(sequence: Sequence, count: int) -> Draft:
        if random.random() < 0.2:
            return look_up(sequence, count)
        sampling = sequence.group.request.sampling
        right = lone_tokens(sequence.known_tokens().tolist(), count, sampling.seed, sequence.index, VOCAB)
        if random.random() < 0.4:
            index = random.randrange(count)
            right[index] = (right[index] + 1) % VOCAB
        return Draft(right[: random.randint(1, count)], LEAST)

    speculation.propose = propose


SHARDED_SHARE = 0.3
"""Of all scenarios, those whose instances have several workers."""


def workers_of(seed: int) -> int:
    """How many an instance has in the scenario of ``seed``."""
    random = Random(f"{seed}/workers")
    return random.choice([2, 3, 4]) if random.random() < SHARDED_SHARE else 1


class Workers:
    """When those of one instance are through with a plan."""

    def __init__(self, count: int, name: str) -> None:
        self._others, self._random = count - 1, Random(name)

    def told_ns(self, slowest_ns: int) -> int:
        """How long after a plan's begin its end is told, if the slowest of them takes ``slowest_ns``."""
        return self._meet_at([slowest_ns, *(int(slowest_ns * self._random.random()) for _ in range(self._others))])

    def _meet_at(self, through_ns: list[int]) -> int:
        return max(through_ns)
