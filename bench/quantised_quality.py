"""What quantised weights cost in answers: next-token probabilities of documents beside those of the numbers in float32.

    python bench/quantised_quality.py [--data DIR] [--documents 8] [--tokens 512] [--model FOLDER] [--threads N]
        [--settings NAME ...]
    python bench/quantised_quality.py --gguf FILE [--llamacpp PYTHON] [--data DIR] [--documents 8] [--tokens 512]

Each row is a way to compute with the same checkpoint, whose weights are numbers: as they are in bfloat16, as
``--quantization int8`` and ``int4`` round them, and in other ways that were tried (``TRIED``). ``integers``: as
``--quantization`` computes, with activations rounded to int8; ``numbers``: with the same weights, dequantised, in
bfloat16. Figures are means over every token of the documents but the first: the divergence (KL) of the next token's
distribution from that of float32, in nats; how often its most probable token is the same; and perplexity.

With ``--gguf`` the rows are ways to compute with the weights of a file as they are stored: activations of 8 and of 15
bits, the one that ``--quantization auto`` has chosen for it, and llama.cpp on the same file (``--llamacpp``: a Python
that can import llama_cpp), beside its numbers in float32 and in bfloat16.

Without ``--model`` it is the bundled model, whose weights were 4-bit integers in groups of 32 before they were numbers:
rounding them to such again changes little, and that row says little about other models. ``--data`` has ``longdocs/``,
as for ``lossless.py``; without it documents are made from a seed, whose text has no meaning.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.chats import read
from harness.flags import options, save
from harness.tables import Table
from torch import Tensor

from memserve.base.types import ACTIVATION_BITS
from memserve.model.attention.context import step_attention
from memserve.model.capture.forward import best_forward
from memserve.model.loading.formats.rounding import SETTINGS, Rounding, rounded_folder
from memserve.model.loading.loader import LoadedModel, load_model
from memserve.model.loading.probe import DenseAttention
from memserve.model.loading.sources import DEFAULT_MODEL, ModelFolder, resolve_source
from memserve.model.loading.stored import stored_of
from memserve_lab.workloads.builtin import documents as made_documents

TRIED = {
    "int8": SETTINGS["int8"],
    "int8, one scale for an output": Rounding(8),
    "int8, without the head": replace(SETTINGS["int8"], head_bits=0),
    "int4": SETTINGS["int4"],
    "int4, groups of 64": Rounding(4, (64,), symmetric=False),
    "int4, no zero points": Rounding(4, (32,)),
    "int4, the head as well": replace(SETTINGS["int4"], head_bits=None),
    "int4, without the head": replace(SETTINGS["int4"], head_bits=0),
}
COLUMNS = {
    "weights": "{setting}", "computed with": "{kind}", "MB": "{megabytes:.0f}", "KL, nats": "{divergence:.4f}",
    "the same token first": "{best:.1%}", "perplexity": "{perplexity:.3f}",
}  # fmt: skip


def logits_of(model: LoadedModel, documents: list[Tensor]) -> Iterator[Tensor]:
    """Of every token of each document, float32 ``[tokens, vocab]``."""
    forward = best_forward(model.module)
    for ids in documents:
        positions = torch.arange(len(ids))
        with step_attention(DenseAttention()), torch.inference_mode():
            yield torch.as_tensor(forward(ids, positions, positions)).float().log_softmax(-1)


def compare(got_logits: Iterable[Tensor], documents: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """The figures of a row."""
    divergence, same, surprise, count = 0.0, 0, 0.0, 0
    for ids, want, got in zip(documents, expected, got_logits, strict=True):
        divergence += float((want.exp() * (want - got)).sum(-1)[:-1].double().sum())
        same += int((want.argmax(-1) == got.argmax(-1))[:-1].sum())
        surprise -= float(got[:-1].gather(1, ids[1:, None]).double().sum())
        count += len(ids) - 1
    return {"divergence": divergence / count, "best": same / count, "perplexity": math.exp(surprise / count)}


def texts(data: Path | None, count: int) -> list[str]:
    """``count`` documents."""
    if data is None:
        return [document.text for document in made_documents(1, count)]
    files = sorted((data / "longdocs").glob("*.jsonl.gz"))
    records = [record for file in files for _, record in zip(range(-(-count // len(files))), read(file), strict=False)]
    return [str(record["document"]) for record in records[:count]]


def rows_of_file(args: Any, documents: list[Tensor], expected: list[Tensor], table: Table) -> Iterator[dict[str, Any]]:
    """The rows of ``--gguf``, shown as they come."""
    path, megabytes = str(args.gguf), args.gguf.stat().st_size / 1e6

    def row(setting: str, kind: str, logits: Iterable[Tensor]) -> dict[str, Any]:
        figures = compare(logits, documents, expected)
        table.show(row := {"setting": setting, "kind": kind, "megabytes": megabytes} | figures)
        return row

    yield row("the file's", "numbers", logits_of(load_model(path, "bfloat16", "cpu"), documents))
    chosen = load_model(path, "bfloat16", "cpu", quantization="auto").activation_bits
    for bits in ACTIVATION_BITS:
        model = load_model(path, "bfloat16", "cpu", quantization="auto")
        stored_of(model.module).activation_bits = bits
        name = f"{bits} bits" + (", chosen" if bits == chosen else "")
        yield row("the file's", name, logits_of(model, documents))
    if args.llamacpp:
        yield row("the file's", "llama.cpp", llamacpp_logits(args.llamacpp, path, documents, args.threads))


LLAMACPP = """
import json, sys, numpy, llama_cpp
path, folder, threads = sys.argv[1:]
documents = json.load(open(f"{folder}/ids.json"))
longest = max(map(len, documents))
model = llama_cpp.Llama(path, n_ctx=longest, n_batch=longest, logits_all=True, verbose=False, n_threads=int(threads))
for place, ids in enumerate(documents):
    model.reset()
    model.eval(ids)
    numpy.save(f"{folder}/{place}.npy", numpy.asarray(model.scores[:len(ids)], dtype=numpy.float32))
