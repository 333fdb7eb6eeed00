"""Scenarios of the cluster world, drawn from a seed: the processes, the requests, and what goes wrong and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from random import Random

from memserve.base.config import AdmissionConfig
from memserve.base.layer_kv import WindowPages
from memserve.base.states import StatePages
from memserve.base.types import Admission, Caching, Role, TransferMode
from memserve_lab.sim.engines import EngineSetup
from memserve_lab.sim.fuzz.admission_judge import draw_gate, draw_kept_ns
from memserve_lab.sim.fuzz.clients import VOCAB, Conversation, Turn, flood
from memserve_lab.sim.fuzz.scenario_features import (
    LAYERED_FAULTS,
    LAYERED_SHARE,
    SHARED_FAULTS,
    SHARED_SHARE,
    STATES_SHARE,
    STRIPED_FAULTS,
    STRIPED_SHARE,
    STRIPED_STREAM,
    WINDOWS_SHARE,
    LayeredSetup,
    SharedSetup,
    StoreSetup,
    StripedSetup,
    crowd,
    draw_layered,
    draw_shared,
    draw_states,
    draw_store,
    draw_striped,
    draw_windows,
    long_prompts,
    put_followers,
    put_keys,
    put_migrations,
    striped_prompts,
    with_others,
)
from memserve_lab.sim.reference.device import LAYERS

MS = 1_000_000
BLOCK_TOKENS = 4
NAMESPACE = "world"
LEASE_NS = 2000 * MS

MIXES: dict[str, tuple[Role, ...]] = {
    "1C": (Role.COLOCATED,),
    "2C": (Role.COLOCATED, Role.COLOCATED),
    "1P1D": (Role.PREFILL, Role.DECODE),
    "2P1D": (Role.PREFILL, Role.PREFILL, Role.DECODE),
    "1P2D": (Role.PREFILL, Role.DECODE, Role.DECODE),
    "1P1D1C": (Role.PREFILL, Role.DECODE, Role.COLOCATED),
    "2P2D": (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
}

ALL_MIXES = MIXES | {
    "2P": (Role.PREFILL, Role.PREFILL),
    "2D": (Role.DECODE, Role.DECODE),
    "1P1C": (Role.PREFILL, Role.COLOCATED),
    "3P3D2C": (Role.PREFILL,) * 3 + (Role.DECODE,) * 3 + (Role.COLOCATED,) * 2,
}
"""Mixes of the long runs: also clusters that lack a role, and a larger one."""

FAULTS = (
    "kill", "pause", "partition", "corrupt", "lose", "repeat", "delay", "device", "slow-link", "flap", "drain",
    "router-pause", "router-restart",
)  # fmt: skip
"""Faults of ``faulty`` settings: a few, of a few kinds."""

SWARM = (
    *FAULTS, "reorder", "garble", "hang", "slow-device", "slow-tier", "clock-jump", "router-clock-jump", "router-power",
    "disk-full", "slow-disk", "clock-back",
)  # fmt: skip
"""Faults of ``swarm`` settings: up to a dozen, of a random subset of all kinds with random weights."""

ROW = "row"
"""One row fails. It costs one request, and is drawn separately (:func:`_put_rows`)."""

STORE_SHARE = 0.1
"""Of all scenarios with caching, those that have a store."""
CALLED_SHARE = 0.4
"""Of all stores, those that wait for a router to call them."""
AUTO_TRANSFER_SHARE = 0.15
"""Of all scenarios with pairs of instances, those with ``--transfer auto``."""

ENGINES_SHARE = 0.06
"""Of all scenarios, those with servers of other projects."""
ENGINE_FAULTS = ("engine-down", "engine-break", "engine-kill", "engine-pause")

WEATHERS = ("healthy", "faulty", "swarm")


@dataclass(frozen=True)
class Setting:
    """One point of the grid of settings."""

    caching: Caching = Caching.PD_CACHING_3
    transfer: TransferMode = TransferMode.BY_REQUEST_AGG
    mix: str = "1P1D"
    faulty: bool = True
    policy: str | None = None
    swarm: bool = False

    @property
    def weather(self) -> str:
        """One of :data:`WEATHERS`."""
        return "swarm" if self.swarm else "faulty" if self.faulty else "healthy"

    def caches_kv(self, role: Role) -> bool:
        """Whether an instance of ``role`` keeps KV for reuse (MemServe 5.1)."""
        if role is Role.DECODE:
            return self.caching in (Caching.PD_CACHING_2, Caching.PD_CACHING_3)
        return self.caching is not Caching.OFF

    def __str__(self) -> str:
        return f"{self.caching.value}/{self.transfer.value}/{self.mix}/{self.weather}"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at some time, for some time."""

    kind: str
    at_ns: int
    for_ns: int
    place: int  # which instance
    other: int  # which peer of it; -1 = all, -2 = the router
    seed: int


