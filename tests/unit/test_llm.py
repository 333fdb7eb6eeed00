"""``memserve.LLM`` in the hands of its callers: whatever they give it, an answer or one clear error, and it goes on."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memserve import LLM, SamplingParams, UserError
from memserve.host.engine import Refusal, Rejected
from tiny_models import VOCAB, prompt, save_folder, tiny_module

PROMPT = prompt(20, seed=1).tolist()
CHAT = [{"role": "user", "content": "w1 w2"}]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "llama")


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"kv_memory": "4MiB", "dtype": "float32", "threads": 1, **options})


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        llm.model.tokenizer.chat_template = TEMPLATE
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The same for all tests: none of them may hurt it."""
    before = shared.generate([PROMPT], temperature=0, max_tokens=8)[0].outputs[0].tokens
    steps_failed = shared.stats().instance.steps_failed
    yield shared
    assert shared.generate([PROMPT], temperature=0, max_tokens=8)[0].outputs[0].tokens == before
    assert shared.stats().instance.steps_failed == steps_failed


Misuse = Callable[[LLM], Any]
MISUSES: dict[str, Misuse] = {
    "a dict as sampling": lambda llm: llm.chat(CHAT, {"temperature": 0}),
    "a token id beyond the vocabulary": lambda llm: llm.generate([[99_999_999]]),
    "the first id beyond it": lambda llm: llm.generate([[VOCAB]]),
    "a negative id": lambda llm: llm.generate([[-1]]),
    "ids that are no integers": lambda llm: llm.generate([[1.5, 2]]),
    "a bias for a token that does not exist": lambda llm: llm.generate([PROMPT], logit_bias={VOCAB: 1}),
    "the same in sampling": lambda llm: llm.generate([PROMPT], SamplingParams(logit_bias={VOCAB: 1})),
    "a bias that is no mapping": lambda llm: llm.generate([PROMPT], SamplingParams(logit_bias=5)),
    "a stop token that does not exist": lambda llm: llm.generate([PROMPT], stop_token_ids=[2**31 - 1], min_tokens=2),
    "a negative temperature": lambda llm: llm.generate([PROMPT], temperature=-1),
    "top_p above 1": lambda llm: llm.generate([PROMPT], top_p=7),
    "not a number": lambda llm: llm.generate([PROMPT], temperature=float("nan")),
    "not a number in sampling": lambda llm: llm.generate([PROMPT], SamplingParams(top_p=float("nan"))),
    "an infinite bias": lambda llm: llm.generate([PROMPT], logit_bias={1: float("inf")}),
    "max_tokens 0": lambda llm: llm.generate([PROMPT], max_tokens=0),
    "max_tokens as text": lambda llm: llm.generate([PROMPT], max_tokens="ten"),
    "n of 0": lambda llm: llm.generate([PROMPT], n=0),
    "n of a million": lambda llm: llm.generate([PROMPT], n=1_000_000),
    "an empty stop": lambda llm: llm.generate([PROMPT], stop=""),
    "stops that are no text": lambda llm: llm.generate([PROMPT], stop=[5]),
    "min_tokens beyond max_tokens": lambda llm: llm.generate([PROMPT], min_tokens=9, max_tokens=3),
    "a prompt beyond the context": lambda llm: llm.generate([[1] * 100_000]),
    "an empty prompt": lambda llm: llm.generate([""]),
    "an empty row of ids": lambda llm: llm.generate([[]]),
    "None as a prompt": lambda llm: llm.generate([None]),
    "a number as prompts": lambda llm: llm.generate(5),
    "a mapping as prompts": lambda llm: llm.generate({"a": 1}),
    "a text as messages": lambda llm: llm.chat("hello"),
    "no messages": lambda llm: llm.chat([]),
    "a message without a role": lambda llm: llm.chat([{"content": "w1"}]),
    "an unknown option": lambda llm: llm.generate([PROMPT], temprature=0),
    "an option of HTTP alone": lambda llm: llm.generate([PROMPT], stream=True),
    "an option given twice": lambda llm: llm.generate([PROMPT], SamplingParams(), temperature=0),
    "a tenant that is no text": lambda llm: llm.generate([PROMPT], tenant=5),
    "too many beams": lambda llm: llm.generate([PROMPT], beam_width=10_000),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())
def test_a_misuse_is_one_clear_error(llm: LLM, misuse: Misuse) -> None:
    with pytest.raises(UserError) as caught:
        misuse(llm)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_misspelt_option_is_named(llm: LLM) -> None:
    with pytest.raises(UserError, match="did you mean 'temperature'"):
        llm.generate([PROMPT], temprature=0)
    with pytest.raises(UserError, match="did you mean 'threads'"):
        LLM(thread=1)


def test_invalid_prompt_in_a_batch_computes_nothing(llm: LLM) -> None:
    before = llm.stats().steps
    with pytest.raises(UserError):
        llm.generate([PROMPT, [99_999_999]])
    assert llm.stats().steps == before


