"""Stories of the cluster machine: the way of one request, its outputs out of order, and what clients may do."""

from __future__ import annotations

import pytest

from cluster_world import BLOCK, CONTEXT, a_request, dispatches, lone_answer
from memserve.base.types import Caching, FinishReason, Role, Tier, TokenLogprobs, TokenOutput
from memserve.base.units import NS_PER_S
from memserve.kv.identity import block_identities, namespace_id
from memserve.protocol.messages import (
    Cancel,
    Dispatch,
    HandedOver,
    KvChange,
    KvEvents,
    NoteTool,
    RequestRefused,
    StopSequence,
    Tokens,
)
from memserve.protocol.peers import Peer
from memserve.router.events import (
    RequestArrived,
    ToolCalled,
)

P, D, C, S = Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.STORE
PROMPT = list(range(1, 21))


# -- one request


def test_a_request_is_prefilled_here_and_decoded_there(make_cluster):
    """The usual way in 1P1D: the first token comes from P, the others from D; the client sees one stream."""
    world = make_cluster(("p", P), ("d", D))
    ((to, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT, max_tokens=5, n=2))))
    client = world.clients["r"]
    assert to == "p" and order.decode_at == Peer("d", 1) and order.generated == () and not order.return_kv
    assert order.request.request_id == "r#1" and order.request.deadline_ns is None
    world.run()
    for index in (0, 1):
        assert (client.got[index], client.reasons[index]) == lone_answer(client.request, index)
        assert client.introduced[index] == 1
    assert dict(client.outputs[0].story)["route"] == "p to d" and dict(client.outputs[-1].story)["attempts"] == 1


def test_facts_of_the_decode_instance_reach_the_client(make_cluster):
    """Its first output is the client's second: facts that stand there are told all the same."""
    world = make_cluster(("p", P), ("d", D))
    world.post(RequestArrived(a_request("r", PROMPT, max_tokens=5)))
    client = world.clients["r"]
    first, second = lone_answer(client.request, 0)[0][:2]
    world.hear(Peer("p", 1), Tokens((TokenOutput("r#1", 0, (first,), story=(("cached_tokens_hbm", 4),)),)))
    world.hear(Peer("d", 1), Tokens((TokenOutput("r#1", 0, (second,), offset=1, story=(("pulled_blocks", 3),)),)))
    assert [dict(output.story).get("cached_tokens_hbm") for output in client.outputs] == [4, None]
    assert client.outputs[1].story == (("pulled_blocks", 3),)
    world.run()


def test_a_colocated_instance_does_it_alone(make_cluster):
    world = make_cluster(("c", C))
    client = world.ask(a_request("r", PROMPT))
    assert world.instances["c"].heard[-1].decode_at is None
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_generated_kv_goes_home_in_pd_caching_3_only(make_cluster):
    for caching in Caching:
        world = make_cluster(("p", P), ("d", D), caching=caching)
        ((_, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT))))
        assert order.return_kv == (caching is Caching.PD_CACHING_3)
        trees = {view.peer.name: view.tree_blocks for view in world.cluster.instances()}
        blocks = len(PROMPT) // BLOCK
        on_p, on_d = caching is not Caching.OFF, caching in (Caching.PD_CACHING_2, Caching.PD_CACHING_3)
        assert trees == {"p": blocks * on_p, "d": blocks * on_d}, "what is expected to be cached"


def test_kv_of_decode_instances_is_fetched_in_pd_caching_3_only(make_cluster):
    """What D holds beyond P's prefix: at lower levels it stays there."""
    for caching in (Caching.PD_CACHING_2, Caching.PD_CACHING_3):
        world = make_cluster(("p", P), ("d", D), caching=caching)
        identities = block_identities(namespace_id("", "ns"), PROMPT, BLOCK)
        stored = KvChange("stored", Tier.HBM, b"".join(identities))
        world.hear(Peer("d", 1), KvEvents(0, (stored,)))
        ((_, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT))))
        lenders = [holder.peer.name for holder in order.holders]
        assert lenders == (["d"] if caching is Caching.PD_CACHING_3 else [])


