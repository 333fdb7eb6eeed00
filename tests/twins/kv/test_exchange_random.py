"""Random histories of three pools that hand over, fetch, return and lend to each other while everything goes wrong.

Messages are lost, doubled and late, senders overtake each other; processes die and come back; payloads are corrupted;
plans, seals and pulls end in any order that their ports allow; offers are withdrawn and imports given up; leases end.
After every operation all books balance and no reader gets a wrong byte; at the end nothing is held anywhere.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random

from exchange_world import BLOCK, LAYERS, LEASE_NS, Node, Seq, World, array, pages, raw_label
from memserve.base.types import Tier, TransferMode
from memserve.kv.transfer.events import Delivered, FetchEnded, HandoffArrived, HandoffFailed, Inserted
from memserve.protocol.messages import PeerGone, PeerJoined, Request
from memserve.protocol.peers import Peer

NAMES = ("a", "b", "c")
ROUTER = Peer("router", 1)


class History:
    """One history; ``random`` decides everything."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.world = World(drop=self.loses)
        self.loss = random.choice([0, 0, 0.02, 0.1])
        self.doubles = random.choice([0, 0, 0.05])
        self.corrupts = random.choice([0, 0, 0.25])
        self.done: Counter[str] = Counter()
        self.prompts: dict[tuple[str, tuple[int, ...]], None] = {}  # all that were ever computed
        self.touched: set[str] = set()  # names of processes that the current operation concerns
        self.handing: list[Handing] = []
        for name in NAMES:
            self.add(name)
        self.world.meet()

    def add(self, name: str) -> Node:
        random = self.random
        return self.world.add(
            name,
            hbm=random.choice([6, 12, 24]),
            dram=random.choice([0, 0, 5, 12]),
            caching=random.random() < 0.85,
            namespace="m" if random.random() < 0.98 else "another",
            pulls_in_flight=random.choice([1, 2, 4]),
        )

    # -- the network

    def loses(self, sender, to, message) -> bool:
        return self.random.random() < self.loss

    def deliver(self) -> None:
        links = sorted(self.world.links, key=repr)
        if links:
            link = self.random.choice(links)
            self.touch(link[1].name)
            message = self.world.links[link][0]
            if link[0] == ROUTER:
                self.tell(link[1], self.world.links[link].popleft())
                if not self.world.links[link]:
                    del self.world.links[link]
                return
            if self.random.random() < self.doubles:
                late = self.world.links[link]
                late.insert(self.random.randint(1, len(late)), message)
            self.world.deliver(link)

    def tell(self, to: Peer, message) -> None:
        """News of members."""
        node = self.world.by_peer(to)
        if node is not None and isinstance(message, PeerJoined):
            node.take(node.exchange.peer_joined(message.info, self.world.now))
        elif node is not None:
            node.take(node.exchange.peer_removed(message.peer, self.world.now))

    def announce(self, message, about: str) -> None:
        for node in self.world.nodes.values():
            if node.peer.name != about:
                self.world.links.setdefault((ROUTER, node.peer), deque()).append(message)

    # -- what processes do

    def node(self) -> Node:
        return self.touch(self.random.choice(NAMES))

    def other(self, node: Node) -> Node:
        return self.touch(self.random.choice([name for name in NAMES if name != node.peer.name]))

    def touch(self, name: str) -> Node:
        self.touched.add(name)
        return self.world.nodes[name]

    def prompt(self) -> list[int]:
        """Often with a prefix in common with others."""
        random = self.random
        stem = [random.choice([1, 2])] * BLOCK + [random.choice([3, 4])] * BLOCK + [random.choice([5, 6])] * BLOCK
        return (stem + [random.choice([7, 8])] * 2 * BLOCK)[: random.randint(1, 5 * BLOCK)]

    def tenant(self) -> str:
        return self.random.choice(["", "", "acme"])

    def compute(self) -> None:
        tenant, tokens = self.tenant(), self.prompt()
        self.prompts[tenant, tuple(tokens)] = None
        self.node().compute(tenant, tokens)

    def settled(self, node: Node) -> list[Seq]:
        """Sequences that no plan is working on."""
        return [seq for seq in node.seqs if not any(seq is handing.seq for handing in self.handing)]

    def end(self) -> None:
        node = self.node()
        settled = self.settled(node)
        if settled:
            node.end(self.random.choice(settled))

    def demote(self) -> None:
        self.node().pool.demote_blocks(self.random.randint(1, 4))

    def bring_up(self) -> None:
        """A sequence that only reads: mostly cached prefixes, some of them in DRAM."""
        node = self.node()
        tenant, tokens = self.tenant(), array(self.prompt())
        lease = node.pool.acquire(tenant, tokens)
        node.pool.unpin(lease)
        node.pool.release(lease.blocks)

    def plan(self) -> None:
        node = self.node()
        if node.exchange.wants_plan or node.pool.has_copies:
            node.make_plan()

    def execute(self) -> None:
        node = self.node()
        for plan in node.plans:
            if not plan.executed:
                node.execute(plan)
                break

    def finish(self) -> None:
        node = self.node()
        if node.plans:
            node.finish_plan()

    def seal(self) -> None:
        node = self.node()
        if node.seals:
            node.seal(self.random.choice(node.seals))

    def move(self) -> None:
        node = self.node()
        waiting = [pull for pull in node.pulls if not pull.moved]
        if waiting:
            node.move(self.random.choice(waiting), self.random.random() < self.corrupts)

    def answer(self) -> None:
        node = self.node()
        if node.pulls:
            node.answer(self.random.choice(node.pulls))

    # -- transfers

    def hand_over(self) -> None:
        node = self.node()
        if len(self.handing) < 4:
            handing = Handing.begin(self, node, self.other(node).peer)
            if handing is not None:
                self.handing.append(handing)

    def go_on(self) -> None:
        if self.handing:
            handing = self.random.choice(self.handing)
            self.touch(handing.node.peer.name)
            if handing.go_on():
                self.handing.remove(handing)

    def fetch(self) -> None:
        node, tenant, tokens = self.node(), self.tenant(), self.prompt()
        holder = self.other(node)
        if holder.seqs:  # mostly something that it has, or had
            seq = self.random.choice(holder.seqs)
            tenant, tokens = seq.tenant, seq.tokens
        if node.pool.config.caching and node.pool.match(tenant, array(tokens)) // BLOCK < len(tokens) // BLOCK:
            deadline_ns = self.world.now + self.random.choice([20, 200, 2 * LEASE_NS])
            node.fetch(holder.peer, tenant, tokens, deadline_ns)

    def send_home(self) -> None:
        """A return: the end of a sequence, inserted by the other side."""
        node = self.node()
        settled = self.settled(node)
        if settled:
            seq = self.random.choice(settled)
            whole = len(seq.tokens) // BLOCK
            if whole:
                first = self.random.randrange(whole)
                dst_tier = self.random.choice([Tier.HBM, Tier.HBM, Tier.HBM, Tier.DRAM])
                offer_id = node.offer(self.other(node).peer, seq, first, whole, dst_tier=dst_tier)
                node.exchange.announce_computed(offer_id, first, whole)
                node.take([])

    def send_raw(self) -> None:
        node = self.node()
        settled = self.settled(node)
        if settled:
            seq, to = self.random.choice(settled), self.other(node).peer
            first = self.random.randrange(len(seq.blocks))
            end = self.random.randint(first + 1, len(seq.blocks))
            dst_blocks, dst_tier = (), self.random.choice([Tier.HBM, Tier.DRAM])
            for peer, tier, blocks in node.remote.values():
                if peer == to and len(blocks) >= end - first:
                    dst_blocks, dst_tier = blocks[: end - first], tier
            label = raw_label(seq, first)
            options = {"insert": False, "dst_blocks": dst_blocks, "dst_tier": dst_tier, "private": label}
            offer_id = node.offer(to, seq, first, end, **options)
            node.exchange.announce_computed(offer_id, first, end)
            node.take([])

    def allocate(self) -> None:
        node = self.node()
        to, tier = self.other(node).peer, self.random.choice([Tier.HBM, Tier.DRAM])
        call_id = node.exchange.allocate_at(to, self.random.randint(1, 3), tier, self.world.now, self.world.now + 100)
        node.expecting[call_id] = "alloc"
        node.take([])

    def free(self) -> None:
        node = self.node()
        calls = sorted({*node.remote, *(i for i, kind in node.expecting.items() if kind == "alloc")})
        if calls:
            call_id = self.random.choice(calls)
            node.remote.pop(call_id, None)
            node.expecting.pop(call_id, None)
            node.exchange.free_at(call_id)
            node.take([])

    def drop_delivered(self) -> None:
        node = self.node()
        for tier, block in node.held:
            (node.pool.release if tier == Tier.HBM else node.pool.release_dram)([block])
        node.held.clear()

    def withdraw(self) -> None:
        node = self.node()
        mine = [offer_id for offer_id, is_open in node.offers.items() if is_open]
        if mine:
            offer_id = self.random.choice(mine)
            node.offers[offer_id] = False
            node.exchange.withdraw_offer(offer_id, "changed my mind")
            node.take([])

    def give_up(self) -> None:
        node = self.node()
        theirs = [i for i, kind in node.expecting.items() if kind != "alloc"]
        if theirs:
            transfer_id = self.random.choice(theirs)
            del node.expecting[transfer_id]
            node.exchange.give_up(transfer_id, "nobody waits for it")
            node.take([])

    # -- what goes wrong

    def wait(self) -> None:
        self.world.wait(self.random.choice([1, 5, 20]))

    def wait_long(self) -> None:
        self.world.wait(LEASE_NS // 2)

    def fail_step(self) -> None:
        """The device fails: all KV is forgotten, all sequences are over, plans under way do nothing any more."""
        node = self.node()
        if not node.plans:
            return
        self.handing = [handing for handing in self.handing if handing.node is not node]
        for seq in list(node.seqs):
            node.end(seq)
        node.take(node.exchange.everything_failed(self.world.now))
        node.pool.clear_cache()
        for offer_id in node.offers:
            assert not node.offers[offer_id], "an offer outlived the failure of everything"
        assert not [kind for kind in node.expecting.values() if kind != "alloc"], "an import outlived it"
        assert node.pool.report().by_tier[Tier.HBM].blocks_cached == 0
        for plan in node.plans:
            plan.writes = [(block, layer, data ^ 255) for block, layer, data in plan.writes]  # garbage, at any time
            plan.reads.clear()

    def restart(self) -> None:
        """A process dies and comes back; the others hear of it some time later."""
        old = self.node()
        name = old.peer.name
        self.handing = [handing for handing in self.handing if handing.node is not old]
        self.gather(old)
        node = self.add(name)
        self.world.links = {link: queue for link, queue in self.world.links.items() if link[1] != old.peer}
        if self.random.random() < 0.5:
            self.announce(PeerGone(old.peer, "dead"), name)
        self.announce(PeerJoined(node.info()), name)
        for other in self.world.nodes.values():
            if other is not node:
                node.take(node.exchange.peer_joined(other.info(), self.world.now))

    def reborn(self) -> None:
        """Taken to be dead by mistake: the process goes on with a new generation, its cache and its pulls."""
        node = self.node()
        old = node.peer
        node.peer = Peer(old.name, old.generation + 1)
        node.exchange.restart_as(node.peer)
        node.take([])
        node.expecting.clear()
        node.offers.clear()
        node.remote.clear()
        for handing in self.handing:
            if handing.node is node:
                node.end(handing.seq)
        self.handing = [handing for handing in self.handing if handing.node is not node]
        self.world.links = {link: queue for link, queue in self.world.links.items() if link[1] != old}
        self.announce(PeerGone(old, "silent"), old.name)
        self.announce(PeerJoined(node.info()), old.name)
        for other in self.world.nodes.values():
            if other is not node:
                node.take(node.exchange.peer_joined(other.info(), self.world.now))

    # -- the whole

    OFTEN = ("deliver", "deliver", "deliver", "seal", "move", "answer", "execute", "finish", "plan", "go_on")
    SOMETIMES = ("compute", "hand_over", "fetch", "send_home", "send_raw", "end", "end", "wait")
    SELDOM = ("demote", "bring_up", "allocate", "free", "drop_delivered", "withdraw", "give_up", "wait_long")
    RARELY = ("fail_step", "restart", "reborn")

    def run(self, steps: int) -> None:
        names, weights = [], []
        for group, weight in ((self.OFTEN, 8), (self.SOMETIMES, 3), (self.SELDOM, 0.5), (self.RARELY, 0.1)):
            names += group
            weights += [weight] * len(group)
        for name in self.random.choices(names, weights, k=steps):
            getattr(self, name)()
            self.check()
        self.heal()

    def check(self) -> None:
        for name in sorted(self.touched):
            node = self.world.nodes[name]
            node.check()
            if node.quiet() and self.random.random() < 0.1:
                self.check_cache(node)
        self.touched.clear()

    def check_cache(self, node: Node) -> None:
        """Everything that anybody ever had, as far as it is cached here, is right."""
        assert node.quiet()
        for tenant, tokens in self.prompts:
            node.check_cache(tenant, tokens)

    def heal(self) -> None:
        """Nothing is lost any more, every pool finishes what it began, leases end: nothing may be held."""
        self.loss = self.doubles = 0
        for handing in self.handing:
            while not handing.go_on():
                self.check()
        self.quiesce()
        for node in self.world.nodes.values():
            if node.pool.has_copies:  # nobody waits for them
                node.make_plan()
        self.quiesce()
        for node in self.world.nodes.values():
            node.check_seqs()
            self.check_cache(node)
            assert all(seq.checked for seq in node.seqs)
            while node.seqs:
                node.end(node.seqs[0])
        for _ in range(3):
            self.world.wait(LEASE_NS)
            self.quiesce()
        for node in self.world.nodes.values():
            for tier, block in node.held:
                (node.pool.release if tier == Tier.HBM else node.pool.release_dram)([block])
            node.held.clear()
            node.check()
            node.check_empty()
            assert node.exchange.next_deadline_ns is None
            self.gather(node)

    def quiesce(self) -> None:
        while self.world.links:
            self.deliver()
            self.check()
        while True:
            for link in [link for link in self.world.links if link[0] == ROUTER]:
                for message in self.world.links.pop(link):
                    self.tell(link[1], message)
            if not self.world.step():
                return
            self.touched.update(NAMES)
            self.check()

    def gather(self, node: Node) -> None:
        for outcome in node.outcomes:
            kind = type(outcome).__name__
            if isinstance(outcome, FetchEnded):
                kind += str(outcome.ok)
            self.done[kind] += 1
        for name in ("mismatches", "expired", "refused", "fetch_timeouts", "imports_given_up", "reused_blocks"):
            self.done[name] += getattr(node.exchange.counters, name)


class Handing:
    """A prefill that is handed over while it runs, chunk by chunk and perhaps layer by layer."""

    def __init__(self, history: History, node: Node, seq, offer_id: str, by_layer: bool, cached: int) -> None:
        self.history, self.node, self.seq, self.offer_id = history, node, seq, offer_id
        self.by_layer = by_layer
        self.done = cached  # blocks
        self.under_way: tuple[int, int, int] | None = None  # (plan, blocks, layers announced)

    @classmethod
    def begin(cls, history: History, node: Node, to: Peer) -> Handing | None:
        random, tenant, tokens = history.random, history.tenant(), array(history.prompt())
        history.prompts[tenant, tuple(tokens.tolist())] = None
        lease = node.pool.acquire(tenant, tokens)
        seq = Seq(tenant, tokens, list(lease.blocks), lease)
        seq.checked = True  # until it is computed
        node.seqs.append(seq)
        insert = random.random() < 0.8
        by_layer = random.random() < 0.4
        request = Request("r", tokens, tenant=tenant, use_cache=insert)
        mode = TransferMode.BY_LAYER if by_layer else random.choice(list(TransferMode)[1:])
        offer_id = node.offer(to, seq, request=request, insert=insert, mode=mode)
        node.exchange.announce_computed(offer_id, 0, len(seq.blocks))
        node.take([])
        return cls(history, node, seq, offer_id, by_layer, len(seq.blocks))

    def go_on(self) -> bool:
        """One step further; ``True`` = nothing is left to do."""
        if self.under_way is not None:
            return self.report()
        total = -(-len(self.seq.tokens) // BLOCK)
        if self.done == total:
            self.node.exchange.hand_off(self.offer_id, ((1,),), ())
            self.node.take([])
            self.node.end(self.seq)
            return True
        return not self.chunk(total)

    def chunk(self, total: int) -> bool:
        node, seq = self.node, self.seq
        count = self.history.random.randint(1, total - self.done)
        fresh = node.pool.allocate(count)
        if fresh is None:
            if node.offers.get(self.offer_id):
                node.offers[self.offer_id] = False
                node.exchange.withdraw_offer(self.offer_id, "no room")
                node.take([])
            node.end(seq)
            return False
        seq.blocks += fresh
        node.exchange.more_blocks(self.offer_id, fresh)
        node.take([])
        writes = []
        for place in range(self.done, self.done + count):
            data = pages(seq.tenant, seq.tokens, place)
            writes += [(seq.blocks[place], layer, data[layer]) for layer in range(LAYERS)]
        step_id = node.make_plan(writes)
        whole = min(len(seq.blocks), len(seq.tokens) // BLOCK)
        tokens, blocks = seq.tokens[: whole * BLOCK], seq.blocks[:whole]
        node.pool.publish(seq.lease, seq.tenant, tokens, blocks, written_by=step_id)
        self.under_way = (step_id, count, 0)
        if not self.by_layer and self.history.random.random() < 0.5:
            node.exchange.announce_computed(self.offer_id, self.done, self.done + count, fence=step_id)
            node.take([])
            self.done, self.under_way = self.done + count, None
        return True

    def report(self) -> bool:
        """Layers that are written are announced; without layers, the chunk when its plan has finished."""
        node, (step_id, count, layers) = self.node, self.under_way
        plan = next((plan for plan in node.plans if plan.step_id == step_id), None)
        if plan is not None and not plan.executed:
            if self.history.random.random() < 0.5:
                for earlier in node.plans:
                    node.execute(earlier)
                    if earlier is plan:
                        break
            return False
        if not self.by_layer:
            if plan is None:
                node.exchange.announce_computed(self.offer_id, self.done, self.done + count, fence=0)
                self.done, self.under_way = self.done + count, None
            else:
                node.finish_plan()
        else:
            end = self.history.random.randint(layers + 1, LAYERS)
            node.exchange.announce_computed(self.offer_id, self.done, self.done + count, layers, end, fence=0)
            self.under_way = (step_id, count, end)
            if end == LAYERS:
                self.done, self.under_way = self.done + count, None
        node.take([])
        return False


def tally(seeds, steps: int) -> Counter[str]:
    done: Counter[str] = Counter()
    for seed in seeds:
        history = History(seed)
        try:
            history.run(steps)
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise
        done += history.done
    return done


def test_random_histories() -> None:
    """Each history ends clean; together they have done everything, many times."""
    done = tally(range(30), 400)
    often = HandoffArrived, HandoffFailed, Delivered
    assert all(done[kind.__name__] > 20 for kind in often) and done[Inserted.__name__] > 5, done
    for kind in ("FetchEndedTrue", "FetchEndedFalse", "expired", "refused", "fetch_timeouts", "reused_blocks"):
        assert done[kind] > 10, done
    assert done["mismatches"] > 2, done