@dataclass
class Scenario:
    """Everything that a seed decides before the first event."""

    seed: int
    setting: Setting
    policy: str = "cost"
    hbm_blocks: tuple[int, ...] = ()
    dram_blocks: tuple[int, ...] = ()
    context_tokens: int = 64
    running: int = 6
    step_tokens: int = 24
    chunk: int = 12
    depth: int = 2
    preemption: str = "auto"
    slo_tpot_ns: int | None = None
    """Instances schedule by this objective. None: in order of arrival."""
    pulls_in_flight: int = 4
    event_capacity: int = 65536
    remembers: bool = False
    """The router has a disk, and recovers from it."""
    routers: int = 1
    """Addresses of routers; one at a time is in use."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """Which requests are admitted. Rejected clients ask something else."""
    step_ns: tuple[int, int] = (1 * MS, 6 * MS)
    delay_ns: tuple[int, int] = (50_000, 2 * MS)
    pull_ns: tuple[int, int] = (100_000, 3 * MS)
    store: StoreSetup | None = None
    layered: LayeredSetup | None = None
    """None: every block lies whole."""
    keyed: bool = False
    """Clients name their requests, and ask again."""
    followers: int = 0
    """Routers beside the owner that place requests."""
    shared: SharedSetup | None = None
    """None: every sequence fits an instance."""
    striped: StripedSetup | None = None
    """None: each prompt is computed by one instance."""
    states: StatePages | None = None
    """How snapshots of recurrent states lie. None: layers keep KV alone."""
    windows: WindowPages | None = None
    """How KV of windows lies apart. None: with that of all other layers."""
    migration: str = "drain"
    """When running requests go on at another instance."""
    chooses_transfer: bool = False
    """Routers choose the transfer mode of each request. False: all have the setting's."""
    engines: tuple[EngineSetup, ...] = ()
    """Servers of other projects beside the instances."""
    conversations: list[Conversation] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of the instances, in order. Where prompts are computed in stripes, all compute and decode."""
        mix = ALL_MIXES[self.setting.mix]
        return mix if self.striped is None else (Role.COLOCATED,) * len(mix)

    def __str__(self) -> str:
        kinds = sorted({fault.kind for fault in self.faults})
        requests = sum(len(c.turns) for c in self.conversations)
        store = "" if self.store is None else " store (called)" if self.store.is_called else " store"
        if self.store is not None and self.store.count > 1:
            store += f" x{self.store.count} copies={self.store.copies}"
        layered = " by layer" if self.layered is not None else " shared" if self.shared is not None else ""
        layered += " striped" * (self.striped is not None)
        layered += " states" * (self.states is not None) + " windows" * (self.windows is not None)
        layered += " transfer=auto" * self.chooses_transfer
        layered += f" engines={len(self.engines)}" * bool(self.engines)
        layered += " keyed" * self.keyed + f" followers={self.followers}" * bool(self.followers)
        return (
            f"seed {self.seed} {self.setting} policy={self.policy} hbm={self.hbm_blocks} dram={self.dram_blocks}"
            f" requests={requests} gate={self.admission.mode}{store}{layered} faults={','.join(kinds) or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class Forced:
    """What scenarios have whatever their seed. None: the seed decides."""

    layerwise: str | None = None
    """One of :data:`LAYERWISE`: ``auto`` with KV by layer, ``off`` without."""
    routers: int | None = None
    """So many place requests, where the scenario allows several."""
    groups: str | None = None
    """One of :data:`GROUPS`, beside KV of all tokens. What goes with none of them (KV by layer, shared sequences) is
    left out."""

    def flags(self) -> str:
        """Those of ``memserve sim fuzz`` that say so."""
        return "".join(f" --{name} {value}" for name, value in asdict(self).items() if value is not None)


FREE = Forced()


def draw(seed: int, setting: Setting, forced: Forced = FREE) -> Scenario:
    """The scenario of ``seed``."""
    random = Random(f"{seed}/{setting}")
    roles = ALL_MIXES[setting.mix]
    context = random.choice([48, 64, 96])
    least = -(-context // BLOCK_TOKENS) + 1
    roomy = random.random() < 0.4
    hbm = tuple(least + (3 * least if roomy else random.randint(0, least)) for _ in roles)
    dram = tuple(random.choice([0, 0, least // 2, 2 * least]) for _ in roles)
    scenario = Scenario(
        seed,
        setting,
        policy=setting.policy or random.choice(["least-load", "session", "prompt-tree", "cost", "cost"]),
        hbm_blocks=hbm,
        dram_blocks=dram,
        context_tokens=context,
        running=random.choice([3, 6, 12]),
        step_tokens=random.choice([12, 24, 48]),
        chunk=random.choice([4, 12, 48]),
        depth=random.choice([1, 2, 2, 3]),
        preemption=random.choice(["auto", "swap", "recompute"]),
        pulls_in_flight=random.choice([1, 2, 4]),
        event_capacity=random.choice([0, 4, 64, 65536, 65536]),
        delay_ns=random.choice([(50_000, 200_000), (50_000, 2 * MS), (1 * MS, 20 * MS)]),
        pull_ns=random.choice([(10_000, 100_000), (100_000, 3 * MS), (1 * MS, 40 * MS)]),
    )
    if random.random() < 0.3:
        _make_hectic(random, scenario, least)
    else:
        scenario.conversations = _draw_clients(random, context, random.randint(2, 6))
    if random.random() < 0.15:
        _make_uneven(random, scenario, least)
    if setting.swarm:
        scenario.faults = _draw_swarm(random, len(roles))
        scenario.remembers = random.random() < 0.7
    elif setting.faulty:
        scenario.faults = _draw_faults(random, len(roles))
    if random.random() < (0.35 if setting.swarm else 0.0 if setting.faulty else 0.2):
        _put_gate(random, scenario)
    _put_rows(scenario, len(roles))
    _put_tenants(scenario, roles)
    _put_routers(scenario)
    _put_store(scenario, len(roles))
    _put_objective(scenario)
    if forced.layerwise != "off" and not forced.groups:
        _put_layers(scenario, len(roles), 1.0 if forced.layerwise == "auto" else LAYERED_SHARE)
    if not forced.groups:
        _put_shared(scenario, len(roles))
    _put_groups(scenario, forced.groups)
    _put_transfer(scenario, roles)
    _put_engines(scenario)
    scenario.faults += [Fault("router-restart", at_ms * MS, 5 * MS, 0, -1, at_ms) for at_ms in put_keys(scenario)]
    followers = put_followers(scenario, forced.routers)
    scenario.faults += [
        Fault(kind, begin_ms * MS, span * MS, 0, -1, number) for kind, begin_ms, span, number in followers
    ]
    drains = put_migrations(scenario, len(roles))
    scenario.faults += [Fault("drain", at_ms * MS, for_ms * MS, place, -1, at_ms) for at_ms, for_ms, place in drains]
    scenario.faults = _in_order(scenario.faults)
    return scenario


def _put_objective(scenario: Scenario) -> None:
    """Some scenarios have an objective, easy or out of reach. Drawn from a stream of its own."""
    objective = Random(f"{scenario.seed}/{scenario.setting}/objective")
    scenario.slo_tpot_ns = objective.choice([1, 5, 10, 20, 50]) * MS if objective.random() < 0.15 else None


def _put_transfer(scenario: Scenario, roles: tuple[Role, ...]) -> None:
    """In some scenarios routers choose transfer modes. Drawn from a stream of its own."""
    chance = Random(f"{scenario.seed}/{scenario.setting}/kv").random()
    scenario.chooses_transfer = chance < AUTO_TRANSFER_SHARE and {Role.PREFILL, Role.DECODE} <= set(roles)


def _put_engines(scenario: Scenario) -> None:
    """Some scenarios have servers of other projects beside the instances. Drawn from a stream of its own."""
    random = Random(f"{scenario.seed}/{scenario.setting}/engines")
    unfit = scenario.shared is not None or scenario.striped is not None or scenario.admission.mode != Admission.NONE
    if random.random() >= ENGINES_SHARE or unfit:
        return
    caches = scenario.setting.caching is not Caching.OFF
    scenario.engines = tuple(
        EngineSetup(
            random.choice([1, 3, BLOCK_TOKENS, BLOCK_TOKENS, 2 * BLOCK_TOKENS]),
            random.choice([8, 24, 96]),
            scenario.context_tokens,
            publishes=random.random() < 0.8,
            repeats=random.random() < 0.8,
            loses_share=random.choice([0.0, 0.0, 0.05, 0.3]),
            caches=caches,
            vocab=VOCAB,
        )
        for _ in range(random.choice([1, 1, 2]))
    )
    if scenario.setting.weather != "healthy":
        kinds = random.choices(ENGINE_FAULTS, k=random.choice([0, 1, 2, 4]))
        scenario.faults += [_draw_fault(random, kind, len(scenario.roles)) for kind in kinds]


def _put_groups(scenario: Scenario, forced: str | None) -> None:
    """Some scenarios have models that keep more than KV of all tokens; ``forced``: all, one of :data:`GROUPS`."""
    shares = {"states": STATES_SHARE, "windows": WINDOWS_SHARE}
    if forced:
        shares = {name: float(name == forced) for name in shares}
    _put_states(scenario, shares["states"])
    _put_windows(scenario, shares["windows"])


def _put_states(scenario: Scenario, share: float) -> None:
    """Some scenarios have recurrent states. Drawn from a stream of its own."""
    if scenario.layered is None and scenario.shared is None and scenario.striped is None:
        scenario.states = draw_states(scenario.seed, scenario.setting, share)


def _put_windows(scenario: Scenario, share: float) -> None:
    """In some scenarios KV of windows lies apart, on one tier. Drawn from a stream of its own. Memory grows with it: a
    prompt that fitted fits."""
    if any(part is not None for part in (scenario.layered, scenario.shared, scenario.states, scenario.striped)):
        return
    step_tokens = min(scenario.chunk, scenario.step_tokens)
    scenario.windows = windows = draw_windows(scenario.seed, scenario.setting, BLOCK_TOKENS, step_tokens, share)
    if windows is not None:
        scenario.dram_blocks = tuple(0 for _ in scenario.dram_blocks)
        scenario.hbm_blocks = tuple(windows.blocks_for(blocks) for blocks in scenario.hbm_blocks)


def _put_shared(scenario: Scenario, instances: int) -> None:
    """Some scenarios have sequences that instances share, some prompts in stripes. Drawn from streams of their own."""
    _put_segments(scenario, instances)
    _put_striped(scenario, instances)


def _put_segments(scenario: Scenario, instances: int) -> None:
    random = Random(f"{scenario.seed}/{scenario.setting}/shared")
    unfit = instances == 1 or scenario.layered is not None or scenario.admission.mode != Admission.NONE
    if random.random() >= SHARED_SHARE or unfit:
        return
    scenario.shared = shared = draw_shared(random, instances, BLOCK_TOKENS)
    scenario.context_tokens, scenario.hbm_blocks = shared.context_tokens, shared.hbm_blocks
    scenario.conversations = long_prompts(random, scenario.conversations, shared)
    scenario.faults = [fault for fault in scenario.faults if fault.kind != ROW]  # of a holder, it costs no request
    if scenario.setting.weather != "healthy":
        kinds = random.choices(SHARED_FAULTS, k=random.choice([0, 1, 2, 3]))
        scenario.faults = _in_order([*scenario.faults, *(_draw_fault(random, kind, instances) for kind in kinds)])


def _put_striped(scenario: Scenario, instances: int) -> None:
    """Some scenarios have prompts that instances compute at once. Drawn from a stream of its own."""
    random = Random(f"{scenario.seed}/{scenario.setting}/{STRIPED_STREAM}")
    unfit = instances == 1 or scenario.layered is not None or scenario.shared is not None
    if random.random() >= STRIPED_SHARE or unfit or scenario.admission.mode != Admission.NONE:
        return
    scenario.striped = striped = draw_striped(random, BLOCK_TOKENS)
    scenario.context_tokens, scenario.step_tokens = striped.context_tokens, striped.step_tokens
    scenario.chunk = striped.chunk
    blocks = striped.context_tokens // BLOCK_TOKENS
    scenario.hbm_blocks = tuple(blocks + random.choice([2, blocks // 2, 2 * blocks]) for _ in range(instances))
    scenario.conversations = striped_prompts(random, scenario.conversations, striped)
    if scenario.setting.weather != "healthy":
        kinds = random.choices(STRIPED_FAULTS, k=random.choice([0, 1, 2, 3]))
        scenario.faults = _in_order([*scenario.faults, *(_draw_fault(random, kind, instances) for kind in kinds)])


def _put_gate(random: Random, scenario: Scenario) -> None:
    """With admission, tenants matter, and so do policies that read the gate's accounts."""
    scenario.admission = draw_gate(random)
    for conversation in scenario.conversations:
        conversation.tenant = random.choice(["", "other"])
    if scenario.setting.policy is None and random.random() < 0.5:
        scenario.policy = random.choice(["best-fit", "affinity"])
    scenario.admission = replace(scenario.admission, kept_ns=draw_kept_ns(random))