def test_time_in_the_router_is_part_of_the_queue(make_cluster):
    """There was no instance for two seconds, then the instance let it wait for 7 ns."""
    world = make_cluster()
    client = world.ask(a_request("r", PROMPT))
    world.wait(2 * NS_PER_S)
    world.add("c", C)
    world.run()
    assert client.outputs[0].queue_ns == 2 * NS_PER_S + 7


def test_prompts_that_fit_nowhere_are_rejected_with_the_numbers(make_cluster):
    world = make_cluster(("p", P), ("d", D))
    client = world.ask(a_request("r", [1] * CONTEXT))
    assert client.rejected.retry_after_s is None and str(CONTEXT) in client.rejected.reason
    empty = world.ask(a_request("e", []))
    assert empty.rejected.reason == "the prompt is empty"


def test_running_request_id_is_not_reused(make_cluster):
    world = make_cluster(("c", C))
    client = world.ask(a_request("r", PROMPT))
    again = RequestArrived(a_request("r", PROMPT))
    (action,) = actions = world.cluster.handle(again, world.now)
    world.diary.append((world.now, again, repr(actions)))
    assert "still running" in action.reason
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


# -- out of order, lost, repeated


def test_decode_output_may_arrive_before_prefill_output(make_cluster):
    """Two processes, two connections: D's second token is here before P's first."""
    world = make_cluster(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT, max_tokens=4))
    prefill, decode = world.instances["p"], world.instances["d"]
    prefill.step()
    kept, prefill.outbox = prefill.outbox, []
    world.say_all(prefill)  # the handoff
    for _ in range(3):
        decode.step()
    world.say_all(decode)
    assert client.got == [[]], "nothing can be given to the client"
    world.hear(prefill.peer, kept[0])
    assert (client.got[0], client.reasons[0]) == lone_answer(client.request, 0)


def test_tokens_that_were_lost_are_drawn_again(make_cluster):
    """A connection broke with tokens in it; what comes after shows the gap, and the request starts over behind it."""
    world = make_cluster(("c", C))
    client = world.ask(a_request("r", PROMPT, max_tokens=6))
    instance = world.instances["c"]
    world.step()
    instance.step()
    instance.outbox.clear()  # lost
    world.step()
    assert len(client.got[0]) == 1
    world.wait(3 * NS_PER_S)
    order = instance.heard[-1]
    assert isinstance(order, Dispatch) and order.generated == (tuple(client.got[0]),)
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    assert world.cluster.stats().counters.attempts_failed == {"gap": 1}


def test_repeated_and_late_outputs_are_dropped(make_cluster):
    world = make_cluster(("c", C))
    client = world.ask(a_request("r", PROMPT, max_tokens=3))
    instance = world.instances["c"]
    instance.step()
    (first,), instance.outbox = instance.outbox, []
    for _ in range(3):
        world.hear(instance.peer, first)
    world.run()
    world.hear(instance.peer, first)
    assert client.got[0] == lone_answer(client.request, 0)[0]
    assert world.cluster.stats().counters.outputs_late == 3


def test_partly_known_output_emits_only_new_tokens_and_logprobs(make_cluster):
    """Outputs may carry several tokens; the client has the first of them already."""
    world = make_cluster(("c", C))
    client = world.ask(a_request("r", PROMPT, max_tokens=3))
    answer = lone_answer(client.request, 0)[0]
    logprobs = tuple(TokenLogprobs(token, -0.5) for token in answer)
    world.hear(Peer("c", 1), Tokens((TokenOutput("r#1", 0, (answer[0],), logprobs[:1]),)))
    world.hear(Peer("c", 1), Tokens((TokenOutput("r#1", 0, tuple(answer), logprobs, FinishReason.LENGTH),)))
    assert client.got[0] == answer and client.outputs[-1].logprobs == logprobs[1:]


