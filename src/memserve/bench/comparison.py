"""Our results beside MemServe's, in words (level 4): what agrees, what does not, and why not on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memserve.bench.metrics import Figures
from memserve.bench.paper import DISAGGREGATION, POLICY, Ranking, Step, kind_and_ratio, rankings, steps, value_of
from memserve.bench.results import Compared, Results
from memserve.bench.text import table_row

Pairs = dict[tuple[str, str, str, str], Compared]
"""(workload, before, after, quantity) -> what came of it."""
QUANTITIES = ("ttft mean", "ttft p99", "jct mean", "jct p99", "tpot mean", "tpot p99")
MS = 1e3
SHARED_CORES = """
Why disaggregation is another matter here: prefill and decode instances take the same cores from each other that the
colocated ones had, so decoding is not freed from prefills; only some of the instances compute prompts, each with its
share of the cores; and each prompt's KV is handed over. In the paper every instance has GPUs of its own."""
LEVELS = """
The paper: level 3 below 2 below 1. Level 2 spares the hand-over of what the decode instance has, which on one host is a
copy of memory; level 3 spares the prefill of answers that the decode instance computed."""


ONE_SEED = (
    "There is one seed, so one pass each: what the machine did meanwhile is part of the change, and of no interval."
)
POLICIES = """
The paper: prompt tree below session below least load in P99 TTFT, the more the more sessions share (-59 % for the
prompt tree over session). Here an instance that lacks a prefix may also fetch its KV from one that has it, and does
where that is cheaper than to compute it: the more a policy scatters what is shared, the more is fetched, and the less
the policies differ. What no policy can spare is the first prefill of every document, which is the P99 of few requests.
"""


def beside_the_paper(results: Results) -> Iterator[str]:
    """The section of the report; empty where no two settings stand in the paper."""
    found, orders = list(steps(results)), list(rankings(results))
    if not found and not orders:
        return
    compared = {(one.workload, one.before, one.after, one.name): one for one in results.compared}
    yield "\n## Beside the paper\n"
    yield "Changes from one setting to another; in brackets what MemServe's section 8 reports (Llama2-13B, eight H800:"
    yield "every instance has GPUs of its own; here all instances share the cores named above). In words: the change"
    yield "that the step is for, with its 95 % confidence interval (bootstrap over pairs of equal sessions)."
    if len({one.seed for one in results.passes}) < 2:
        yield ONE_SEED
    yield ""
    if found:
        yield from _changes(found, compared)
    levels = [order for order in orders if order.judged != "ttft p99"]
    policies = [order for order in orders if order.judged == "ttft p99"]
    yield from _turns(levels, compared) if levels else ()
    yield from _policies(policies, compared) if policies else ()


def _changes(found: Sequence[Step], compared: Pairs) -> Iterator[str]:
    yield table_row(["workload", "step", *map(titled, QUANTITIES), "in words"])
    yield table_row(["---"] * (3 + len(QUANTITIES)))
    for step in found:
        cells = []
        for name in QUANTITIES:
            own = f"{step.changes[name]:+.0%}" if name in step.changes else ""
            cells.append(own + (f" ({step.paper[name]:+.1%})" if name in step.paper else ""))
        path = f"{step.name}: {step.before.setting} to {step.after.setting}"
        pair = compared.get((step.workload, step.before.setting, step.after.setting, step.judged))
        yield table_row([step.workload, path, *cells, verdict(step, pair)])
    if any(step.name == DISAGGREGATION for step in found):
        yield SHARED_CORES


def titled(name: str) -> str:
    """``ttft p99`` -> ``TTFT P99``."""
    quantity, statistic = name.split()
    return f"{quantity.upper()} {statistic.replace('p99', 'P99')}"


def verdict(step: Step, pair: Compared | None) -> str:
    """Whether the step does what the paper says, and if not, why not here."""
    if pair is None:
        return "not compared: nobody was answered"
    what = f"{titled(step.judged)} {told(pair)}"
    if not pair.is_told_apart:
        return f"{what}: not told apart from noise; {_why(step)}"
    return f"{what}: falls, as the paper says" if pair.change < 0 else f"{what}: rises; {_why(step)}"


def told(pair: Compared) -> str:
    """``-57 % (-70 % to -41 %)``."""
    if pair.interval is None:
        return f"{pair.change:+.0%}"
    low, high = pair.interval
    return f"{pair.change:+.0%} ({low:+.0%} to {high:+.0%})"


def _why(step: Step) -> str:
    after = step.after.figures
    if step.name == DISAGGREGATION:
        return "see below"
    if step.name == POLICY and kind_and_ratio(step.workload)[1] == 1:
        return "every session is there once, and its own instance has all that there is to find"
    prompt_tokens = after.prompt_tokens / max(1, after.requests - after.failed)
    cached = f"{after.cached_share:.0%} of them cached (before: {step.before.figures.cached_share:.0%})"
    return f"{after.requests} requests, prompts of {prompt_tokens:.0f} tokens in the mean, {cached}"


def in_words(order: Ranking, pair: Compared | None) -> str:
    """Whether an order holds: the settings, best first as the paper has it, and ours."""
    names = ", ".join(found.setting for found in order.members)
    values = ", ".join(f"{MS * value:.0f}" for value in order.values)
    verdict = "the paper's order" if order.holds else "another order"
    if pair is not None:
        verdict += f"; first over last {told(pair)}" + ("" if pair.is_told_apart else ", not told apart from noise")
    return f"{titled(order.judged)} of {names}: {values} ms ({verdict})"


def _pair_of(order: Ranking, compared: Pairs) -> Compared | None:
    return compared.get((order.workload, order.members[-1].setting, order.members[0].setting, order.judged))


def _turns(orders: Sequence[Ranking], compared: Pairs) -> Iterator[str]:
    yield "\n### Caching levels over turns (figure 12)"
    yield LEVELS
    for workload in dict.fromkeys(order.workload for order in orders):
        own = [order for order in orders if order.workload == workload]
        yield f"\n**{workload}**: " + "; ".join(in_words(order, _pair_of(order, compared)) for order in own) + ".\n"
        yield from _over_turns(own[0])


def _over_turns(order: Ranking) -> Iterator[str]:
    turns = sorted({turn for found in order.members for turn in found.turns})
    yield table_row(["setting", *(f"turn {turn + 1}: TTFT, JCT (ms)" for turn in turns)])
    yield table_row(["---"] * (1 + len(turns)))
    for found in order.members:
        yield table_row([found.setting, *(_two(found.turns.get(turn)) for turn in turns)])


def _two(figures: Figures | None) -> str:
    if figures is None or figures.ttft_s is None or figures.jct_s is None:
        return ""
    return f"{MS * figures.ttft_s.mean:.0f}, {MS * figures.jct_s.mean:.0f}"


def _policies(orders: Sequence[Ranking], compared: Pairs) -> Iterator[str]:
    yield "\n### Policies over the share ratio (figure 14)"
    yield POLICIES
    yield table_row(["workload", "setting", "TTFT P99 (ms)", "TTFT mean", "prompt tokens cached", "fetched"])
    yield table_row(["---"] * 6)
    for order in orders:
        for found in order.members:
            figures = found.figures
            times = (f"{MS * (value_of(found, name) or 0):.0f}" for name in ("ttft p99", "ttft mean"))
            yield table_row(
                [order.workload, found.setting, *times, f"{figures.cached_share:.0%}", f"{figures.fetched_share:.0%}"]
            )
    yield ""
    for order in orders:
        yield f"* {order.workload}: {in_words(order, _pair_of(order, compared))}"
