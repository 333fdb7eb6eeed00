"""An engine of transformers' on the memory API: KV goes to the decode side layer by layer, as it is computed."""

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from memserve import PoolPeer
from memserve.base.types import KVGeometry

LAYERS, HEADS, SIZE, BLOCK, SECRET = 4, 2, 16, 16, "known to both sides alone"
GEOMETRY = KVGeometry(LAYERS, HEADS, SIZE, SIZE, "float32", BLOCK)
SMALL = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
                    num_key_value_heads=HEADS, vocab_size=256, initializer_range=0.5)  # fmt: skip
PAGE = (2, HEADS, BLOCK, SIZE)  # keys and values of one layer of one block


class Outgoing(DynamicCache):
    """A prompt's cache. What a layer adds is sent while the next one is computed."""

    def __init__(self, peer: PoolPeer, tokens: np.ndarray, to: str) -> None:
        super().__init__()
        self.peer, self.tokens, self.to, self.sent = peer, tokens, to, None
        self.held, self.there = peer.alloc_mem(len(tokens) // BLOCK), peer.alloc_mem(len(tokens) // BLOCK, id=to)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *more: Any, **options: Any) -> Any:
        """``keys`` and ``values``: ``[1, heads, tokens, size]``."""
        for block, address in enumerate(self.held):
            page = self.peer.view(address)[layer].view(np.float32).reshape(PAGE)
            page[...] = torch.cat((keys, values))[:, :, block * BLOCK : (block + 1) * BLOCK].numpy()
        assert self.sent is None or self.sent.result(), "the layer before is there"
        where = {"dst_addresses": self.there, "layers": (layer, layer + 1)}
        if layer < LAYERS - 1:
            self.sent = self.peer.transfer_later(self.to, self.held, **where)
        else:  # and with the last one the other side's index has the prompt
            self.sent = self.peer.transfer_with_insert_later(self.to, self.tokens, self.held, **where)
        return super().update(keys, values, layer, *more, **options)


@torch.inference_mode()
def hand_over(model: LlamaForCausalLM, tokens: np.ndarray, count: int) -> list[int]:
    """``count`` tokens behind ``tokens``, whole blocks: the first by the prefill side, the others by the other one."""
    memory = {"secret": SECRET, "hbm_bytes": 64 * GEOMETRY.block_bytes}
    with PoolPeer(GEOMETRY, name="prefill", **memory) as prefill, PoolPeer(GEOMETRY, name="decode", **memory) as decode:
        outgoing = Outgoing(prefill, tokens, prefill.connect(decode.info()))
        logits = model(torch.from_numpy(tokens)[None].long(), past_key_values=outgoing).logits
        assert outgoing.sent.result(), "the last layer is there"
        answer, cache = [int(logits[0, -1].argmax())], DynamicCache()
        pages = np.stack([decode.view(address) for address in decode.match(tokens)])  # [blocks, layers, bytes]
    for layer in range(LAYERS):
        kv = torch.from_numpy(pages[:, layer].copy()).view(torch.float32).reshape(-1, *PAGE)
        cache.update(*kv.permute(1, 2, 0, 3, 4).reshape(2, 1, HEADS, -1, SIZE), layer)
    while len(answer) < count:
        answer.append(int(model(torch.tensor([answer[-1:]]), past_key_values=cache).logits[0, -1].argmax()))
    return answer


if __name__ == "__main__":
    print(hand_over(LlamaForCausalLM(SMALL).eval(), np.arange(5 * BLOCK, dtype=np.int32), 8))
