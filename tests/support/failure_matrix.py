"""The failure matrix on real processes: a role, a fault, a phase, a link; what clients see, and what is left behind.

    python tests/support/failure_matrix.py [--roles prefill,decode] [--faults kill,stop] [--phases decoding]
                                           [--links shm] [--pause-s 30] [--sample N --seed S] [--table FILE]
                                           [--geometry llama3 | states] [--kv-dtype int8]

For each role and link a router and healthy instances are started, once; for each case one more instance of that role,
which fails by itself at the chosen moment (``faulty_instance.py``), while a crowd of clients streams. Every answer must
be exactly what one engine alone gives, as transformers does, or one clean error within the deadline; afterwards all
others must live, and no block may be held anywhere. The model is tiny and random, with ``--geometry`` its KV is that of
a real one (``geometries.py``); everything else is what users run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from geometries import GROUPED_SHAPES, SHAPES, TINY, GroupedShape, Shape
from memserve.base.types import KV_DTYPES
from ports import free_port

HERE = Path(__file__).resolve().parent
ROLES = ("prefill", "decode", "colocated", "holder", "fetcher")
"""``holder``: an instance with a prefix that another one fetches; ``fetcher``: the one that does. Both are
colocated."""
FAULTS = ("kill", "stop", "cut", "cut-data", "corrupt", "restart")
"""``cut``: no messages; ``cut-data``: no KV."""
PHASES = ("queued", "prefilling", "asking", "transferring", "decoding", "returning")
"""``asking``: a fetch was asked for and nothing offered yet. ``returning``: PD-Caching-3."""
LINKS = ("shm", "curve", "nixl")
MOMENTS = {
    ("prefill", "queued"): "queued",
    ("prefill", "prefilling"): "prefilling",
    ("prefill", "transferring"): "handing-over",
    ("prefill", "returning"): "coming-home",
    ("decode", "queued"): "queued",
    ("decode", "transferring"): "taking-over",
    ("decode", "decoding"): "decoding",
    ("decode", "returning"): "sending-home",
    ("colocated", "queued"): "queued",
    ("colocated", "prefilling"): "prefilling",
    ("colocated", "decoding"): "decoding",
    ("holder", "asking"): "fetch-heard",
    ("holder", "transferring"): "lending",
    ("fetcher", "asking"): "fetch-asked",
    ("fetcher", "transferring"): "fetching",
}
"""When the fault happens (``faulty_instance.MOMENTS``); there are no other phases that a role is in."""
MOVING = ("transferring", "returning")
PULLING = ("taking-over", "coming-home", "fetching")
"""Moments in which the failing instance itself reads pages."""
DEADLINE_S = 90.0
SETTLE_S = 75.0
ENGINE = ("--prefill-chunk-tokens", "64", "--threads", "1")
KV_TOKENS, DRAM_TOKENS = 680, 1360
"""Of an instance: three or four requests of the crowd fit."""
ROUNDING = 0.1
"""Of a logprob, with KV of codes. What is computed again, in other chunks, has other last bits in float32; one of them
may make another code. A block that is wrong makes another answer: about one token in twenty is so near to the best."""
UNSEEN = (0, 2)
"""Tokens that texts do not show (the unknown one, and the end): none of an answer whose tokens are judged."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    role: str
    fault: str
    phase: str
    link: str = "shm"

    @property
    def moment(self) -> str | None:
        """When the instance fails; ``None``: it is never in this phase."""
        return MOMENTS.get((self.role, self.phase))

    @property
    def possible(self) -> bool:
        """What befalls pages befalls their reader; connections, which shared memory has none of, have two ends. Over
        them there are the cases in which KV moves: the others have nothing to do with the link."""
        if self.moment is None or (self.link != "shm" and self.phase not in MOVING):
            return False
        if self.fault == "corrupt" or (self.fault == "cut-data" and self.link == "shm"):
            return self.moment in PULLING
        return self.fault != "cut-data" or self.phase in MOVING