def _put_layers(scenario: Scenario, instances: int, share: float) -> None:
    """Some scenarios have KV by layer, and what it is for: long prompts. Drawn from a stream of its own."""
    random = Random(f"{scenario.seed}/{scenario.setting}/layers")
    if random.random() >= share:
        return
    scenario.layered = layered = draw_layered(random, instances, BLOCK_TOKENS)
    scenario.context_tokens, scenario.chunk, scenario.step_ns = layered.context_tokens, layered.chunk, layered.step_ns
    scenario.hbm_blocks, scenario.dram_blocks = layered.hbm_blocks, layered.dram_blocks
    least_ns, most_ns = scenario.pull_ns
    scenario.pull_ns = least_ns * LAYERS // layered.layers, most_ns * LAYERS // layered.layers  # of more, smaller pages
    scenario.conversations = crowd(random, scenario.conversations, instances, layered.context_tokens)
    if scenario.faults:
        kinds = random.choices(LAYERED_FAULTS, k=random.choice([0, 1, 2, 3]))
        scenario.faults = _in_order([*scenario.faults, *(_draw_fault(random, kind, instances) for kind in kinds)])


def _put_rows(scenario: Scenario, instances: int) -> None:
    """Some scenarios with faults get failing rows beside them or instead; alone they excuse no other request. Drawn
    from a separate stream, so that all other scenarios stay as they are."""
    random = Random(f"{scenario.seed}/{scenario.setting}/rows")
    if scenario.faults and random.random() < 0.15:
        rows = [_draw_fault(random, ROW, instances) for _ in range(random.choice([1, 2, 3]))]
        scenario.faults = _in_order([*rows, *random.choice([(), scenario.faults])])


