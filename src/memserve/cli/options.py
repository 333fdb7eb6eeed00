"""Options that several commands share: one flag a field of :class:`EngineOptions` (level 4)."""

from __future__ import annotations

from typing import Annotated

import typer

from memserve.config import DEFAULT_MODEL as DEFAULT_MODEL
from memserve.config import EngineOptions
from memserve.units import human_bytes

DEFAULTS = EngineOptions()
DEFAULT_KV_MEMORY = human_bytes(DEFAULTS.kv_memory_bytes).replace(".0 ", "")

Model = Annotated[str, typer.Option(help="A model folder, a .gguf file, a hub id, or the bundled default.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16: weights, activations and KV.")]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
KvMemory = Annotated[str, typer.Option(help="Memory for KV that attention reads, e.g. 512MiB.")]
DramMemory = Annotated[str, typer.Option(help="Second tier behind it: evicted prefixes move here, e.g. 4GiB.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Do not reuse the KV of shared prefixes.")]
MaxRunning = Annotated[int, typer.Option(min=1, help="Sequences computed together.")]
MaxWaiting = Annotated[int, typer.Option(min=1, help="Requests that may queue; more get 429.")]
MaxStepTokens = Annotated[int, typer.Option(min=1, help="Token budget of one step.")]
PrefillChunk = Annotated[int, typer.Option(min=1, help="Largest piece of one prompt in one step.")]
Preemption = Annotated[str, typer.Option(help="auto, swap or recompute: what happens when memory runs out.")]
MaxModelTokens = Annotated[int | None, typer.Option(min=1, help="Context limit; default: the model's own.")]
BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens a block of KV holds.")]
StepsInFlight = Annotated[int, typer.Option(min=1, help="Steps given to the device at once; 2 hides the scheduler.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of the device; default: every core.")]
