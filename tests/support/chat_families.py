"""Chat templates and tokenizers of five families, as small as they can be: each cuts texts, joins pieces and strips
messages in its own way."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_WORDS = ["Ġthe", "Ġof", "Ġa", "Ġand", "the", "ing", "user", "assistant", "<|", "|>", "im", "end", "Ġ<", "ĊĊ", "Ġ["]
_SPM_WORDS = ["▁the", "▁of", "▁a", "▁and", "the", "ing", "user", "model", "end", "▁▁"]

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|eot_id|>"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<end_of_turn>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS] {{ c.function | tojson }}{% endfor %}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
_PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _byte_level(controls: list[str], marks: list[str]) -> Tokenizer:
    """BPE over bytes; ``marks`` are added, but no special tokens."""
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = _merges(_WORDS, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in controls])
    tokenizer.add_tokens([AddedToken(content, special=False, normalized=False) for content in marks])
    return tokenizer


def _sentencepiece(controls: list[str], *, prepends: bool, strips: bool) -> Tokenizer:
    """BPE over characters with bytes behind them, as SentencePiece has it: the vocabulary has the control tokens, too.
    ``strips``: they take the spaces before and behind them."""
    vocab = {piece: number for number, piece in enumerate(["<unk>", *controls])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    for char in [*map(chr, range(33, 127)), "▁"]:
        vocab.setdefault(char, len(vocab))
    merges = _merges(_SPM_WORDS, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepends else spaces
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [AddedToken(content, special=True, normalized=False, lstrip=strips, rstrip=strips) for content in controls]
    )
    return tokenizer


def _merges(words: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for word in words:
        for end in range(1, len(word)):
            if word[: end + 1] not in vocab:
                merges.append((word[:end], word[end]))
                vocab[word[: end + 1]] = len(vocab)
    return merges


def _family(make: Callable[[], Tokenizer], template: str, bos: str | None, eos: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


_LLAMA3_CONTROLS = [
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>",
]  # fmt: skip
_MISTRAL_CONTROLS = [
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
]  # fmt: skip
_PHI_CONTROLS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|end|>", "<|endoftext|>"]

FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "chatml": lambda: _family(
        lambda: _byte_level(["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"]), _CHATML, None,
        "<|im_end|>",
    ),
    "llama3": lambda: _family(
        lambda: _byte_level(_LLAMA3_CONTROLS, []), _LLAMA3, "<|begin_of_text|>", "<|eot_id|>",
    ),
    "gemma": lambda: _family(
        lambda: _sentencepiece(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], prepends=False, strips=False),
        _GEMMA, "<bos>", "<end_of_turn>",
    ),
    "mistral": lambda: _family(
        lambda: _sentencepiece(_MISTRAL_CONTROLS, prepends=True, strips=False), _MISTRAL, "<s>", "</s>",
    ),
    "phi": lambda: _family(lambda: _sentencepiece(_PHI_CONTROLS, prepends=False, strips=True), _PHI, None, "<|end|>"),
}  # fmt: skip