def _put_tenants(scenario: Scenario, roles: tuple[Role, ...]) -> None:
    """Some scenarios have tenants with salts and every priority, and some of those a flood. Drawn from a stream of its
    own, so that all other scenarios stay as they are."""
    random = Random(f"{scenario.seed}/{scenario.setting}/tenants")
    if scenario.admission.mode != Admission.NONE or random.random() >= 0.2:
        return
    for conversation in scenario.conversations:
        conversation.tenant, conversation.salt = random.choice(["", "a", "b"]), random.choice(["", "", "x", "y"])
        for turn in conversation.turns:
            turn.priority = random.choice([-(1 << 31), 0, 7])
    if not scenario.setting.faulty and not scenario.setting.swarm and set(roles) == {Role.COLOCATED}:
        scenario.running = 3
        scenario.conversations += flood(random, 8 * len(roles) + 8)


def _put_routers(scenario: Scenario) -> None:
    """Some scenarios with faults have two addresses for the router. Drawn from a stream of its own."""
    random = Random(f"{scenario.seed}/{scenario.setting}/routers")
    if scenario.faults and random.random() < 0.3:
        scenario.routers = 2


def _put_store(scenario: Scenario, instances: int) -> None:
    """Some scenarios have a store, and those with faults have some of its own, among others or alone: then no request
    is excused. Drawn from a stream of its own."""
    random = Random(f"{scenario.seed}/{scenario.setting}/store")
    if scenario.setting.caching is Caching.OFF or random.random() >= STORE_SHARE:
        return
    is_called = Random(f"{scenario.seed}/{scenario.setting}/called").random() < CALLED_SHARE
    others = Random(f"{scenario.seed}/{scenario.setting}/stores")
    scenario.store = store = with_others(replace(draw_store(random), is_called=is_called), others)
    if scenario.setting.faulty or scenario.setting.swarm:
        kinds = random.choices(store.kinds, k=random.choice([1, 2, 4, 8]))
        faults = [_draw_fault(random, kind, instances) for kind in kinds]
        faults = [replace(fault, at_ns=random.randint(0, random.choice([60, 400, 1500])) * MS) for fault in faults]
        scenario.faults = _in_order([*faults, *random.choice([(), scenario.faults])])


