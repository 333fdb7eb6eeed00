"""Our attention function in transformers' attention interface (level 3).

It is entered once a layer, in order, after rotary embedding and key/query norms, and hands over to the step's
:class:`~memserve.model.attention.context.StepAttention`. No mask function is registered beside it: transformers then
builds no mask at all ("for TGI/vLLM backends"), and causality, windows and paging are the step's business alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memserve.errors import check
from memserve.model.attention.context import current_attention

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION_NAME = "memserve"
"""Give this as ``attn_implementation`` to ``from_pretrained``."""


def memserve_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: ``query [1, H, T, Dk]`` -> ``([1, T, H, Dv], None)``."""
    check(attention_mask is None, "transformers built an attention mask although none is registered for memserve")
    mixed = current_attention().attend(
        module.layer_idx,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return mixed, None


def register_attention() -> None:
    """Make ``attn_implementation="memserve"`` known to transformers (may be called again)."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, memserve_attention)
