"""The machine of an instance as a play: what it hears, and everything it wants done about it.

``RunStep(0: slot 0 [0, 8))``: plan 0 computes the first eight tokens of the sequence in slot 0; *draws* when it also
draws the next token. Two plans may be under way; blocks have 4 tokens.
"""

from __future__ import annotations

from fleet_world import BLOCK, GEOMETRY, LAYERS, ROUTER_PEER, fleet_config
from golden import Script
from instance_world import request
from memserve.base.types import ClockTicked, Request, Role
from memserve.base.units import NS_PER_MS
from memserve.instance.events import GrammarBuilt, MaskComputed, StepFailed, StepFinished
from memserve.instance.machine import Instance
from memserve.instance.scheduler.grammar_waits import BUILD_NS, MASK_NS, MASKS_NS
from memserve.kv.transfer.events import PagesPulled, PagesSealed
from memserve.protocol.events import EmitTokens, MessageArrived, RequestArrived, RequestCancelled
from memserve.protocol.messages import (
    AnyMessage,
    Dispatch,
    Drain,
    Handoff,
    JoinAccepted,
    Offer,
    PeerGone,
    Ready,
    Release,
)
from memserve.protocol.peers import Holder, Peer, PeerInfo

P, D = Peer("p", 1), Peer("d", 1)
PROMPT = [5, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def info(peer: Peer) -> PeerInfo:
    return PeerInfo(peer, Role.COLOCATED, "", fleet_config().namespace, GEOMETRY, 24, 0, 64, True)


class Member(Script):
    """The machine of one member of a cluster of two."""

    def __init__(self, me: Peer, **sizes) -> None:
        super().__init__(Instance(fleet_config(**sizes), BLOCK, self_peer=me, geometry=GEOMETRY))
        self.machine.handle(MessageArrived(ROUTER_PEER, JoinAccepted(tuple(info(p) for p in (P, D) if p != me))), 0)

    def hears(self, ms: float, sender: Peer, message: AnyMessage, *wanted: str) -> list:
        return self.at(ms, MessageArrived(sender, message), *wanted)

    def steps(self, ms: float, step: int, *wanted: str, drawn: tuple[int, ...] = ()) -> list:
        """The device has executed plan ``step`` and drawn these tokens."""
        return self.at(ms, StepFinished(step, list(drawn), 1_000_000), *wanted)


class Alone(Script):
    """The machine of an engine without a cluster."""

    def __init__(self, **sizes) -> None:
        super().__init__(Instance(fleet_config(**sizes), BLOCK))

    steps = Member.steps


def a_request(name: str = "r", prompt: list[int] = PROMPT, max_tokens: int = 3, grammar: str = "") -> Request:
    return request(name, prompt, max_tokens=max_tokens, grammar=grammar)


def offer_in(actions: list) -> Offer:
    return next(action.message for action in actions if isinstance(getattr(action, "message", None), Offer))


def test_admitted_prefilled_and_decoded() -> None:
    """The prompt in pieces that end with blocks, then a token a step. A plan is made before the token is known that the
    plan before it draws; the answer ends by its length, so none is made for nothing."""
    it = Alone()
    it.at(1, RequestArrived(a_request()), "RunStep(1: open 0, slot 0 [0, 8))", "RunStep(2: slot 0 [8, 10) draws)")
    it.steps(2, 1, "RunStep(3: slot 0 [10, 11) draws)")
    it.steps(3, 2, "RunStep(4: slot 0 [11, 12) draws)", "EmitTokens(r 0:[7])", drawn=(7,))
    it.steps(4, 3, "EmitTokens(r 1:[8])", drawn=(8,))
    it.steps(5, 4, "EmitTokens(r 2:[9] LENGTH)", drawn=(9,))
    cached = "RunStep(5: close 0, open 0, slot 0 [8, 10) draws)", "RunStep(6: slot 0 [10, 11) draws)"
    it.at(6, RequestArrived(a_request("s")), *cached)  # two blocks of its prompt are there


def test_two_in_one_batch() -> None:
    """A prompt that comes while another sequence decodes joins it in the next step."""
    it = Alone(depth=1)
    it.at(1, RequestArrived(a_request("a")), "RunStep(1: open 0, slot 0 [0, 8))")
    it.at(1, RequestArrived(a_request("b", PROMPT[::-1])))
    it.steps(2, 1, "RunStep(2: open 1, slot 0 [8, 10) draws, slot 1 [0, 8))")
    it.steps(3, 2, "RunStep(3: slot 0 [10, 11) draws, slot 1 [8, 10) draws)", "EmitTokens(a 0:[7])", drawn=(7,))
    both = "RunStep(4: slot 0 [11, 12) draws, slot 1 [10, 11) draws)"
    it.steps(4, 3, both, "EmitTokens(a 1:[8]; b 0:[1])", drawn=(8, 1))
    alone = "RunStep(5: close 0, slot 1 [11, 12) draws)"
    it.steps(5, 4, alone, "EmitTokens(a 2:[9] LENGTH; b 1:[2])", drawn=(9, 2))
    it.steps(6, 5, "EmitTokens(b 2:[3] LENGTH)", drawn=(3,))


def test_client_disconnect() -> None:
    """The plans under way are carried out, and what they draw is dropped."""
    it = Alone()
    it.at(1, RequestArrived(a_request()), "RunStep(1: open 0, slot 0 [0, 8))", "RunStep(2: slot 0 [8, 10) draws)")
    it.at(2, RequestCancelled("r"), "EmitTokens(r 0:[] CANCELLED)")
    it.steps(3, 1)
    it.steps(4, 2, drawn=(7,))
    assert it.machine.is_idle


def test_a_step_fails_and_its_sequences_are_tried_again_once() -> None:
    it = Alone(depth=1)
    it.at(1, RequestArrived(a_request(prompt=PROMPT[:4])), "RunStep(1: open 0, slot 0 [0, 4) draws)")
    it.at(2, StepFailed(1, "out of memory"), "RunStep(2: open 0, slot 0 [0, 4) draws)")
    it.at(3, StepFailed(2, "out of memory"), "EmitTokens(r 0:[] ERROR)")
    assert it.machine.is_idle


def test_a_preemption() -> None:
    """Seven blocks: the older sequence needs its fifth, and the younger one's three go to DRAM until it has ended."""
    it = Alone(hbm=7, dram=4, depth=1, chunk=16, caching=False, preemption="swap")
    older, younger = a_request("a", (PROMPT * 2)[:14], max_tokens=5), a_request("b", PROMPT[:8], max_tokens=4)
    it.at(1, RequestArrived(older), "RunStep(1: open 0, slot 0 [0, 14) draws)")
    it.at(1, RequestArrived(younger))
    joined = "RunStep(2: open 1, slot 0 [14, 15) draws, slot 1 [0, 8) draws)"
    it.steps(2, 1, joined, "EmitTokens(a 0:[7])", drawn=(7,))
    both = "RunStep(3: slot 0 [15, 16) draws, slot 1 [8, 9) draws)"
    it.steps(3, 2, both, "EmitTokens(a 1:[7]; b 0:[1])", drawn=(7, 1))
    out = "RunStep(4: close 1, copy 3 from HBM to DRAM, slot 0 [16, 17) draws)"
    it.steps(4, 3, out, "EmitTokens(a 2:[7]; b 1:[1])", drawn=(7, 1))
    it.steps(5, 4, "RunStep(5: slot 0 [17, 18) draws)", "EmitTokens(a 3:[7])", drawn=(7,))
    back = "RunStep(6: close 0, copy 3 from DRAM to HBM, open 0, slot 0 [9, 10) draws)"
    it.steps(6, 5, back, "EmitTokens(a 4:[7] LENGTH)", drawn=(7,))
    it.steps(7, 6, "RunStep(7: slot 0 [10, 11) draws)", "EmitTokens(b 2:[1])", drawn=(1,))
    it.steps(8, 7, "EmitTokens(b 3:[1] LENGTH)", drawn=(1,))


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    """It is built once for all that name it, and forgotten with the last of them."""
    it = Alone()
    it.at(1, RequestArrived(a_request("a", grammar="json")), "BuildGrammar(json)")
    it.at(2, RequestArrived(a_request("b", PROMPT[:4], 1)), "RunStep(1: open 0, slot 0 [0, 4) draws)")
    it.at(3, RequestArrived(a_request("c", PROMPT[:4], 1, grammar="json")))
    it.at(4, RequestCancelled("c"), "EmitTokens(c 0:[] CANCELLED)")
    it.steps(5, 1, "EmitTokens(b 0:[7] LENGTH)", drawn=(7,))
    planned = "RunStep(2: close 0, open 0, slot 0 [4, 10) draws)", "RunStep(3: slot 0 [10, 11) draws)"
    it.at(6, GrammarBuilt(1), *planned)
    it.at(7, RequestArrived(a_request("d", PROMPT[:4], 1, grammar="json")))  # it is there
    opened = "RunStep(4: copy 1 from HBM to HBM, open 1, slot 0 [11, 12) draws, slot 1 [3, 4) draws)"
    it.steps(8, 2, opened, "EmitTokens(a 0:[7])", drawn=(7,))
    it.steps(9, 3, "EmitTokens(a 1:[7])", drawn=(7,))
    ended = "ForgetGrammar(json)", "EmitTokens(a 2:[7] LENGTH; d 0:[1] LENGTH)"
    it.steps(10, 4, *ended, drawn=(7, 1))
    assert it.machine.is_idle


def test_failed_or_slow_grammar_build_ends_its_requests() -> None:
    it = Alone()
    it.at(1, RequestArrived(a_request("a", grammar="wrong")), "BuildGrammar(wrong)")
    it.at(2, GrammarBuilt(1, "it has no end"), "ForgetGrammar(wrong)", "EmitTokens(a 0:[] ERROR)")
    it.at(3, RequestArrived(a_request("b", grammar="slow")), "BuildGrammar(slow)")
    late_ms = 3 + BUILD_NS / NS_PER_MS
    assert it.machine.next_deadline_ns == round(late_ms * NS_PER_MS)
    it.later(late_ms - 1)
    it.later(late_ms, "ForgetGrammar(slow)", "EmitTokens(b 0:[] ERROR)")
    it.at(late_ms, RequestArrived(a_request("c", grammar="slow")), "BuildGrammar(slow)")
    it.at(late_ms + 1, GrammarBuilt(2))  # what the first one waited for
    assert not it.machine.is_idle
    planned = "RunStep(1: open 0, slot 0 [0, 8))", "RunStep(2: slot 0 [8, 10) draws)"
    it.at(late_ms + 2, GrammarBuilt(3), *planned)


def test_a_sequence_whose_mask_is_late_skips_steps() -> None:
    """Others go on. The plan under way has a row of it that means nothing; its token is drawn from the logits that
    were kept, when the mask has come."""
    it = Alone()
    it.at(1, RequestArrived(a_request("a", PROMPT[:4], grammar="json")), "BuildGrammar(json)")
    begun = "RunStep(1: open 0, slot 0 [0, 4) draws)", "RunStep(2: slot 0 [4, 5) draws)"
    it.at(2, RequestArrived(a_request("b", PROMPT[4:8], 9)), *begun)
    it.at(3, GrammarBuilt(1))
    joined = "RunStep(3: open 1, slot 0 [5, 6) draws, slot 1 [0, 4) draws)"
    it.steps(4, 1, joined, "EmitTokens(b 0:[7])", drawn=(7,))
    both = "RunStep(4: slot 1 [4, 5) draws, slot 0 [6, 7) draws)"
    it.steps(5, 2, both, "EmitTokens(b 1:[8])", drawn=(8,))
    late = StepFinished(3, [9, 0], 1_000_000, late=frozenset((1,)))
    it.at(6, late, "RunStep(5: slot 0 [7, 8) draws)", "AwaitMask(1, slot 1)", "EmitTokens(b 2:[9])")
    late = StepFinished(4, [0, 1], 1_000_000, late=frozenset((1,)))
    it.at(7, late, "RunStep(6: slot 0 [8, 9) draws)", "EmitTokens(b 3:[1])")
    it.at(8, MaskComputed(1))
    drawn = "RunStep(7: slot 0 [9, 10) draws, slot 1 draws behind 4)"
    it.steps(9, 5, drawn, "EmitTokens(b 4:[2])", drawn=(2,))
    both = "RunStep(8: slot 1 [4, 5) draws, slot 0 [10, 11) draws)"
    it.steps(10, 6, both, "EmitTokens(b 5:[3])", drawn=(3,))
    both = "RunStep(9: slot 1 [5, 6) draws, slot 0 [11, 12) draws)"
    it.steps(11, 7, both, "EmitTokens(b 6:[4]; a 0:[6])", drawn=(4, 6))


def test_missing_mask_ends_only_its_request() -> None:
    it = Alone(depth=1)
    it.at(1, RequestArrived(a_request("a", PROMPT[:4], grammar="json")), "BuildGrammar(json)")
    it.at(2, GrammarBuilt(1), "RunStep(1: open 0, slot 0 [0, 4) draws)")
    it.at(3, RequestArrived(a_request("b", PROMPT[4:8], 2)))
    late = StepFinished(1, [0], 1_000_000, late=frozenset((0,)))
    it.at(4, late, "RunStep(2: open 1, slot 1 [0, 4) draws)", "AwaitMask(1, slot 0)")
    it.steps(5, 2, "RunStep(3: slot 1 [4, 5) draws)", "EmitTokens(b 0:[7])", drawn=(7,))
    it.steps(6, 3, "EmitTokens(b 1:[8] LENGTH)", drawn=(8,))
    assert it.machine.next_deadline_ns == 4 * NS_PER_MS + MASK_NS
    it.later(4 + MASK_NS / NS_PER_MS, "ForgetGrammar(json)", "EmitTokens(a 0:[] ERROR)")
    it.at(2000, MaskComputed(1))
    assert it.machine.is_idle


def test_masks_may_take_so_long_in_all_of_an_answer() -> None:
    """Each is within its time, and all together are not."""
    it = Alone(depth=1, context=64)
    it.at(0, RequestArrived(a_request("a", PROMPT[:4], 40, grammar="json")), "BuildGrammar(json)")
    actions = it.machine.handle(GrammarBuilt(1), 0)
    now, waited_ns, step = 0, 0, 1
    while not any(isinstance(action, EmitTokens) and action.outputs[0].error for action in actions):
        actions = it.machine.handle(StepFinished(step, [0], 1, late=frozenset((0,))), now)
        due = it.machine.next_deadline_ns - now
        now += min(due, MASK_NS - 1)
        waited_ns += min(due, MASK_NS - 1)
        if due <= MASK_NS - 1:
            actions = it.machine.handle(ClockTicked(), now)
            continue
        actions = it.machine.handle(MaskComputed(step), now)  # and the draw is late again
        step += 1
    assert waited_ns == MASKS_NS and it.machine.is_idle


def test_a_prefill_instance_hands_over() -> None:
    """Blocks are offered at once, sealed when they are computed, and held until the taker has them."""
    it = Member(P)
    planned = "RunStep(1: open 0, slot 0 [0, 8))", "RunStep(2: slot 0 [8, 10) draws)"
    said = "Send(router, KvEvents)", "Send(d, Offer p/1/1, r, blocks 0 1 2)"
    offer = offer_in(it.hears(1, ROUTER_PEER, Dispatch(a_request(), decode_at=D), *planned, *said))
    it.steps(2, 1, "SealPages(blocks 0 1, layers 0 to 5)")
    it.steps(3, 2, "EmitTokens(r 0:[7])", "SealPages(blocks 2, layers 0 to 5)", drawn=(7,))
    it.at(4, PagesSealed(1, (11, 22)), "Send(d, Ready p/1/1, 2 blocks from block 0)")
    it.at(5, PagesSealed(2, (33,)), "Send(d, Ready p/1/1, 1 blocks from block 2)", "Send(d, Handoff p/1/1, [7])")
    assert not it.machine.is_idle
    it.hears(6, D, Release(offer.transfer_id))
    assert it.machine.is_idle


def test_a_dispatch_that_comes_twice_is_taken_once() -> None:
    """The network repeats messages: to refuse the second would end the attempt that runs. Another request of that name
    is refused."""
    it = Member(P)
    planned = "RunStep(1: open 0, slot 0 [0, 8))", "RunStep(2: slot 0 [8, 10) draws)"
    it.hears(1, ROUTER_PEER, Dispatch(a_request()), *planned, "Send(router, KvEvents)")
    it.hears(2, ROUTER_PEER, Dispatch(a_request()))
    it.hears(3, ROUTER_PEER, Drain())
    it.hears(4, ROUTER_PEER, Dispatch(a_request()))
    it.hears(5, ROUTER_PEER, Dispatch(a_request(prompt=PROMPT[:-1])), "RejectRequest(r, try again)")


def test_a_decode_instance_takes_over() -> None:
    """It pulls what is ready, and decodes when it knows the first token: the prompt is not computed again."""
    theirs = Instance(fleet_config(), BLOCK, self_peer=P, geometry=GEOMETRY)
    theirs.handle(MessageArrived(ROUTER_PEER, JoinAccepted((info(D),))), 0)
    offer = offer_in(theirs.handle(MessageArrived(ROUTER_PEER, Dispatch(a_request(), decode_at=D)), 0))
    it = Member(D)
    it.hears(1, P, offer)
    ready = Ready(offer.transfer_id, 0, 0, LAYERS, (11, 22, 33))
    it.hears(2, P, ready, "PullPages(blocks 0 1 2 of p into blocks 0 1 2)")
    it.at(3, PagesPulled(1, "", 100, "shm"))
    planned = "RunStep(1: open 0, slot 0 [10, 11) draws)", "RunStep(2: slot 0 [11, 12) draws)"
    said = "Send(router, HandedOver r)", "Send(router, KvEvents)", "Send(p, Release p/1/1)"
    it.hears(4, P, Handoff(offer.transfer_id, ((7,),)), *planned, *said)
    it.steps(5, 1, "EmitTokens(r 1:[8])", drawn=(8,))
    it.steps(6, 2, "EmitTokens(r 2:[9] LENGTH)", "Send(router, KvEvents)", drawn=(9,))
    assert it.machine.is_idle


def test_kv_that_comes_before_the_grammar_is_built_is_not_held() -> None:
    """What the cache keeps of it is found again: blocks of 4 tokens, and the last token is computed in any case."""
    theirs = Instance(fleet_config(), BLOCK, self_peer=P, geometry=GEOMETRY)
    theirs.handle(MessageArrived(ROUTER_PEER, JoinAccepted((info(D),))), 0)
    theirs.handle(MessageArrived(ROUTER_PEER, Dispatch(a_request(grammar="json"), decode_at=D)), 0)
    offer = offer_in(theirs.handle(GrammarBuilt(1), 0))
    it = Member(D)
    it.hears(1, P, offer, "BuildGrammar(json)")
    ready = Ready(offer.transfer_id, 0, 0, LAYERS, (11, 22, 33))
    it.hears(2, P, ready, "PullPages(blocks 0 1 2 of p into blocks 0 1 2)")
    it.at(3, PagesPulled(1, "", 100, "shm"))
    said = "Send(router, HandedOver r)", "Send(router, KvEvents)", "Send(p, Release p/1/1)"
    it.hears(4, P, Handoff(offer.transfer_id, ((7,),)), *said)
    planned = "RunStep(1: open 0, slot 0 [8, 11) draws)", "RunStep(2: slot 0 [11, 12) draws)"
    it.at(5, GrammarBuilt(1), *planned)


def test_prefix_is_computed_when_its_holder_dies_during_fetch() -> None:
    it = Member(D)
    order = Dispatch(a_request(), holders=(Holder(P, 8),))
    it.hears(1, ROUTER_PEER, order, "Send(p, Fetch d/1/1, blocks 0 to 2)")
    planned = "RunStep(1: open 0, slot 0 [0, 8))", "RunStep(2: slot 0 [8, 10) draws)"
    it.hears(2, ROUTER_PEER, PeerGone(P, "it died"), *planned, "Send(router, KvEvents)")


def test_an_instance_that_drains_finishes_what_it_has() -> None:
    it = Member(P)
    planned = "RunStep(1: open 0, slot 0 [0, 8))", "RunStep(2: slot 0 [8, 10) draws)"
    it.hears(1, ROUTER_PEER, Dispatch(a_request()), *planned, "Send(router, KvEvents)")
    it.hears(2, ROUTER_PEER, Drain())
    it.hears(3, ROUTER_PEER, Dispatch(a_request("s")), "RejectRequest(s, try again)")
    it.steps(4, 1, "RunStep(3: slot 0 [10, 11) draws)")
    it.steps(5, 2, "RunStep(4: slot 0 [11, 12) draws)", "EmitTokens(r 0:[7])", drawn=(7,))
    it.steps(6, 3, "EmitTokens(r 1:[8])", drawn=(8,))
    it.steps(7, 4, "EmitTokens(r 2:[9] LENGTH)", "Send(router, KvEvents)", drawn=(9,))
    assert it.machine.is_idle
