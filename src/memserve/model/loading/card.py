"""The model's card: what the edge must know about a model that other processes have loaded.

A router tokenizes and renders chats, and computes nothing: it needs neither weights nor torch, which would cost it
seconds and hundreds of megabytes. What only a loaded model can tell comes from the instances, as the card.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from memserve.base.config import DEFAULT_MAX_TOKENS
from memserve.base.errors import UserError
from memserve.base.types import AS_COMPUTED, NO_REGIMES, Pooling, PositionRegimes
from memserve.model.loading.sources import ModelFolder
from memserve.system.imports import remember_model_names

if TYPE_CHECKING:
    from memserve.model.loading.loader import LoadedModel

_PLAIN_TOKENIZER = "TokenizersBackend"
"""The one tokenizer of transformers that does not depend on the model's family."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What an instance sends to the router about its model."""

    name: str
    max_model_tokens: int
    vocab_size: int
    """The model's, not its tokenizer's."""
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    tokenizer_class: str
    """What transformers made of the tokenizer's files."""
    context_note: str = ""
    """Why ``max_model_tokens`` is less than the model's own; empty: it is not."""
    kv_lower_dtype: str = AS_COMPUTED
    """How KV lies in the second tier (:data:`memserve.base.types.KV_DTYPES`)."""
    position_regimes: PositionRegimes = NO_REGIMES
    quantization: str = "none"
    """``auto``: some weights are computed with as they are stored."""
    kv_dtype: str = AS_COMPUTED
    """How KV lies in the first tier."""
    activation_bits: int = 0
    """To how many bits activations are rounded that meet such weights; 0: they meet none."""
    pooling: Pooling | None = None
    """How it embeds. None: it generates."""

    @classmethod
    def of_model(cls, model: LoadedModel) -> ModelCard:
        """The card of a loaded model."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "tokenizer_class"]
        facts = {name: getattr(model, name) for name in names}
        return cls(tokenizer_class=type(model.tokenizer).__name__, **facts)

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> ModelCard:
        """Read what :meth:`encode` wrote. Raises :class:`UserError` for anything else."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            hint = "run the same version of memserve everywhere"
            raise UserError(f"cannot read the model card of an instance: {error}", hint=hint) from error


@dataclass(slots=True)
class Context:
    """What is served of a model's context. It grows when instances join that can take more, alone or together."""

    tokens: int
    note: str = ""
    """Why it is less than the model's own; empty: it is not."""

    def grow_to(self, card: ModelCard) -> None:
        """As ``card`` says, if that is more."""
        if card.max_model_tokens > self.tokens:
            self.tokens, self.note = card.max_model_tokens, card.context_note


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that runs elsewhere, as the API sees it: what it has in common with its card has the same names."""

    name: str
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    context: Context
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float] = dataclasses.field(default_factory=dict)
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS
    kv_lower_dtype: str = AS_COMPUTED
    position_regimes: PositionRegimes = NO_REGIMES
    quantization: str = "none"
    kv_dtype: str = AS_COMPUTED
    activation_bits: int = 0
    pooling: Pooling | None = None

    @property
    def max_model_tokens(self) -> int:
        """The context that is served."""
        return self.context.tokens

    @property
    def context_note(self) -> str:
        """Why that is less than the model's own; empty: it is not."""
        return self.context.note


def remote_model(card: ModelCard, folder: ModelFolder, early: Any = None) -> RemoteModel:
    """The model of ``card`` with the tokenizer from ``folder``, exactly as an instance has loaded it. ``early``: what
    :func:`early_tokenizer` has found there.

    Raises :class:`UserError` when the instances serve another model than the router was told.
    """
    if card.name != folder.name:
        raise UserError(
            f"the instances serve {card.name}, and this router was given {folder.name}",
            hint="start router and instances with the same --model",
            param="model",
        )
    is_plain = card.tokenizer_class == _PLAIN_TOKENIZER
    tokenizer = early if is_plain and early is not None else _load_tokenizer(folder, card.tokenizer_class)
    names = {field.name for field in dataclasses.fields(RemoteModel)} & {
        field.name for field in dataclasses.fields(card)
    }
    facts = {name: getattr(card, name) for name in names}
    return RemoteModel(tokenizer=tokenizer, context=Context(card.max_model_tokens, card.context_note), **facts)


def import_tokenizers() -> None:
    """Import what a tokenizer needs, while the instances load their models."""
    remember_model_names()
    import transformers.tokenization_utils_tokenizers  # noqa: F401  # importing is what takes the time


def early_tokenizer(folder: ModelFolder) -> Any:
    """The tokenizer in ``folder`` if it is of no family, loaded before the instances say whether it is. ``None``: there
    is none to be loaded so; :func:`remote_model` loads another, or says what is wrong."""
    if not (folder.path / "tokenizer.json").is_file():
        return None
    try:
        return _load_plain(folder)
    except UserError:
        return None


def _load_tokenizer(folder: ModelFolder, tokenizer_class: str) -> Any:
    if tokenizer_class == _PLAIN_TOKENIZER:
        return _load_plain(folder)
    from memserve.model.loading.loader import load_tokenizer  # by the model's config, which needs torch

    return load_tokenizer(folder)


def _load_plain(folder: ModelFolder) -> Any:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    from memserve.model.loading.formats.headers import errors_named

    hint = "save the tokenizer beside the weights with tokenizer.save_pretrained(folder)"
    with errors_named(f"{folder.name} has no tokenizer that transformers can load", hint):
        return TokenizersBackend.from_pretrained(folder.path, local_files_only=True)
