"""kill -9 of real processes in the middle of writes, again and again, and what is there afterwards.

    python tests/support/store_kills.py [--rounds 100] [--seed 0]

One ``memserve serve`` with a small model, asked new prompts all the time, and a ``memserve store`` that joins it. In
each round the store lists what is on its disk, a moment later the kill comes, and what was killed starts again:

=============  ====================================================================================================
store          the store alone is killed; the next one finds its shared memory
store-memory   the store alone, and its shared memory is gone, too: the disk has what there is
everything     router, instance and store, and the shared memory; then ``memserve serve`` with the same options
=============  ====================================================================================================

After each: at least 99 % of the blocks that the disk had are found, ``verify`` finds nothing damaged, and prompts of
this and of earlier rounds get the tokens that an engine without a cache gives. While only the store is killed no
request fails.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from memserve import LLM, StoreClient
from memserve.base.errors import StoreUnavailable
from memserve.base.types import SamplingParams
from ports import free_port
from served_cluster import Server, eventually, is_alive, unlink_store_memory
from tiny_models import VOCAB, save_folder

KINDS = ("store", "store-memory", "everything")
TURNS = ("store", "store-memory", "everything", "store-memory", "store")
"""How often each kind comes: a start of everything takes seconds."""
STORE = "kills"
BLOCK_TOKENS, CONTEXT_TOKENS, ANSWER_TOKENS = 16, 512, 8
FOUND_SHARE_MIN = 0.99
ON_DISK = 2
WAIT_S = 120.0
TIE = 1e-4
"""Two tokens whose log probabilities differ by less are a tie: which one comes depends on how sums are rounded, so on
which other tokens were computed in the same step."""


def small_model(folder: Path) -> Path:
    """Large enough that to read a prompt's KV is quicker than to compute it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT_TOKENS, eos_token_id=2, bos_token_id=1,
        pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return save_folder(module.train(False), folder)


Truth = Callable[[tuple[int, ...]], str]
Top = Callable[[list[int]], dict[int, float]]
"""The most probable next tokens, with their log probabilities."""


@dataclass
class Round:
    """What came of one kill."""

    kind: str
    before: int
    """Blocks on the disk."""
    found: int
    answers: int = 0
    cached: int = 0
    """Tokens of the prompts that were asked again."""
    from_store: int = 0
    failed_fetches: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.wrong and self.found >= FOUND_SHARE_MIN * self.before

    def line(self) -> str:
        verdict = "ok  " if self.good else "MISS"
        what = f"{self.found} of {self.before} blocks found, {self.answers} answers, {self.cached} tokens cached"
        what += f", {self.from_store} of them out of the store"
        what += f", {self.failed_fetches} fetches in vain"
        return f"{verdict} {self.kind:<13} {self.seconds:5.1f} s  {what}  {'; '.join([*self.wrong, *self.ties][:3])}"


