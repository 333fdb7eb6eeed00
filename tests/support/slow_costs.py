"""Instances that never give up a fetch: they believe that computing and fetching take seconds, and so wait.

A fetch is given up when computing would have been quicker. That takes milliseconds with a tiny model, and a busy
machine needs them for anything.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memserve.base.types import AS_COMPUTED
from memserve.base.units import NS_PER_S
from memserve.host.profile_file import profile_path, save_profile
from memserve.kv.costs import CopyCurve, CostModel, PrefillCurve
from memserve.model.loading.loader import load_model

SLOW = CostModel(PrefillCurve(token_ns=0.2 * NS_PER_S), same_host=CopyCurve(2.0 * NS_PER_S, 0.0, 0.0), machine="slow")


STRIPES = CostModel(
    PrefillCurve(token_ns=0.2 * NS_PER_S), same_host=CopyCurve(0.0, 0.0, 0.0), report_ns=0.0, machine="stripes"
)
"""Whatever fills two steps is computed in stripes."""


def save_slow_costs(
    folder: Path, block_tokens: int = 32, kv_dtypes: tuple[str, ...] = (AS_COMPUTED,), *, windows_apart: bool = False,
    workers: tuple[str, ...] = ("",), costs: CostModel = SLOW,
) -> None:  # fmt: skip
    """For instances of the model in ``folder``, in float32 with one thread, and this process's cache folder.
    ``workers``: of each kind of instance, as :attr:`memserve.base.kv_layout.Parallel.text` says it."""
    loaded = load_model(str(folder), "float32", "cpu", block_tokens=block_tokens, threads=1)
    loaded = loaded.lay_out_kv(windows_apart=windows_apart)
    for kv_dtype in kv_dtypes:
        geometry = replace(loaded.geometry, kv_dtype=kv_dtype)
        for text in workers:
            save_profile(profile_path(loaded.fingerprint, geometry, f"cpu{text}", 1), {"costs": costs.to_dict()})