@dataclass
class Result:
    """What came of a case."""

    case: Case
    right: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    reached: bool = False
    leaks: str = ""
    slowest_s: float = 0.0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing was wrong, late or left behind."""
        return self.reached and not self.wrong and not self.leaks and self.slowest_s <= DEADLINE_S

    def line(self) -> str:
        """For people."""
        verdict = "ok  " if self.good else "MISS"
        what = f"{self.right} right, {len(self.errors)} errors, slowest {self.slowest_s:.1f} s"
        notes = [] if self.reached else ["the fault did not happen"]
        notes += [*self.wrong[:2], *self.errors[:2], self.leaks]
        name = f"{self.case.role:<10} {self.case.fault:<8} {self.case.phase:<13} {self.case.link:<5}"
        return f"{verdict} {name} {what:<38} {self.seconds:6.1f} s  {'; '.join(filter(None, notes))[:300]}"


# -- clients


def draw_request(rng: random.Random, heads: list[list[int]], number: int) -> dict[str, Any]:
    """A streaming completion: with a prefix that others have as well, greedy or drawn in turn."""
    prompt = [*heads[number % len(heads)], *(rng.randrange(3, 131) for _ in range(rng.randrange(1, 60)))]
    body = {"prompt": prompt, "max_tokens": rng.randrange(24, 60), "stream": True, "ignore_eos": True}
    body |= {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": rng.randrange(1 << 30)}
    return body | {"timeout_s": DEADLINE_S, "model": "tiny"}


def greedy_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Streaming completions, all greedy, without the tokens that no answer is to have."""
    rng = random.Random(seed)
    heads = [[rng.randrange(3, 131) for _ in range(96)] for _ in range(3)]
    bias = {"temperature": 0, "logit_bias": dict.fromkeys(map(str, UNSEEN), -100)}
    return [draw_request(rng, heads, number) | bias for number in range(count)]


def ask(url: str, body: dict[str, Any]) -> tuple[str, str, float]:
    """``(text, error, seconds)`` of one streamed completion."""
    started, text, error = time.monotonic(), "", ""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S + 30) as answer:
            if answer.status_code != 200:
                answer.read()
                return "", f"{answer.status_code}: {answer.text[:200]}", time.monotonic() - started
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    error = chunk["error"]["message"]
                for choice in chunk.get("choices", []):
                    text += choice["text"]
    except httpx.HTTPError as problem:
        error = f"{type(problem).__name__}: {problem}"
    return text, error, time.monotonic() - started


class Truth:
    """What one engine alone gives."""

    def __init__(self, model: Path, shape: Shape) -> None:
        from memserve import LLM

        kv = shape.in_dtype("float32")
        options: dict[str, Any] = {"dtype": "float32", "kv_dtype": kv.kv_dtype, "threads": 1}
        self._llm = LLM(str(model), kv_memory=KV_TOKENS * kv.token_bytes, **options)
        self.is_exact = kv.kv_dtype == "auto"

    def draw_asked(self, module: Any, count: int, seed: int) -> list[tuple[dict[str, Any], str]]:
        """``count`` requests, each with its text, which is what transformers gives with ``module``. A request with an
        answer that the rounding of float32 decides is drawn anew: with other rows in a step it may have another."""
        from margins import AnswerCheck
        from memserve import SamplingParams

        rng, check, asked = random.Random(seed), AnswerCheck(module), list[tuple[dict[str, Any], str]]()
        heads = [[rng.randrange(3, 131) for _ in range(96)] for _ in range(3)]
        for _ in range(10 * count):
            body = draw_request(rng, heads, len(asked))
            sampling = SamplingParams(temperature=body["temperature"], seed=body.get("seed", 0))
            [answer] = self._llm.generate([body["prompt"]], sampling, max_tokens=body["max_tokens"], ignore_eos=True)
            tokens = answer.outputs[0].tokens
            verdict = check.judge(body["prompt"], tokens, sampling.temperature, sampling.seed)
            assert verdict.is_right, f"not what transformers gives: {verdict}"
            asked += [(body, answer.text)] if verdict.is_decided else []
            if len(asked) == count:
                return asked
        raise AssertionError(f"rounding decides too many answers: {len(asked)} of {10 * count} are left")

    def texts(self, bodies: list[dict[str, Any]]) -> list[str]:
        """Of each body."""
        from memserve import SamplingParams

        texts = []
        for body in bodies:
            bias = tuple((int(token), float(value)) for token, value in body.get("logit_bias", {}).items())
            sampling = SamplingParams(temperature=body["temperature"], seed=body.get("seed", 0), logit_bias=bias)
            [answer] = self._llm.generate([body["prompt"]], sampling, max_tokens=body["max_tokens"], ignore_eos=True)
            texts.append(answer.outputs[0].text)
        return texts

    def accepts(self, body: dict[str, Any], right: str, text: str) -> bool:
        """Whether ``text`` is the begin of ``right``; or, with KV of codes, each of its tokens the best behind those
        before it, as far as rounding goes."""
        from memserve import SamplingParams

        if right.startswith(text):
            return True
        best_first = SamplingParams(temperature=0, logit_bias=tuple((token, -100.0) for token in UNSEEN), logprobs=20)
        tokens = [int(word[1:]) for word in text.split()]
        done = 0
        while not self.is_exact and done < len(tokens):
            prompt, count = [*body["prompt"], *tokens[:done]], len(tokens) - done
            [answer] = self._llm.generate([prompt], best_first, max_tokens=count, ignore_eos=True)
            best = answer.outputs[0]
            pairs = zip(best.tokens, tokens[done:], strict=True)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            done += same + 1
            if same < count:
                near = dict(best.logprobs[same].top)
                if near.get(tokens[done - 1], -1e9) < max(near.values()) - ROUNDING:
                    return False
        return not self.is_exact

    def close(self) -> None:
        """End the engine."""
        self._llm.close()