def test_outputs_of_old_attempt_are_dropped_and_cancelled(make_cluster):
    """The stalled instance wakes up and goes on as if nothing had happened."""
    world = make_cluster(("a", C), ("b", C), stalled_after_ns=NS_PER_S, dead_after_ns=100 * NS_PER_S)
    client = world.ask(a_request("r", PROMPT))
    stuck = world.instances["a"]
    assert stuck.running
    held = dict(stuck.running)
    world.wait(2 * NS_PER_S)
    assert world.instances["b"].running and not stuck.running
    stuck.running = held
    stuck.step()
    (late,) = stuck.outbox
    stuck.outbox = []
    assert world.sent(world.hear(stuck.peer, late), Cancel) == [("a", Cancel("r#1"))]
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


@pytest.mark.parametrize("wrong", [
    TokenOutput("r#1", 1, (5,)), TokenOutput("r#1", 0, (1,) * 9), TokenOutput("r#1", 0, (), offset=-1),
    TokenOutput("r#1", 0, (), finish_reason=FinishReason.DEADLINE),
], ids=["index", "too many", "offset", "deadline"])  # fmt: skip
def test_impossible_output_fails_the_attempt(make_cluster, wrong):
    """Memory is broken there: nothing more of this attempt is believed."""
    world = make_cluster(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT))
    world.hear(Peer("a", 1), Tokens((wrong,)))
    assert world.instances["b"].running and not world.instances["a"].running
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    assert world.cluster.stats().counters.attempts_failed == {"contradiction": 1}


def test_messages_of_other_instances_about_a_request_are_ignored(make_cluster):
    world = make_cluster(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT))
    world.hear(Peer("b", 1), Tokens((TokenOutput("r#1", 0, (999,)),)))
    world.hear(Peer("b", 1), HandedOver("r#1"))
    world.hear(Peer("b", 1), RequestRefused("r#1", "not mine"))
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


# -- clients


def test_a_cancel_reaches_all_involved(make_cluster):
    world = make_cluster(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT, n=2))
    world.clients["r"].asked_to_end = True
    world.cancel("r")
    assert client.reasons == [FinishReason.CANCELLED] * 2
    assert {name for name, i in world.instances.items() if Cancel("r#1") in i.heard} == {"p", "d"}
    world.cancel("r")  # it may just have ended


def test_called_tool_is_told_to_all_involved(make_cluster):
    world = make_cluster(("p", P), ("d", D))
    world.ask(a_request("r", PROMPT))
    world.post(ToolCalled("r", "shell"))
    assert {name for name, i in world.instances.items() if NoteTool("r#1", "shell") in i.heard} == {"p", "d"}
    world.post(ToolCalled("unknown", "shell"))  # it may just have ended


def test_a_stop_string_ends_one_sequence_at_once(make_cluster):
    world = make_cluster(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT, n=2))
    world.stop("r", 0)  # not before it has said anything
    assert client.reasons == [None, None]
    world.step("p")
    world.stop("r", 0)
    assert client.reasons == [FinishReason.STOP, None]
    assert StopSequence("r#1", 0) in world.instances["d"].heard
    world.stop("r", 1)
    assert client.done and Cancel("r#1") in world.instances["d"].heard


def test_a_deadline_is_kept_by_the_router_itself(make_cluster):
    """The instance hangs; clients are not to wait for it longer than they said."""
    world = make_cluster(("c", C))
    client = world.ask(a_request("r", PROMPT, deadline_ns=3 * NS_PER_S))
    assert world.instances["c"].heard[-1].deadline_in_ns == 3 * NS_PER_S
    assert world.cluster.next_deadline_ns <= 3 * NS_PER_S
    world.wait(3 * NS_PER_S)
    assert client.reasons == [FinishReason.DEADLINE] and Cancel("r#1") in world.instances["c"].heard


def test_clock_running_ahead_ends_no_request(make_cluster):
    """Its virtual machine was moved, and its clock leapt: for the instance the deadline has passed."""
    world = make_cluster(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT, deadline_ns=3 * NS_PER_S))
    early = TokenOutput("r#1", 0, (), finish_reason=FinishReason.DEADLINE)
    world.hear(Peer("a", 1), Tokens((early,)))
    assert world.instances["b"].running and not world.instances["a"].running
    world.run()
    assert (client.got[0], client.reasons[0]) == lone_answer(client.request, 0)
