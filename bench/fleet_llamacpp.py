"""An own model and two of llama.cpp's servers behind one ``memserve serve``: whose answers come, and what a kill costs.

    python bench/fleet_llamacpp.py --llama-server PATH [--gguf FILE] [--second openai] [--chats 4] [--turns 4]
                                   [--rounds 20]

PATH is llama.cpp's ``llama-server``; FILE a model for it (default: the bundled one's file). ``--second openai``: the
second server is named as any server of OpenAI's interface. Three passes:

* *answers*: requests of many kinds, whole and streamed, to the router and to a server of the same model directly; what
  differs but for ids, times and what was cached is counted and shown. The own model is asked in between.
* *chats*: of several turns, all at the same time: tokens of prompts that the servers had in their slots.
* *kill*: streams at both servers, one of which is killed (SIGKILL): how these end, and whether later requests fail.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from harness.contenders import llama_server
from harness.flags import options, save, working_folder
from harness.gguf_files import bundled_gguf
from harness.processes import wait_until
from harness.served import serving

Json = dict[str, Any]
TIMEOUT_S = 120.0
SMALL = ("-c", "4096", "-np", "2", "-t", "1")
_VOLATILE = ("id", "item_id", "created", "created_at", "timings", "prompt_tokens_details", "input_tokens_details",
             "completed_at")  # fmt: skip
QUESTION = "Name three rivers."
CHATS = (
    {}, {"max_tokens": 1}, {"stop": ["."]}, {"logprobs": True, "top_logprobs": 2}, {"seed": 7, "temperature": 0.7},
    {"response_format": {"type": "json_object"}}, {"messages": []}, {"messages": "x"}, {"temperature": "hot"},
)  # fmt: skip
COMPLETIONS = (
    {},
    {"prompt": [1, 2, 3, 4]},
    {"prompt": ["a", "b"]},
    {"n": 2, "seed": 3},
    {"logprobs": 2},
    {"prompt": 5},
)
RESPONSES = ({}, {"instructions": "Be short."}, {"input": [{"role": "user", "content": "Hi"}]}, {"input": None})


def requests() -> Iterator[tuple[str, Json]]:
    """Paths and bodies, whole and streamed."""
    chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
    plain = {"prompt": "A river is", "max_tokens": 12, "temperature": 0}
    response = {"input": QUESTION, "max_output_tokens": 12, "temperature": 0}
    kinds = (("/v1/chat/completions", chat, CHATS), ("/v1/completions", plain, COMPLETIONS))
    for path, base, variants in (*kinds, ("/v1/responses", response, RESPONSES)):
        for variant in variants:
            for stream in (False, True):
                yield path, {"model": "lc", **base, **variant, "stream": stream}


def settled(value: Any) -> Any:
    """Without what two equal answers differ in."""
    if isinstance(value, dict):
        return {name: settled(part) for name, part in value.items() if name not in _VOLATILE}
    return [settled(part) for part in value] if isinstance(value, list) else value


def read(url: str, path: str, body: Json) -> tuple[int, list[Any]]:
    """Status, and the answer's JSON, or that of its events."""
    answer = httpx.post(url + path, json=body, timeout=TIMEOUT_S)
    texts = (
        re.findall(r"^data: (.+)$", answer.text, re.M)
        if body["stream"] and answer.status_code == 200
        else [answer.text]
    )
    return answer.status_code, [text if text == "[DONE]" else settled(json.loads(text)) for text in texts]


def compare(router: str, server: str) -> Json:
    """The pass of the answers."""
    counts = {"requests": 0, "equal": 0, "own": 0}
    for path, body in requests():
        counts["requests"] += 1
        relayed, direct = read(router, path, body), read(server, path, body)
        counts["equal"] += relayed == direct
        if relayed != direct:
            print(f"differs: {path} {json.dumps(body)}\n  relayed {str(relayed)[:400]}\n  direct  {str(direct)[:400]}")
        own = httpx.post(
            f"{router}/v1/completions", json={"model": "own", "prompt": "A", "max_tokens": 1}, timeout=TIMEOUT_S
        )
        counts["own"] += own.status_code == 200 and own.json()["model"] == "own"
    return counts