# -- processes


class Fleet:
    """A router, healthy instances of some roles, and one more that will fail."""

    def __init__(self, model: Path, shape: Shape, folder: Path, roles: list[str], link: str, truth: Truth) -> None:
        self.model, self.folder, self.link, self.truth = model, folder, link, truth
        lies_apart = shape.family == "gemma2" or (isinstance(shape, GroupedShape) and shape.lies_apart)
        dram_tokens = 0 if lies_apart else DRAM_TOKENS
        self.engine = (*ENGINE, *shape.memory_flags(KV_TOKENS, dram_tokens))
        first = free_port() // 2  # below the ports that servers of tests are given
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if link == "nixl":  # as between hosts; the range tells its connections from those of messages
            self.environment |= {"UCX_TLS": "tcp,self", "UCX_TCP_PORT_RANGE": f"{first}-{first + 199}"}
        self.secret = folder / "secret"
        self.secret.write_text(secrets.token_urlsafe(32))
        self.join = f"127.0.0.1:{free_port()}"
        self.http = free_port()
        self.url = f"http://127.0.0.1:{self.http}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._launch("router", [sys.executable, "-m", "memserve", *self._serve()])
        self.roles = {f"{role}-{number}": role for number, role in enumerate(roles)}
        self.healthy = len(roles)  # with the newcomer, while it is there
        for name, role in self.roles.items():
            self.start(name, role)
        if roles:  # without an instance the router does not know its model, and has no metrics
            self.wait_for(lambda: self.up() == self.healthy, 180, "the healthy instances did not join")

    def _serve(self) -> list[str]:
        port = self.join.rpartition(":")[2]
        counts = ["--prefill", "0", "--decode", "0", "--colocated", "0"]
        cluster = ["--cluster-port", port, "--cluster-secret-file", str(self.secret), "--policy", "least-load"]
        name = ["--served-model-name", "tiny", "--port", str(self.http), "--metadata", "none"]
        return ["serve", "--model", str(self.model), *counts, *cluster, *name, *self.engine]

    def start(self, name: str, role: str, *flags: str, fault: tuple[str, str, int] | None = None) -> None:
        """Start an instance; with ``fault`` = (fault, moment, skip) one that will fail."""
        options = ["--join", self.join, "--cluster-secret-file", str(self.secret), "--role", role, "--name", name]
        options += ["--link", self.link, *flags]
        command = ["instance", *options, "--model", str(self.model), *self.engine]
        launcher = [sys.executable, "-m", "memserve"]
        if fault:
            armed = ["--fault", fault[0], "--moment", fault[1], "--skip", str(fault[2])]
            launcher = [sys.executable, str(HERE / "faulty_instance.py"), *armed, "--"]
        self._launch(name, [*launcher, *command])

    def _launch(self, name: str, command: list[str]) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    def log(self, name: str) -> str:
        """What an instance has written."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """``/metrics``; empty while there are none."""
        try:
            lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        except httpx.HTTPError:
            return {}
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")}

    def up(self) -> int:
        """Members of the cluster."""
        return int(self.metrics().get("memserve_router_instances", 0))

    def left_behind(self) -> str:
        """What is still held although nothing runs; empty: nothing."""
        found = []
        for key, value in self.metrics().items():
            name = key.split("{")[0]
            held = name == "memserve_instance_blocks" and 'state="held"' in key
            busy = name in ("memserve_instance_transfers_open", "memserve_instance_requests")
            if value and (held or busy or name == "memserve_router_requests_live"):
                found.append(f"{key}={value:g}")
        return ", ".join(found) or ("" if self.metrics() else "no metrics")

    def wait_for(self, true: Any, seconds: float, complaint: str) -> None:
        """Poll until ``true()``."""
        until = time.monotonic() + seconds
        while not true():
            if time.monotonic() > until:
                logs = "\n".join(self.log(name)[-800:] for name in self.processes)
                raise TimeoutError(f"{complaint} within {seconds:.0f} s\n{logs}")
            time.sleep(0.1)

    def find_ended(self, names: Iterable[str]) -> dict[str, str]:
        """Those of ``names`` whose processes have ended, with their last words."""
        codes = {name: self.processes[name].poll() for name in names}
        words = {name: (self.log(name).splitlines() or [""])[-1] for name in codes}
        return {name: f"{name} ended ({code}): {words[name]}" for name, code in codes.items() if code is not None}

    def stop(self, name: str) -> None:
        """End one process, whatever state it is in."""
        process = self.processes.pop(name)
        for sig in (signal.SIGCONT, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(sig)
        process.wait()

    def close(self) -> None:
        """End all."""
        for name in list(self.processes):
            self.stop(name)


@contextmanager
def fleet_for(role: str, link: str, model: Path, shape: Shape, truth: Truth) -> Iterator[Fleet]:
    """The healthy ones beside an instance of ``role``. A holder is alone at first: so no other has what it has."""
    beside = {"colocated": ["colocated"], "fetcher": ["colocated"], "holder": []}
    with tempfile.TemporaryDirectory(prefix="memserve-matrix-") as folder:
        fleet = Fleet(model, shape, Path(folder), beside.get(role, ["prefill", "decode"]), link, truth)
        try:
            yield fleet
        finally:
            fleet.close()


# -- one case

NEWCOMER = "newcomer"


def run_case(fleet: Fleet, case: Case, bodies: list[dict[str, Any]], want: list[str], pause_s: float) -> Result:
    """Let the victim join, send the crowd, look what they got and what is left."""
    started, result = time.monotonic(), Result(case)
    victim = f"victim-{case.role}-{case.fault}-{case.phase}"
    lasting = case.fault in ("stop", "cut", "cut-data")
    fault = f"{case.fault}:{pause_s}" if lasting else case.fault.replace("restart", "kill")
    role = "colocated" if case.role in ("holder", "fetcher") else case.role
    flags = ["--max-running", "1"] if case.phase == "queued" else []  # the second request waits
    skip = {"decoding": 6, "prefilling": 1}.get(case.phase, 0)
    fleet.wait_for(lambda: fleet.up() == fleet.healthy, 60, "the end of the last victim was not noticed")
    if case.role == "fetcher":  # what the healthy one has, and the victim has not
        _send_crowd(fleet, bodies, want, result)
    fleet.start(victim, role, *flags, fault=(fault, case.moment or "", skip))
    try:
        fleet.wait_for(lambda: fleet.up() > fleet.healthy, 120, "the victim did not join")
        if case.role == "holder":  # what the victim has, and the newcomer has not
            _send_crowd(fleet, bodies, want, result)
            fleet.start(NEWCOMER, role)
            fleet.healthy += 1
            fleet.wait_for(lambda: fleet.up() > fleet.healthy, 120, "the newcomer did not join")
        nurse = threading.Thread(target=_restart_when_dead, args=(fleet, victim, role), daemon=True)
        if case.fault == "restart":
            nurse.start()
        # The moment may need luck with the placement, or more requests at once on a quick machine.
        for times in (1, 1, 2, 2, 4, 4, 8, 8, 8, 8):
            _send_crowd(fleet, bodies * times, want * times, result)
            result.reached = "fault: " in fleet.log(victim)
            if result.reached or result.wrong:
                break
        if case.fault == "restart":
            nurse.join(60)
        if lasting and result.reached:  # it comes back, and must do no harm
            fleet.wait_for(lambda: "fault over" in fleet.log(victim), pause_s + 60, "it did not wake up")
            fleet.wait_for(lambda: fleet.up() > fleet.healthy, 60, "the victim did not join again")
            _send_crowd(fleet, bodies, want, result)
        fleet.wait_for(lambda: not fleet.left_behind(), SETTLE_S, "not everything was given back")
    except TimeoutError as problem:
        result.leaks = f"{str(problem).splitlines()[0]}: {fleet.left_behind()}"
    finally:
        _leave_healthy(fleet, victim, result)
    result.seconds = time.monotonic() - started
    return result


def _leave_healthy(fleet: Fleet, victim: str, result: Result) -> None:
    """Say what has ended and should not, and leave the fleet to the next case as it was."""
    doomed = [victim] if result.case.fault in ("kill", "restart") else []
    ended = fleet.find_ended([name for name in fleet.processes if name not in doomed])
    result.leaks = "; ".join(filter(None, (*ended.values(), result.leaks)))
    fleet.stop(victim)
    if NEWCOMER in fleet.processes:
        fleet.stop(NEWCOMER)
        fleet.healthy -= 1
    for name, role in fleet.roles.items():
        if name in ended:
            fleet.start(name, role)


def _restart_when_dead(fleet: Fleet, name: str, role: str) -> None:
    process = fleet.processes[name]
    process.wait()
    fleet.start(name, role)


def _send_crowd(fleet: Fleet, bodies: list[dict[str, Any]], want: list[str], result: Result) -> None:
    with ThreadPoolExecutor(len(bodies)) as crowd:
        answers = list(crowd.map(lambda body: ask(fleet.url, body), bodies))
    for number, (body, (text, error, seconds), right) in enumerate(zip(bodies, answers, want, strict=True)):
        result.slowest_s = max(result.slowest_s, seconds)
        if error:
            result.errors.append(f"request {number}: {error}")
            if not fleet.truth.accepts(body, right, text):
                result.wrong.append(f"request {number}: {text[-60:]!r} before its error")
        elif text == right or (len(text.split()) == body["max_tokens"] and fleet.truth.accepts(body, right, text)):
            result.right += 1
        else:
            result.wrong.append(f"request {number}: {text!r} instead of {right!r}")


def all_cases() -> list[Case]:
    """Every cell that can happen."""
    return [case for combo in itertools.product(ROLES, FAULTS, PHASES, LINKS) if (case := Case(*combo)).possible]


def run_matrix(
    cases: list[Case], pause_s: float, clients: int = 10, seed: int = 0, shape: Shape = TINY
) -> Iterator[Result]:
    """Run ``cases``, those of one role and link on one fleet."""
    from slow_costs import save_slow_costs
    from tiny_models import save_folder

    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memserve-tiny-")))
        module = shape.module()
        save_folder(module, model)
        if isinstance(shape, GroupedShape):  # so small that computing would be quicker than most fetches
            os.environ["MEMSERVE_CACHE_DIR"] = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="memserve-costs-")
            )
            save_slow_costs(model, windows_apart=shape.lies_apart)
        truth = Truth(model, shape)
        stack.callback(truth.close)
        if truth.is_exact:
            bodies, want = map(list, zip(*truth.draw_asked(module, clients, seed), strict=True))
        else:
            bodies = greedy_requests(clients, seed)
            want = truth.texts(bodies)
        ordered = sorted(cases, key=lambda case: (ROLES.index(case.role), case.link))
        for (role, link), group in itertools.groupby(ordered, key=lambda case: (case.role, case.link)):
            with fleet_for(role, link, model, shape, truth) as fleet:
                for case in group:
                    yield run_case(fleet, case, bodies, want, pause_s)


def markdown(results: list[Result]) -> str:
    """The table for the docs: the slowest answer of each cell."""
    lines = ["| role | link | fault | " + " | ".join(PHASES) + " |", "| --- " * (3 + len(PHASES)) + "|"]
    found = {(r.case.role, r.case.link, r.case.fault, r.case.phase): r for r in results}
    for role, link, fault in itertools.product(ROLES, LINKS, FAULTS):
        row = [found.get((role, link, fault, phase)) for phase in PHASES]
        if any(row):
            cells = ["-" if r is None else f"{r.slowest_s:.1f} s" if r.good and not r.errors else "MISS" for r in row]
            lines.append("| " + " | ".join([role, link, fault, *cells]) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run the chosen cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--pause-s", type=float, default=8.0, help="how long stop and the cuts last")
    parser.add_argument("--sample", type=int, default=0, help="only so many cells, drawn from --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=10)
    shapes = {**SHAPES, **GROUPED_SHAPES}
    parser.add_argument("--geometry", choices=shapes, help="of the model's KV; without it, tiny")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="how that KV is kept")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    combos = set(itertools.product(*(w.split(",") for w in (args.roles, args.faults, args.phases, args.links))))
    chosen = [case for case in all_cases() if (case.role, case.fault, case.phase, case.link) in combos]
    if args.sample:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    results = []
    shape = (shapes[args.geometry] if args.geometry else TINY).with_codes(args.kv_dtype)
    for result in run_matrix(chosen, args.pause_s, args.clients, args.seed, shape):
        results.append(result)
        print(result.line(), flush=True)
    if args.table:
        args.table.write_text(markdown(results) + "\n")
    bad = sum(not result.good for result in results)
    print(f"{len(results)} cells, {bad} missed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
