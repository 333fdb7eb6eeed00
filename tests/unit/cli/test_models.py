"""What ``--model`` says, once and repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from memserve.base.config import EngineOptions
from memserve.base.deployment import StoreOptions
from memserve.base.errors import UserError
from memserve.base.units import GIB, MIB
from memserve.cli.cluster.models import NamedModel, read_models, slug_of, split_model
from memserve.cli.main import run

NO_COUNTS = (None, None, None)


def read(*texts: str, engine: EngineOptions | None = None, store: StoreOptions | None = None) -> list[NamedModel]:
    return read_models(texts, engine or EngineOptions(), NO_COUNTS, store or StoreOptions())


def test_one_path_has_no_name() -> None:
    (model,) = read("/m/x,y")
    assert (model.name, model.engine.model) == ("", "/m/x,y")
    (default,) = read()
    assert (default.name, default.engine) == ("", EngineOptions())


def test_a_path_with_an_equals_sign_that_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_model("a=b") == ("a", "b")
    (tmp_path / "a=b").mkdir()
    assert split_model("a=b") == ("", "a=b")
    assert split_model("/x=y") == ("", "/x=y")


def test_options_behind_a_name_are_of_that_model_alone() -> None:
    base = EngineOptions(kv_memory_bytes=64 * MIB, threads=2)
    big, small = read(
        "org/big=/m/big,tensor-parallel=2,kv-memory=1GiB,no-cache=true,prefill=1,decode=2,max-model-len=512",
        "small=/m/small.gguf,lora=x=/l/x,lora=y=/l/y,ssd=/d/small=2GiB",
        engine=base,
    )
    assert (big.name, big.engine.model, big.counts) == ("org/big", "/m/big", (1, 2, None))
    assert (big.engine.parallel.tensor, big.engine.kv_memory_bytes, big.engine.caching) == (2, GIB, False)
    assert (big.engine.max_model_tokens, big.engine.threads) == (512, 2)
    assert (small.engine.parallel.tensor, small.engine.kv_memory_bytes, small.engine.caching) == (1, 64 * MIB, True)
    assert small.engine.lora == ("x=/l/x", "y=/l/y") and small.counts == NO_COUNTS
    assert small.store.folders == (("/d/small", 2 * GIB),) and not big.store.is_used
    assert slug_of(big.name) == "org-big"


def test_counts_for_all_hold_where_a_model_has_none() -> None:
    texts = ["a=/a", "b=/b,decode=3"]
    models = read_models(texts, EngineOptions(), (1, 1, None), StoreOptions())
    assert [model.counts for model in models] == [(1, 1, None), (None, 3, None)]


def test_models_share_one_store_in_equal_parts() -> None:
    store = StoreOptions((("/d", 6 * GIB),), 2 * GIB, writes_per_day_bytes=4 * GIB)
    first, second = (model.store for model in read("a/b=/a", "c=/c", store=store))
    assert first.folders == (("/d/a-b", 3 * GIB),) and second.folders == (("/d/c", 3 * GIB),)
    assert first.dram_bytes == second.dram_bytes == GIB and first.writes_per_day_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["/a", "b=/b"], "each of several models needs a name"),
        (["a=/a", "A=/b"], "two models are called"),
        (["a/b=/a", "a-b=/b"], "two models are called"),
        (["a=/a,b", "c=/c"], "cannot read 'b'"),
        (["a=/a,tensor-parallel=two", "c=/c"], "--model a: cannot read tensor_parallel=two"),
        (["a=/a,tensor-paralel=2", "c=/c"], "unknown option 'tensor_paralel'"),
        (["a=/a,model=/b", "c=/c"], "unknown option 'model'"),
        (["a=/a,threads=1,threads=2", "c=/c"], "threads is there twice"),
        (["a=/a,decode=x", "c=/c"], "cannot read decode=x"),
        (["a=/a,decode=65", "c=/c"], "cannot read decode=65"),
        (["a=/a,kv-memory=lots", "c=/c"], "--model a: "),
        (["a=/a,quantization=int3", "c=/c"], "unknown quantization"),
    ],
)
def test_what_cannot_be_read_is_named(texts: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        read(*texts)
    assert caught.value.hint


def test_a_store_for_all_and_one_for_a_model_contradict() -> None:
    with pytest.raises(UserError, match="a store for all models, and stores of single ones"):
        read("a=/a,ssd=/x=1GiB", "b=/b", store=StoreOptions(dram_bytes=GIB))
    with pytest.raises(UserError, match="keeps the KV of one model"):
        read("a=/a", "b=/b", store=StoreOptions(at="h:1"))
    assert [model.store.at for model in read("a=/a,store=h:1", "b=/b,store=h:2")] == ["h:1", "h:2"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--served-model-name", "x"], "models have two kinds of names"),
        (["--on", "ray"], "Ray places instances of one model"),
        (["--in-process"], "the model 'a' needs a router"),
        (["--store", "127.0.0.1:1"], "keeps the KV of one model"),
    ],
)
def test_what_named_models_do_not_go_with(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--model", "a=/a", "--model", "b=/b", "--metadata", "none", "--port", "0", *words]) == 1
    assert complaint in capsys.readouterr().err


def test_further_routers_need_a_model_that_stays_awake(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--model", "a=/a,sleep-after=5", "--model", "b=/b,sleep-after=5"]
    assert run(["serve", *models, "--routers", "2", "--metadata", "none", "--port", "0"]) == 1
    complaint = capsys.readouterr().err
    assert "models that sleep are the first router's alone" in complaint and "sleep-after of one model" in complaint
