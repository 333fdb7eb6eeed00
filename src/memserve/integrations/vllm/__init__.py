"""vLLM with a store of memserve: KV that one engine has computed is read by the others, and by the next start.

    --kv-transfer-config '{"kv_connector": "MemserveConnector", "kv_connector_module_path":
        "memserve.integrations.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": "127.0.0.1:7100", "secret_file": "secret"}}'

vLLM is imported when the connector is, and not before.
"""

from __future__ import annotations

from typing import Any

_CONNECTOR = "MemserveConnector"


def __getattr__(name: str) -> Any:
    if name != _CONNECTOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memserve.integrations.vllm.connector import MemserveConnector

    return MemserveConnector


def register() -> None:
    """The entry point in ``vllm.general_plugins``: ``kv_connector_module_path`` need not be given."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_CONNECTOR, f"{__name__}.connector", _CONNECTOR)