def test_keywords_and_sampling_params_say_the_same(llm: LLM) -> None:
    def tokens(*args: Any, **options: Any) -> list[int]:
        return llm.generate([PROMPT], *args, max_tokens=12, ignore_eos=True, **options)[0].outputs[0].tokens

    said = {"temperature": 1.5, "top_k": 40, "seed": 7, "presence_penalty": 0.5}
    from_numpy = {**said, "temperature": np.float64(1.5), "top_k": np.int64(40)}
    assert tokens(**said) == tokens(SamplingParams(**said)) == tokens(**from_numpy)
    assert tokens(**said) != tokens(**said | {"seed": 8})
    assert tokens() == tokens(seed=0), "a call repeats exactly"
    assert tokens(logit_bias={3: 100}) == tokens(SamplingParams(logit_bias=((3, 100.0),))) == [3] * 12
    assert tokens(SamplingParams(logit_bias={3: 100})) == [3] * 12


def test_a_stop_is_one_text_and_not_its_characters(llm: LLM) -> None:
    free = llm.generate([PROMPT], temperature=0, max_tokens=12, ignore_eos=True)[0]
    word = free.text.split()[3]
    stopped = llm.generate([PROMPT], temperature=0, max_tokens=12, ignore_eos=True, stop=word)[0]
    assert stopped.text == free.text[: free.text.index(word)]
    assert stopped.outputs[0].finish_reason == "stop"


def test_prompts_of_every_form(llm: LLM) -> None:
    ids = np.asarray(PROMPT, dtype=np.int64)
    forms = (PROMPT, [PROMPT], ids, [ids], iter([PROMPT]))
    answers = [llm.generate(form, temperature=0)[0].outputs[0].tokens for form in forms]
    assert answers == [answers[0]] * 5
    assert llm.generate([]) == []
    assert len(llm.generate(["w1 w2", "w3"], temperature=0, n=1)) == 2


def test_more_prompts_than_the_queue_holds(folder: Path) -> None:
    """What a full engine refuses waits here: offline, a batch has no other place to wait."""
    with load(folder, max_waiting=4, max_running=2) as llm:
        answers = llm.generate([[1 + at % 50, 2] for at in range(60)], temperature=0, max_tokens=2, ignore_eos=True)
    assert [len(answer.outputs[0].tokens) for answer in answers] == [2] * 60


def test_from_several_threads(llm: LLM) -> None:
    prompts = [prompt(10 + at, seed=at).tolist() for at in range(6)]
    alone = [llm.generate([p], temperature=0, use_cache=False)[0].outputs[0].tokens for p in prompts]
    found: dict[int, list[int]] = {}

    def ask(at: int) -> None:
        for _ in range(3):
            found[at] = llm.generate([prompts[at]], temperature=0)[0].outputs[0].tokens
            with pytest.raises(UserError):
                llm.generate([[VOCAB + at]])

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[at] for at in range(6)] == alone


def test_closed_is_said(folder: Path) -> None:
    with load(folder) as llm:
        engine = weakref.ref(llm._engine)
    llm.close()  # twice
    with pytest.raises(UserError, match="closed"):
        llm.generate([PROMPT])
    with pytest.raises(UserError, match="closed"):
        llm.chat(CHAT)
    with pytest.raises(UserError, match="closed"):
        llm.stats()
    del llm
    gc.collect()
    assert engine() is None, "nothing keeps a closed engine"


def test_an_error_inside_the_block_frees_it(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), load(folder) as llm:
        _ = 1 // 0
    assert llm._engine.closing


def test_unreferenced_llm_is_freed(folder: Path) -> None:
    llm = load(folder)
    engine = llm._engine
    del llm
    gc.collect()
    assert engine.closing


def test_a_call_that_raises_leaves_nothing_running(llm: LLM) -> None:
    def stop_it() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 3, max_tokens=100, ignore_eos=True, on_progress=stop_it)
    llm.generate([PROMPT], max_tokens=1)  # behind the cancellations in the inbox
    assert llm.stats().instance.sequences_running == 0


def test_closing_ends_calls_of_other_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(folder)
    monkeypatch.setattr(
        llm._engine, "submit", lambda request, sink: sink(Rejected(request.request_id, "", 5.0, Refusal.CLOSING))
    )
    with pytest.raises(UserError, match="closed, or its engine broke"):
        llm.generate([PROMPT])
    llm.close()


def test_a_program_that_never_closes_ends_in_silence(folder: Path) -> None:
    """Without ``close`` the interpreter's end once printed thirty lines of leaked instances."""
    program = (
        "from memserve import LLM\n"
        f"llm = LLM({str(folder)!r}, kv_memory='4MiB', dtype='float32', threads=1)\n"
        "print(len(llm.generate([[1, 2, 3]], max_tokens=2)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "nanobind" not in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_only_allowed_tokens_are_drawn_and_named_ones_reported(llm: LLM) -> None:
    sampling = SamplingParams(allowed_token_ids=(5, 7), logprobs=2, logprob_token_ids=(3, 5))
    (completion,) = llm.generate([PROMPT], sampling, max_tokens=8, ignore_eos=True)
    assert set(completion.outputs[0].tokens) <= {5, 7}