"""


def llamacpp_logits(python: str, path: str, documents: list[Tensor], threads: int) -> Iterator[Tensor]:
    """As :func:`logits_of`, by llama.cpp in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ids.json").write_text(json.dumps([ids.tolist() for ids in documents]))
        subprocess.run([python, "-c", LLAMACPP, path, folder, str(threads)], check=True)
        for place in range(len(documents)):
            yield torch.from_numpy(np.load(f"{folder}/{place}.npy")).log_softmax(-1)


def main() -> None:
    """Print the table."""
    args = options(
        __doc__, data=(Path, "folder with longdocs/; default: made from a seed"), documents=8, tokens=512,
        model=DEFAULT_MODEL, threads=torch.get_num_threads(), settings=(list(TRIED), "those to try"),
        gguf=(Path, "a file whose weights are computed with as they are"),
        llamacpp=("", "a Python that can import llama_cpp"),
    )  # fmt: skip
    torch.set_num_threads(args.threads)
    source = resolve_source(str(args.gguf or args.model), "float32")
    folder = ModelFolder(source.path, source.name)
    exact = load_model(str(folder.path), "float32", "cpu")
    encoded = (exact.tokenizer(text)["input_ids"] for text in texts(args.data, args.documents))
    documents = [torch.tensor(ids[: args.tokens]) for ids in encoded]
    expected = list(logits_of(exact, documents))
    del exact
    table, rows = Table(COLUMNS), []

    def add(setting: str, kind: str, path: Path, quantization: str) -> None:
        model = load_model(str(path), "bfloat16", "cpu", quantization=quantization)
        megabytes = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e6
        row: dict[str, Any] = {"setting": setting, "kind": kind, "megabytes": megabytes}
        rows.append(row | compare(logits_of(model, documents), documents, expected))
        table.show(rows[-1])

    if args.gguf is not None:
        rows += list(rows_of_file(args, documents, expected, table))
        save(args, {"rows": rows})
        return
    add("as they are", "numbers", folder.path, "none")
    for name in args.settings:
        rounded = rounded_folder(folder, name.replace(",", "").replace(" ", "-"), TRIED[name]).path
        add(name, "numbers", rounded, "none")
        add(name, "integers", rounded, "auto")
    save(args, {"rows": rows})


if __name__ == "__main__":
    main()
