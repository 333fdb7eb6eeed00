"""Which blocks of which engines are the same: everything that decides what the bytes under a hash of vLLM's mean."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from memserve.integrations.values import namespace
from memserve.integrations.vllm.memory import BlockLayout

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


def prefix_of(config: Any, given: str, backends: tuple[str, ...], version: str, layout: BlockLayout) -> bytes:
    """The begin of the names of one worker's values.

    ``config``: vLLM's; ``given``: what the user adds; ``backends``: names of the attention backends; ``version``: of
    vLLM, whose releases change how a backend packs KV.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return namespace(
        "vllm",
        given=given,
        version=version,
        weights=weights_fingerprint(str(model.model), getattr(model, "revision", None)),
        model=_model_digest(model),
        dtype=str(model.dtype),
        cache_dtype=str(cache.cache_dtype),
        block_tokens=cache.block_size,
        hashing=str(getattr(cache, "prefix_caching_hash_algo", "")),
        quantization=str(getattr(model, "quantization", None)),
        backends=backends,
        packing=_host_packing(),
        layout=layout.digest.hex(),
        rank=parallel.rank % parallel.world_size,
        ranks=(parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
    )


def weights_fingerprint(model: str, revision: str | None) -> str:
    """Of a model on this host: sizes and samples of its files, wherever they lie. Of any other: name and revision."""
    path = Path(model)
    if path.is_dir():
        files = sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    else:
        files = [path] if path.is_file() else []
    if not files:
        return f"{model}@{revision}"
    digest = blake2b(digest_size=16)
    for file in files:
        nbytes = file.stat().st_size
        digest.update(f"{file.name} {nbytes} ".encode())
        with file.open("rb") as opened:
            for number in range(_SAMPLES):
                opened.seek(max(0, nbytes - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _model_digest(model: Any) -> str:
    """Of the configuration that the engine runs with, overrides included; where it was read from does not matter."""
    facts = dict(model.hf_config.to_dict()) if hasattr(model.hf_config, "to_dict") else {}
    for name in ("_name_or_path", "transformers_version"):
        facts.pop(name, None)
    told = json.dumps([facts, str(getattr(model, "hf_overrides", None))], sort_keys=True, default=str)
    return blake2b(told.encode(), digest_size=16).hexdigest()


def _host_packing() -> str:
    """On a CPU, matrix units decide how vLLM packs KV."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    return " ".join(flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {flag}" in flags)