def chat(router: str, number: int, turns: int) -> tuple[int, int]:
    """Tokens of prompts behind the first turn, and how many of them were cached."""
    messages = [{"role": "user", "content": f"Chat {number}. " + "Tell me about a river. " * 12}]
    prompt_tokens = cached_tokens = 0
    for turn in range(turns):
        body = {"model": "lc", "messages": messages, "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{router}/v1/chat/completions", json=body, timeout=TIMEOUT_S).raise_for_status().json()
        if turn:
            prompt_tokens += answer["usage"]["prompt_tokens"]
            cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "And another one?"}]
    return prompt_tokens, cached_tokens


def stream_end(router: str) -> str:
    """``whole``, ``error event`` or ``broken``, of one long stream."""
    body = {"model": "lc", "prompt": "Rivers:", "max_tokens": 200, "stream": True, "ignore_eos": True}
    try:
        text = httpx.post(f"{router}/v1/completions", json=body, timeout=TIMEOUT_S).text
    except httpx.HTTPError:
        return "broken"
    is_done = text.rstrip().endswith("data: [DONE]")
    return "broken" if not is_done else "error event" if '"error"' in text else "whole"


def kill_one(router: str, victim: Any, rounds: int) -> Json:
    """The pass of the kill."""
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream_end, router) for _ in range(4)]
        time.sleep(2.0)
        victim.kill()
        failed = 0
        for _ in range(rounds):
            body = {"model": "lc", "prompt": "A", "max_tokens": 2}
            failed += httpx.post(f"{router}/v1/completions", json=body, timeout=TIMEOUT_S).status_code != 200
        ends = [stream.result() for stream in streams]
    return {"streams": {end: ends.count(end) for end in sorted(set(ends))}, "later": rounds, "failed": failed}


def main() -> None:
    chats = {"chats": (4, "at the same time"), "turns": (4, "of each"), "rounds": (20, "requests behind the kill")}
    second_kind = ("llamacpp", "how the second server is named", ("llamacpp", "openai"))
    more = {"gguf": ("", "a model for it"), "second": second_kind, "folder": Path}
    arguments = options(__doc__, llama_server="", **more, **chats)
    gguf = arguments.gguf or bundled_gguf()
    with working_folder(arguments.folder) as folder, ExitStack() as stack:
        (first, child), (second, _) = (
            stack.enter_context(llama_server(arguments.llama_server, gguf, folder, *SMALL, *flags))
            for flags in (["--metrics"], [])
        )
        (alone, _) = stack.enter_context(llama_server(arguments.llama_server, gguf, folder, *SMALL))
        words = ["--model", "own=smollm2-135m-instruct,threads=1,colocated=1", "--metadata", "none"]
        base = "/v1" if arguments.second == "openai" else ""
        engines = ["--engine", f"llamacpp={first}", "--engine", f"{arguments.second}={second}{base}"]
        served = stack.enter_context(serving(*words, *engines))
        wait_until(lambda: len(httpx.get(f"{served.url}/v1/models").json()["data"]) == 2, "both models are listed")
        record: Json = {"answers": compare(served.url, alone)}
        with ThreadPoolExecutor(arguments.chats) as pool:
            pairs = list(pool.map(lambda number: chat(served.url, number, arguments.turns), range(arguments.chats)))
        record["chats"] = {"prompt_tokens": sum(pair[0] for pair in pairs), "cached": sum(pair[1] for pair in pairs)}
        record["kill"] = kill_one(served.url, child, arguments.rounds)
    for name, fields in record.items():
        print(name, json.dumps(fields))
    save(arguments, record)


if __name__ == "__main__":
    sys.exit(main())
