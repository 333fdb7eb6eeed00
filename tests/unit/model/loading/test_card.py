"""What a router makes of a model card, with a tokenizer that it has loaded before the card came."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from memserve.base.errors import UserError
from memserve.model.loading.card import ModelCard, early_tokenizer, remote_model
from memserve.model.loading.sources import ModelFolder
from tiny_models import save_folder, tiny_module

CARD = ModelCard("tiny", 64, 100, (2,), {}, "TokenizersBackend")


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return ModelFolder(save_folder(tiny_module("llama"), tmp_path / "tiny"), "tiny")


def test_early_tokenizer_equals_the_models(folder: ModelFolder) -> None:
    early = early_tokenizer(folder)
    late = remote_model(CARD, folder).tokenizer
    assert remote_model(CARD, folder, early).tokenizer is early
    assert type(early) is type(late) and early.encode("w5 w7") == late.encode("w5 w7")


def test_a_familys_own_tokenizer_replaces_the_early_one(folder: ModelFolder) -> None:
    early = early_tokenizer(folder)
    own = remote_model(dataclasses.replace(CARD, tokenizer_class="LlamaTokenizer"), folder, early).tokenizer
    assert own is not early and own.encode("w5") == early.encode("w5")


def test_missing_or_damaged_tokenizer_is_refused_on_use(folder: ModelFolder) -> None:
    (folder.path / "tokenizer.json").write_text("{")
    assert early_tokenizer(folder) is None
    with pytest.raises(UserError, match="no tokenizer that transformers can load"):
        remote_model(CARD, folder, None)
    (folder.path / "tokenizer.json").unlink()
    assert early_tokenizer(folder) is None
