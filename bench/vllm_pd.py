"""One vLLM computes prompts, another one answers, through a store, behind ``memserve serve``: chats of several turns.

    python bench/vllm_pd.py --vllm PYTHON [--data FOLDER] [--chats 12] [--turns 4] [--tokens 48]

PYTHON can import vllm (its CPU build: ``docs/guides/VLLM.md``); memserve is this checkout's. Every answer, greedy in
float32, is compared token by token with one server's without a connector; one that differs where the reference's two
best tokens are less than ``TIE`` apart counts as a tie. Passes:

* *computed elsewhere*: every prompt is computed by the one and answered by the other. Before each turn the first one's
  own cache is emptied: what it does not compute it has from the store, the other one's answers of earlier turns too.
* *killed*: as many other chats, and in the middle the first one is killed (SIGKILL): no request may be lost.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from chats import Session, chat_sessions
from vllm_servers import TIE, Answer, Vllm, cached_of, gap, recorded, running, streamed

from ports import free_port
from served_store import ServedStore

BLOCK = 32
Key = tuple[str, int]
"""A chat, and a turn of it."""


def ask(url: str, messages: list[dict[str, str]], tokens: int) -> tuple[Answer, str, int]:
    """One turn, greedy, streamed: what came, its text, and the prompt's tokens."""
    body = {
        "model": "x", "messages": messages, "max_tokens": tokens, "temperature": 0, "logprobs": True, "stream": True,
        "top_logprobs": 2, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    found, begin, text, prompt_tokens = Answer([], [], 0, 0.0, 0.0), time.perf_counter(), "", 0
    for part in streamed(f"{url}/v1/chat/completions", body):
        for choice in part["choices"]:
            text += choice["delta"].get("content") or ""
            found.tokens += choice.get("token_ids") or []
            found.first_s = found.first_s or (time.perf_counter() - begin if found.tokens else 0.0)
            for one in (choice.get("logprobs") or {}).get("content") or []:
                found.gaps.append(gap([top["logprob"] for top in one["top_logprobs"]]))
        if usage := part.get("usage"):
            prompt_tokens, found.cached = usage["prompt_tokens"], cached_of(usage)
            if usage["completion_tokens"] != len(found.tokens):
                raise RuntimeError(f"{usage} for {len(found.tokens)} tokens")
    found.total_s = time.perf_counter() - begin
    return found, text, prompt_tokens


class Chats:
    """The turns, and what the reference answered."""

    def __init__(self, sessions: list[Session], tokens: int) -> None:
        self.sessions, self.tokens = sessions, tokens
        self.right: dict[Key, Answer] = {}
        self.prompt_tokens: dict[Key, int] = {}
        self.messages: dict[Key, list[dict[str, str]]] = {}

    def answer_all(self, alone: Vllm) -> None:
        """By the reference, chat by chat; its answers are the histories of all passes."""

        def one(session: Session) -> None:
            while not session.done:
                key = session.name, len(session.answers)
                self.messages[key] = session.messages()
                answer, text, prompt_tokens = ask(alone.url, self.messages[key], self.tokens)
                self.right[key], self.prompt_tokens[key] = answer, prompt_tokens
                session.answers.append(text)

        with ThreadPoolExecutor(4) as asking:
            list(asking.map(one, self.sessions))

    def compare(self, url: str, keys: list[Key], counts: Counter[str]) -> None:
        """Ask these turns, four at a time."""

        def one(key: Key) -> None:
            expected = self.right[key]
            answer, _, prompt_tokens = ask(url, self.messages[key], self.tokens)
            pairs = zip(answer.tokens, expected.tokens, strict=False)
            at = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
            is_whole = at is None and len(answer.tokens) == len(expected.tokens)
            is_tie = at is not None and expected.gaps[at] < TIE
            counts["equal" if is_whole else "ties" if is_tie else "WRONG"] += 1
            counts["usage WRONG"] += prompt_tokens != self.prompt_tokens[key]
            before = self.prompt_tokens.get((key[0], key[1] - 1), 0)
            if before and answer.cached > (before + BLOCK - 1) // BLOCK * BLOCK:
                counts["turns that began with blocks of the last answer"] += 1
            counts["tokens said to be cached"] += answer.cached
            if not (is_whole or is_tie):
                print(f"  WRONG: {key} at token {at}: {answer.tokens} for {expected.tokens}")

        with ThreadPoolExecutor(4) as asking:
            list(asking.map(one, keys))


@contextmanager
def router(engines: list[str], log: Path) -> Iterator[str]:
    """``memserve serve --engine`` on a free port, every prompt of a block or more computed elsewhere; its address."""
    flags = [word for engine in engines for word in ("--engine", engine)]
    command = [sys.executable, "-m", "memserve", "serve", "--port", "0", "--engine-prefill-tokens", "32", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("ab"), text=True)
    try:
        assert process.stdout is not None
        ready = re.search(r"(http://[\d.:]+)/v1", process.stdout.readline())
        assert ready is not None, log.read_text()
        yield ready[1]
    finally:
        process.terminate()
        process.wait(30)


def seen(server: Vllm) -> Counter[str]:
    """What a server has done so far, in prompt tokens."""
    names = {
        "of its own cache": "prefix_cache_hits_total",
        "from the store": "external_prefix_cache_hits_total",
        "asked for": "prompt_tokens_total",
    }
    return Counter({name: server.metric(metric) for name, metric in names.items()})


def show(name: str, server: Vllm, before: Counter[str]) -> dict[str, int]:
    """What it has done since."""
    done = {key: value - before[key] for key, value in seen(server).items()}
    done["computed"] = done["asked for"] - done["of its own cache"] - done["from the store"]
    print(f"  {name}: " + ", ".join(f"{value} {key}" for key, value in done.items()), flush=True)
    return done


def prefills(url: str) -> int:
    """Prompts that were computed for another server, as the router counts."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("memserve_fleet_prefills_total")))


def elsewhere(chats: Chats, url: str, first: Vllm, second: Vllm) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    before = seen(first), seen(second)
    for turn in range(max(number for _, number in chats.right) + 1):
        first.forget()
        chats.compare(url, [key for key in chats.right if key[1] == turn], counts)
    print(f"computed elsewhere: {dict(counts)}; {prefills(url)} prompts computed for the other server")
    of_first, of_second = show("prompt tokens, the first", first, before[0]), show("the second", second, before[1])
    return {**counts, "prefill": of_first, "decode": of_second, "prefills": prefills(url)}


def killed(chats: Chats, url: str, first: Vllm, second: Vllm) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    before, earlier = seen(second), prefills(url)

    def kill() -> None:
        while counts["equal"] + counts["ties"] + counts["WRONG"] < len(chats.right) // 2:
            time.sleep(0.05)
        first.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    chats.compare(url, list(chats.right), counts)
    killer.join()
    print(f"killed: {dict(counts)}; {prefills(url) - earlier} prompts computed by the first before its end")
    return {**counts, "decode": show("prompt tokens, the second", second, before)}


def measure(options: Namespace, folder: Path) -> dict[str, Any]:
    found = chat_sessions(options.data, 2 * options.chats, options.turns, options.system_chars)
    passes = [Chats(found[at::2], options.tokens) for at in (0, 1)]
    alone = Vllm(options.vllm, options.model, cpus="0-3", log=folder / "alone.log")
    with running(alone):
        for chats in passes:
            chats.answer_all(alone)
            lengths = sorted(chats.prompt_tokens.values())
            print(f"{len(chats.right)} prompts of {lengths[0]} to {lengths[-1]} tokens, {options.tokens} new ones each")
    with ServedStore(folder, dram="2GiB") as store:
        servers, engines = [], []
        for role, cpus in (("prefill", "0-1"), ("decode", "2-3")):
            events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
            flags = ("--max-model-len", "2048", "--kv-events-config", json.dumps(told))
            log = folder / f"{role}.log"
            servers.append(Vllm(options.vllm, options.model, store.address, str(store.secret_file), cpus, flags, log))
            engines.append(f"{{}},events={events},replay={replay},role={role}")
        with running(*servers):
            named = [text.format(f"vllm={server.url}") for text, server in zip(engines, servers, strict=True)]
            with router(named, folder / "router.log") as url:
                record = {"computed elsewhere": elsewhere(passes[0], url, *servers)}
                return {**record, "killed": killed(passes[1], url, *servers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of prompts, as lossless.py has it")
    for name, default in (("chats", 12), ("turns", 4), ("tokens", 48), ("system-chars", 1200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    record = recorded(parser, measure)
    if any("WRONG" in name and count for found in record.values() for name, count in found.items()):
        raise SystemExit("a wrong answer")


if __name__ == "__main__":
    main()