class Killed:
    """The server, and what is asked of it."""

    def __init__(self, model: Path, home: Path, truth: Truth, top: Top, seed: int) -> None:
        self._model, self._home, self._truth, self._top = model, home, truth, top
        self._random = random.Random(seed)
        self._codecs = itertools.cycle(("always", "none", "auto"))
        """Of each start: values of all kinds lie on the disk."""
        self._ports = free_port(), free_port()
        self._secret = home / "secret"
        self._secret.write_text(secrets.token_hex(16))
        self._secret.chmod(0o600)
        self._pids: set[int] = set()
        self._before: set[bytes] = set()
        self._asked: list[tuple[int, ...]] = []
        self.server = self._start()
        self.store = self._start_store()
        self._back()

    def _start(self) -> Server:
        flags = ["--kv-memory", "2MiB", "--block-tokens", str(BLOCK_TOKENS), "--colocated", "1", "--metadata", "none"]
        flags += ["--cluster-port", str(self._ports[0]), "--cluster-secret-file", str(self._secret)]
        server = Server(self._model, *flags)
        self._pids = {server.process.pid, *server.children().values()}
        return server

    def _start_store(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "memserve", "store", "--join", f"127.0.0.1:{self._ports[0]}", "--name", STORE]
        command += ["--listen", f"127.0.0.1:{self._ports[1]}", "--cluster-secret-file", str(self._secret)]
        command += ["--ssd", f"{self._home}/ssd=768MiB", "--dram", "4MiB", "--ssd-sync", "segment", "--drain-s", "0"]
        command += ["--kv-codec", next(self._codecs)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def client(self) -> StoreClient:
        address = f"127.0.0.1:{self._ports[1]}"
        return StoreClient(address, "default", self._secret, timeout_s=WAIT_S, staging_bytes=1)

    def on_disk(self) -> set[bytes]:
        """Keys of all blocks whose writing has ended."""
        with self.client() as client:
            return {entry.key for entry in client.entries(everything=True) if entry.where & ON_DISK}

    def ask(self, tokens: tuple[int, ...]) -> tuple[str, int]:
        """Text, and tokens that were cached."""
        body = {"model": "tiny", "prompt": list(tokens), "max_tokens": ANSWER_TOKENS, "temperature": 0}
        answer = httpx.post(f"{self.server.url}/completions", json=body | {"ignore_eos": True}, timeout=WAIT_S)
        answer.raise_for_status()
        usage = answer.json()["usage"]
        return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]

    def prompt(self) -> tuple[int, ...]:
        length = self._random.randrange(200, CONTEXT_TOKENS - ANSWER_TOKENS)
        return tuple(self._random.randrange(3, VOCAB) for _ in range(length))

    def round(self, kind: str) -> Round:
        """One kill, and what follows."""
        begin = time.monotonic()
        prompts = [self.prompt() for _ in range(8)]
        texts, errors = self._killed_while(prompts, kind)
        done = Round(kind, 0, 0)
        if kind != "everything":
            done.wrong += errors  # no request fails where only the store dies
        for tokens, text in texts.items():
            self._check(done, tokens, text)
        self._asked += prompts
        after = self._back()
        done.before, done.found = len(self._before), len(self._before & after)
        again = [*prompts[-3:], *self._random.sample(self._asked, min(3, len(self._asked)))]
        before = [self.server.counter(name) for name in ("store_tokens", "store_fetches_failed")]
        for tokens in again:
            text, cached = self.ask(tokens)
            self._check(done, tokens, text)
            done.cached += cached
        done.from_store = self.server.counter("store_tokens") - before[0]
        done.failed_fetches = self.server.counter("store_fetches_failed") - before[1]
        self._verify(done)
        done.seconds = time.monotonic() - begin
        return done

    def _killed_while(self, prompts: list[tuple[int, ...]], kind: str) -> tuple[dict[tuple[int, ...], str], list[str]]:
        """The answers to ``prompts``, and errors, while the kill comes."""
        texts: dict[tuple[int, ...], str] = {}
        errors: list[str] = []

        def load() -> None:
            for tokens in prompts:
                try:
                    texts[tokens] = self.ask(tokens)[0]
                except httpx.HTTPError as error:
                    errors.append(f"a request failed: {error!r}")
                    if kind == "everything":
                        return

        thread = threading.Thread(target=load)
        thread.start()
        time.sleep(self._random.uniform(0.0, 0.4))
        self._before = self.on_disk()
        time.sleep(self._random.uniform(0.0, 0.2))
        self._kill(kind)
        self.store = self._start_store()  # at once: the router may not even notice
        thread.join(WAIT_S)
        if kind == "everything":
            self.server = self._start()
        return texts, errors

    def _kill(self, kind: str) -> None:
        if kind != "store":
            unlink_store_memory(self.store.pid)
        self.store.kill()
        if kind == "everything":
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
            self.server.process.wait(WAIT_S)
            eventually(lambda: not any(is_alive(pid) for pid in self._pids))
        self.store.wait(WAIT_S)

    def _back(self) -> set[bytes]:
        """Wait for the next store, and that the router knows what it has; keys on its disk."""
        end = time.monotonic() + WAIT_S
        while True:
            try:
                found = self.on_disk()
                break
            except StoreUnavailable:
                assert time.monotonic() < end, "the store never came back"
        known = re.compile(r"^memserve_store_tree_blocks{.*} (.+)$", re.M)
        eventually(lambda: sum(map(float, known.findall(self._metrics()))) >= len(found))
        eventually(lambda: re.search(r"^memserve_store_up{.*} 1.0$", self._metrics(), re.M))
        return found

    def _metrics(self) -> str:
        return httpx.get(self.server.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text

    def _check(self, done: Round, tokens: tuple[int, ...], text: str) -> None:
        done.answers += 1
        expected = self._truth(tokens)
        if text == expected:
            return
        gap = self._gap(tokens, text, expected)
        what = (
            f"another answer to {len(tokens)} tokens: {text!r}, not {expected!r}; the model saw {gap:.1g} between them"
        )
        (done.ties if gap < TIE else done.wrong).append(what)

    def _gap(self, tokens: tuple[int, ...], text: str, expected: str) -> float:
        """Between the log probabilities of the two tokens at the first place where the answers differ."""
        got, wanted = ([int(word[1:]) for word in some.split()] for some in (text, expected))
        at = next((at for at, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return float("inf")
        top = self._top([*tokens, *wanted[:at]])
        return abs(top[wanted[at]] - top[got[at]]) if got[at] in top and wanted[at] in top else float("inf")

    def _verify(self, done: Round) -> None:
        with self.client() as client:
            numbers: dict[str, Any] = client.verify()
            while numbers.get("verify_running", 0):
                time.sleep(0.02)
                numbers = client.verify(start=False)
        if numbers.get("verify_damaged", 0) or numbers.get("verify_unread", 0):
            done.wrong.append(f"verify: {numbers}")

    def end(self) -> None:
        """Stop in good order."""
        try:
            for process in (self.store, self.server.process):
                process.terminate()
                process.wait(WAIT_S)
        finally:
            for pid in (self.store.pid, *self._pids):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
            for path in Path("/dev/shm").glob(f"memserve-store-{STORE}-*"):
                path.unlink(missing_ok=True)


def run_kills(rounds: int, seed: int, say: Callable[[str], None] = lambda _: None) -> list[Round]:
    """``rounds`` kills in one folder."""
    done = []
    with tempfile.TemporaryDirectory(prefix="memserve-store-kills-") as name:
        model = small_model(Path(name) / "tiny")
        known: dict[tuple[int, ...], str] = {}
        with LLM(str(model), dtype="float32", kv_memory="4MiB", threads=1, enable_prefix_caching=False) as llm:
            greedy = SamplingParams(temperature=0)

            def truth(tokens: tuple[int, ...]) -> str:
                if tokens not in known:
                    answer = llm.generate([list(tokens)], greedy, max_tokens=ANSWER_TOKENS, ignore_eos=True)
                    known[tokens] = answer[0].text
                return known[tokens]

            def top(tokens: list[int]) -> dict[int, float]:
                [answer] = llm.generate([tokens], SamplingParams(temperature=0, logprobs=5), max_tokens=1)
                return dict(answer.outputs[0].logprobs[0].top)

            killed = Killed(model, Path(name), truth, top, seed)
            try:
                for number in range(rounds):
                    done.append(killed.round(TURNS[(number + seed) % len(TURNS)]))
                    say(f"{number + 1:4} {done[-1].line()}")
            finally:
                killed.end()
    return done


def main() -> int:
    """Kill, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    done = run_kills(arguments.rounds, arguments.seed, lambda line: print(line, flush=True))
    kinds = Counter(one.kind for one in done)
    before, found = sum(one.before for one in done), sum(one.found for one in done)
    print(f"{len(done)} kills ({', '.join(f'{count} {kind}' for kind, count in kinds.items())}): ", end="")
    print(f"{found:,} of {before:,} blocks found, {sum(one.answers for one in done):,} answers compared, ", end="")
    print(f"{sum(one.from_store for one in done):,} tokens out of the store; ", end="")
    print(f"{sum(len(one.ties) for one in done)} answers differ by a tie; ", end="")
    print(f"a round took {statistics.median(one.seconds for one in done):.1f} s in the middle")
    bad = sum(not one.good for one in done)
    print("all good" if not bad else f"{bad} rounds are not good")
    return bad > 0


if __name__ == "__main__":
    raise SystemExit(main())