def _make_uneven(random: Random, scenario: Scenario, least: int) -> None:
    """Not all instances have room for the whole context: the instance that continues a request decides where it
    ends."""
    sizes = [random.choice([size, least // 2]) for size in scenario.hbm_blocks]
    sizes[random.randrange(len(sizes))] = max(scenario.hbm_blocks)
    scenario.hbm_blocks = tuple(sizes)
    for turn in (turn for conversation in scenario.conversations for turn in conversation.turns):
        turn.beam_width = 0  # the result of a beam search depends on its limit


def _make_hectic(random: Random, scenario: Scenario, least: int) -> None:
    """Many clients at once, which cancel; memory for one or two of them; pages that take many steps."""
    scenario.hbm_blocks = tuple(least + random.randint(0, 4) for _ in scenario.hbm_blocks)
    scenario.pull_ns = random.choice([(2 * MS, 10 * MS), (5 * MS, 60 * MS)])
    scenario.step_ns = (MS // 2, 2 * MS)
    scenario.running = random.choice([6, 12])
    scenario.conversations = _draw_clients(random, scenario.context_tokens, random.randint(6, 12))
    for conversation in scenario.conversations:
        conversation.starts_ns //= random.choice([1, 4, 20])
        for turn in conversation.turns:
            if random.random() < 0.25:
                turn.cancel_after_ns = random.randint(0, 80) * MS


def _draw_clients(random: Random, context: int, count: int) -> list[Conversation]:
    families = [[random.randrange(VOCAB) for _ in range(context)] for _ in range(3)]
    tenants = random.choice([[""], [""], ["", "other"]])
    exotic = random.random()  # the share of this scenario's requests that are unusual
    clients = []
    for number in range(count):
        prefix = random.choice(families)[: random.choice([0, 4, 9, 16, 21, context // 2])]
        turns = [_draw_turn(random, exotic) for _ in range(random.randint(1, 4))]
        turns[0].new_tokens = turns[0].new_tokens or [number % VOCAB]
        clients.append(
            Conversation(
                f"c{number}",
                random.choice(tenants),
                random.choice(["", f"s{number}"]),
                list(prefix),
                turns,
                random.choice([0, random.randint(0, 30) * MS, random.randint(0, 400) * MS]),
                pin_ns=random.choice([None, None, None, 20 * MS, 900 * MS]),
                unpin=random.random() < 0.5,
            )
        )
    return clients


def _draw_turn(random: Random, exotic: float) -> Turn:
    turn = Turn(
        [random.randrange(VOCAB) for _ in range(random.choice([1, 2, 4, 5, 9, 13]))],
        random.choice([0, 2 * MS, 50 * MS]),
        max_tokens=random.choice([1, 2, 4, 8, 12]),
        seed=random.randrange(1000),
        priority=random.choice([0, 0, 0, 1]),
    )
    if random.random() > exotic:
        return turn
    turn.n, turn.beam_width = random.choice([(1, 0), (1, 0), (2, 0), (3, 0), (1, 2), (2, 3)])
    turn.stops = tuple(random.sample(range(VOCAB), random.choice([0, 0, 1, 2])))
    turn.min_tokens = random.choice([0, 0, 2])
    turn.logprobs = random.choice([None, None, 0, 2])
    turn.prompt_logprobs = random.random() < 0.1
    turn.use_cache = random.random() < 0.85
    turn.lifetime_ns = random.choice([None, None, None, 5 * MS, 30 * MS, 500 * MS])
    turn.cancel_after_ns = random.choice([None, None, None, None, 0, 4 * MS, 20 * MS, 60 * MS])
    turn.stop_string_after = random.choice([None, None, None, 1, 3])
    if turn.max_tokens > 1 and not turn.beam_width and random.random() < 0.05:
        turn.max_tokens = 0
        turn.n, turn.stop_string_after = 1, None
    return turn


def _draw_faults(random: Random, instances: int) -> list[Fault]:
    """A random handful of kinds, so that some scenarios have many of one kind and none of another."""
    kinds = random.sample(FAULTS, random.choice([1, 1, 2, 3]))
    count = random.choice([1, 2, 3, 5])
    return _in_order(_draw_fault(random, random.choice(kinds), instances) for _ in range(count))


def _draw_swarm(random: Random, instances: int) -> list[Fault]:
    """Swarm testing: each kind is in or out, and those that are in have weights of very different sizes, so that a bug
    that one kind would hide is seen where that kind is missing."""
    share = random.choice([0.1, 0.3, 0.6])
    kinds = [kind for kind in SWARM if random.random() < share] or [random.choice(SWARM)]
    weights = [random.random() ** 3 + 0.01 for _ in kinds]
    kinds_drawn = random.choices(kinds, weights, k=random.choice([1, 2, 3, 5, 8, 12]))
    return _in_order(_draw_fault(random, kind, instances) for kind in kinds_drawn)


def _draw_fault(random: Random, kind: str, instances: int) -> Fault:
    return Fault(
        kind,
        random.choice([random.randint(0, 60), random.randint(0, 400)]) * MS,
        random.choice([5, 40, 300, 1500, 6000]) * MS,
        random.randrange(instances),
        random.choice([-2, -1, *range(instances)]),
        random.randrange(1 << 30),
    )


def _in_order(faults: Iterable[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: fault.at_ns)
