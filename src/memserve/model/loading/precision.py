"""How finely activations are rounded, where weights are computed with as they are stored: measured for each model.

With activations of one byte a prompt is computed 1.4 times as fast as with two, and some models answer otherwise: of
SmolLM2-135M one token in thirty is another. So the model reads a text both ways once, and one byte is enough if the
distributions of its next tokens hardly change. The verdict is remembered by fingerprint.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from memserve.base.types import COARSE_BITS, FINE_BITS
from memserve.model.attention.context import step_attention
from memserve.model.loading.cache import read_record, record_name, write_record
from memserve.model.loading.comparison import OPERATIONS_MAX
from memserve.model.loading.pages import pages_of
from memserve.model.loading.probe import DenseAttention

if TYPE_CHECKING:
    from torch import Tensor

    from memserve.model.loading.stored import StoredWeights

log = logging.getLogger(__name__)

DIVERGENCE_MAX = 0.001
"""Of the next token's distribution from that of exact activations, in nats (KL), at the mean: formats that round
weights cost more. At the limit about one token in fifty is another."""
PIECE_TOKENS = 128
"""Of each text so many are read, so that little memory is needed for logits."""

_TEXTS = (
    "The library of Alexandria was one of the largest and most significant libraries of the ancient world. It was part "
    "of a larger research institution called the Mouseion, which was dedicated to the nine goddesses of the arts. The "
    "idea of a universal library may have been proposed to Ptolemy the First, a general of Alexander in Egypt. "
    "Scholars worked there on mathematics, astronomy and medicine: Eratosthenes measured the Earth with a shadow and a "
    "well, and was wrong by less than a tenth. What became of the books is not known for sure; most of them were "
    "probably not burnt in a night, but forgotten over centuries, as money, readers and copyists went away.",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    merged: list[int] = []\n    i = j = 0\n"
    "    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n            merged.append(left[i])\n"
    "            i += 1\n        else:\n            merged.append(right[j])\n            j += 1\n"
    "    return merged + left[i:] + right[j:]\n\n\ndef sort(values: list[int]) -> list[int]:\n"
    "    if len(values) < 2:\n        return values\n    middle = len(values) // 2\n"
    "    return merge(sort(values[:middle]), sort(values[middle:]))\n",
    "Question: A train leaves the station at 9:40 and travels 135 kilometres at 90 kilometres an hour. When does it "
    "arrive?\nAnswer: It travels for 135 / 90 = 1.5 hours, which is 1 hour and 30 minutes. 9:40 and 1:30 is 11:10. The "
    "train arrives at 11:10.\n\nQuestion: Which of these numbers are prime: 21, 23, 27, 29, 33?\nAnswer: 21 is 3 times "
    "7, 27 is 3 times 9, and 33 is 3 times 11. So 23 and 29 are prime.\n\nQuestion: What is the boiling point of water "
    "at sea level, in degrees Celsius?\nAnswer: 100 degrees.",
    "Dear Ms Okafor,\n\nthank you for your message of 3 March. We have looked at the invoice again, and you are right: "
    "two of the five chairs were charged twice. I have asked our bookkeeper to return the amount of 248.50 euros to "
    "your account; it should arrive within a week. Please accept our apologies for the trouble that this has caused "
    "you. As a small sign of our thanks for your patience we will deliver your next order free of charge.\n\nLe petit "
    "chat noir dort sur le toit de la maison. Der Zug nach Hamburg hat heute leider zwanzig Minuten Verspätung.",
)


def choose_activation_bits(module: Any, stored: StoredWeights, tokenizer: Any, fingerprint: str) -> int:
    """One of :data:`memserve.base.types.ACTIVATION_BITS` for ``module``, which goes through the step context and
    whose weights ``stored`` are. ``fingerprint``: of the model, under which the verdict is remembered."""
    name = record_name("activations", fingerprint, str(module.dtype))
    bits = read_record(name).get("bits")
    if bits not in (COARSE_BITS, FINE_BITS):
        bits = _measure(module, stored, tokenizer)
        write_record(name, {"bits": bits})
    return int(bits)


def _measure(module: Any, stored: StoredWeights, tokenizer: Any) -> int:
    weights = sum(parameter.numel() for parameter in module.parameters())
    tokens_left = max(PIECE_TOKENS // 2, int(OPERATIONS_MAX / max(1, 2 * weights)))
    divergence, differing_count, count = 0.0, 0, 0
    vocab = module.config.get_text_config().vocab_size
    with pages_of(module).one_layer_at_a_time(module), torch.inference_mode():
        for text in _TEXTS:
            ids = torch.tensor(tokenizer(text)["input_ids"][: min(PIECE_TOKENS, tokens_left)], dtype=torch.int64)
            if not len(ids):
                break
            exact, coarse = (_log_probabilities(module, stored, ids % vocab, exact=exact) for exact in (True, False))
            divergence += float((exact.exp() * (exact - coarse)).sum())
            differing_count += int((exact.argmax(-1) != coarse.argmax(-1)).sum())
            count += len(ids)
            tokens_left -= len(ids)
    if not count:
        return FINE_BITS
    bits = COARSE_BITS if divergence <= DIVERGENCE_MAX * count else FINE_BITS
    log.info(
        "activations are rounded to %d bits: with %d the next token of %d is another at %.1f %%, and KL is %.4f nats",
        bits, COARSE_BITS, count, 100 * differing_count / count, divergence / count,
    )  # fmt: skip
    return bits


def _log_probabilities(module: Any, stored: StoredWeights, ids: Tensor, *, exact: bool) -> Tensor:
    """Of each next token, float32 ``[tokens, vocab]``. Not ``exact``: with :data:`COARSE_BITS`."""
    positions = torch.arange(len(ids), device=ids.device)[None]
    head = getattr(module.get_output_embeddings(), "weight", None)
    wide = None if head is None else head.detach()
    numbers = stored.computing_as_stored(wide, exact=exact, activation_bits=COARSE_BITS)
    with step_attention(DenseAttention()), numbers:
        logits: Tensor = module(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
    return logits.float().log_softmax(-1)
