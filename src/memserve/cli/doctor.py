"""``memserve doctor``: what is missing on this machine, and how to fix it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from memserve.base.config import DEFAULT_MODEL
from memserve.base.deployment import OWN_BACKEND, backend_of, read_folders
from memserve.base.errors import UserError
from memserve.base.plugins import GROUPS
from memserve.base.units import GIB, MIB, human_bytes
from memserve.cli import credentials
from memserve.cli import flags as opt
from memserve.cli.output import Finding, Status, print_finding
from memserve.system.memory import available_memory_bytes

PYTHON_MIN = (3, 11)
MEMORY_NEED_BYTES = int(1.2 * GIB)
DISK_NEED_BYTES = 1 * GIB


def check_python() -> Iterator[Finding]:
    """The interpreter is new enough."""
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= PYTHON_MIN:
        yield Finding("python", Status.OK, detail)
    else:
        yield Finding("python", Status.FAIL, detail, "install Python 3.11 or newer, then run make install")


def check_native() -> Iterator[Finding]:
    """Whether the native modules load, and which instructions they use."""
    try:
        from memserve import _core

        yield Finding("native core", Status.OK, str(_core.__file__))
    except ImportError as error:
        yield Finding("native core", Status.FAIL, str(error), "build it: make install")
    try:
        from memserve import _kernels
    except ImportError as error:
        yield Finding("native kernels", Status.FAIL, str(error), "build it: make install")
        return
    used, able = _kernels.isa(), _kernels.supported_isas()
    detail = f"{used} (this processor: {', '.join(able)}); quantised weights: {_kernels.quantised_set()}"
    if used == "portable":
        yield Finding("native kernels", Status.WARN, detail, "no AVX2: expect a fraction of the usual speed")
    else:
        yield Finding("native kernels", Status.OK, detail)


def check_packages() -> Iterator[Finding]:
    """The packages that serving imports are installed."""
    for name in ("torch", "transformers", "tokenizers", "uvicorn", "starlette", "msgspec", "prometheus-client"):
        try:
            yield Finding(name, Status.OK, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, Status.FAIL, "not installed", "run make install")


def check_torch() -> Iterator[Finding]:
    """The build of torch, and what it can use."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch build", Status.FAIL, str(error).splitlines()[0], "reinstall it: make install")
        return
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    detail = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, {device}"
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch does not type it
        yield Finding("torch build", Status.OK, detail)
    else:
        yield Finding("torch build", Status.WARN, f"{detail}, no oneDNN", "matrix products are slower without oneDNN")


def check_machine() -> Iterator[Finding]:
    """Cores and memory."""
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", Status.OK, f"{cores} usable of {os.cpu_count()}")
    available = available_memory_bytes()
    if available is None:
        yield Finding("memory", Status.WARN, "unknown", None)
    elif available < MEMORY_NEED_BYTES:
        hint = f"the default model needs {human_bytes(MEMORY_NEED_BYTES)}; close programs or lower --kv-memory"
        yield Finding("memory", Status.WARN, f"{human_bytes(available)} available", hint)
    else:
        yield Finding("memory", Status.OK, f"{human_bytes(available)} available")


def check_memory_bound(model: str) -> Iterator[Finding]:
    """The most resident memory of one instance of the model, with default options: see docs/concepts/MEMORY.md."""
    from memserve.base.config import EngineOptions
    from memserve.model.loading.sources import resolve_source
    from memserve.system.memory import geometry_from_config, memory_bound, sizes_from_config

    bundled = model.lower() in ("default", DEFAULT_MODEL.lower())
    if not bundled and not (Path(model).expanduser() / "config.json").is_file():
        return  # the model would have to be fetched or converted first
    try:
        options, source = EngineOptions(), resolve_source(model, "bfloat16", keep_file=True)
        config = json.loads((source.path / "config.json").read_text())
        files = [source.gguf] if source.keeps_file and source.gguf else source.path.glob("*.safetensors")
        weights = sum(file.stat().st_size for file in files)
        sizes, geometry = sizes_from_config(config, weights), geometry_from_config(config, options.block_tokens)
        machine = options.instance_config(geometry, config.get("max_position_embeddings", 8192), "doctor")
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return  # the model's own check says what is wrong with it
    bound = memory_bound(sizes, geometry, machine, in_cluster=True)
    yield Finding("KV of a token", Status.OK, f"{geometry.token_bytes:,} bytes = {geometry.token_formula}")
    yield Finding("instance memory", Status.OK, f"at most {bound}")


def check_model(model: str) -> Iterator[Finding]:
    """The model is there, and described or converted if it has to be."""
    from memserve.model.loading.sources import bundled_gguf
    from memserve.system.process import cache_root

    if model.lower() not in ("default", DEFAULT_MODEL.lower()):
        yield _local_model(model)
        path = Path(model).expanduser()
        if (path / "config.json").is_file():
            yield from _compared(path)
        return
    try:
        gguf = bundled_gguf()
    except UserError as error:
        yield Finding("model", Status.FAIL, error.message, error.hint)
        return
    yield Finding("model", Status.OK, f"{model}: {gguf.name}, {human_bytes(gguf.stat().st_size)}")
    root = cache_root()
    patterns = (f"{gguf.stem}-*-stored/config.json", f"{gguf.stem}-*/*/config.json")
    if converted := [file for pattern in patterns for file in sorted(root.glob(pattern))]:
        yield Finding("converted model", Status.OK, str(root))
        for file in converted:
            yield from _compared(file.parent)
    else:
        yield Finding("converted model", Status.WARN, "not yet", "the first start converts it: about a minute, once")
    yield _disk(root)


def _local_model(model: str) -> Finding:
    from memserve.model.loading.sources import HUB_ID

    path = Path(model).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return _folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return Finding("model", Status.OK, f"{path}, {human_bytes(path.stat().st_size)}; read at first use")
    if path.exists():
        return Finding("model", Status.FAIL, f"{path} is neither a model folder nor a .gguf file", "see --model")
    if HUB_ID.fullmatch(model):
        return Finding("model", Status.WARN, f"{model} comes from the hub: not a local path", "needs a connection")
    return Finding("model", Status.FAIL, f"there is no model {model!r}", "give a folder, a .gguf file or a hub id")


def _folder(path: Path) -> Finding:
    """A model folder, by its config, its tokenizer and the names of its weights: nothing large is read."""
    from memserve.model.loading.loader import load_tokenizer
    from memserve.model.loading.sources import ModelFolder, refuse_special_files

    try:
        refuse_special_files(path, "model")
        if (why := unservable(path)) is not None:
            return Finding("model", Status.FAIL, f"folder {path}: {why}", "use a model with a supported architecture")
        load_tokenizer(ModelFolder(path, path.name))
    except UserError as error:
        return Finding("model", Status.FAIL, f"folder {path}: {error.message}", error.hint)
    if not any(path.glob("*.safetensors")):
        return Finding("model", Status.FAIL, f"folder {path} has no *.safetensors", "save the weights as safetensors")
    return Finding("model", Status.OK, f"folder {path}")


def _compared(folder: Path) -> Iterator[Finding]:
    """Whether the model was found to be itself in pieces, when it was first loaded in each dtype."""
    from memserve.model.loading.comparison import verdicts_on

    for dtype, refused in verdicts_on(folder).items():
        name = f"exact in {dtype}"
        if refused:
            yield Finding(name, Status.FAIL, refused, "serve another model")
        else:
            yield Finding(name, Status.OK, "in pieces it computes what transformers computes at once")


def unservable(path: Path) -> str | None:
    """Why the architecture of a model folder cannot be served; ``None``: it can, as far as its config tells.

    Raises :class:`UserError` for a config that transformers cannot read.
    """
    from transformers import AutoConfig

    from memserve.model.loading.skeleton import auto_class

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # its own code and checks may raise anything: the config is at fault
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"config.json cannot be read: {line[:200]}", hint="is the folder complete?") from None
    kind = auto_class(config)._model_mapping.get(type(config), None)
    kinds = kind if isinstance(kind, (list, tuple)) else [kind]
    if kinds[0] is None:
        return f"{config.model_type} is not a causal language model"
    has_states = getattr(kinds[0], "_is_stateful", False)  # and perhaps no attention: the probe at load decides
    if not (has_states or getattr(kinds[0], "_supports_attention_backend", False)):
        return f"the attention of {config.model_type} does not go through transformers' attention interface"
    return None


def _disk(root: Path) -> Finding:
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    detail = f"{human_bytes(free)} free for {root}"
    if free >= DISK_NEED_BYTES and os.access(place, os.W_OK):
        return Finding("model cache", Status.OK, detail)
    return Finding("model cache", Status.WARN, detail, "set MEMSERVE_CACHE_DIR to a writable folder with 1 GiB")


def check_port(host: str, port: int) -> Iterator[Finding]:
    """The port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            hint = "something listens there already: use another --port"
            yield Finding("port", Status.WARN, f"{host}:{port}: {error.strerror}", hint)
            return
    yield Finding("port", Status.OK, f"{host}:{port} is free")


def check_disks(ssd: list[str]) -> Iterator[Finding]:
    """The folders of a store's disks: may this user write there, is there room, and is the page cache passed by?"""
    for folder, size in read_folders(ssd):
        backend, location = backend_of(folder)
        name, path = "ssd", Path(location).expanduser()
        if backend != OWN_BACKEND:
            yield Finding(name, Status.OK, f"{human_bytes(size)} in {folder}: what is there, its plug-in knows")
            continue
        place = next(ancestor for ancestor in (path, *path.absolute().parents) if ancestor.exists())
        if not (place.is_dir() and os.access(place, os.W_OK)):
            hint = "give a folder that this user may write to"
            yield Finding(name, Status.FAIL, f"{path} cannot be written", hint)
            continue
        stored_bytes = sum(file.stat().st_blocks * 512 for file in path.glob("memserve-store.*"))
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        detail = f"{human_bytes(free + stored_bytes)} for {human_bytes(size)} in {path}"
        if free + stored_bytes < size:
            yield Finding(name, Status.FAIL, detail, f"ask for less: --ssd {folder}={(free + stored_bytes) >> 30}GiB")
        elif not _takes_direct_io(place):
            hint = "its file system knows no O_DIRECT: KV goes through the page cache, which costs memory and time"
            yield Finding(name, Status.WARN, detail, hint)
        else:
            yield Finding(name, Status.OK, detail)


def _takes_direct_io(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def check_extras() -> Iterator[Finding]:
    """Optional packages, and room for shared memory."""
    for name, use in (("openai", "the official client, for examples and tests"), ("triton", "the CUDA kernel")):
        is_installed = importlib.util.find_spec(name) is not None
        yield Finding(f"optional {name}", Status.OK, use if is_installed else f"not installed ({use})")
    shm = Path("/dev/shm")
    free = os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize if shm.is_dir() else 0
    if free < 64 * MIB:
        hint = "shared memory between processes needs room in /dev/shm"
        yield Finding("shared memory", Status.WARN, f"{human_bytes(free)} free", hint)


def check_plugins() -> Iterator[Finding]:
    """What other distributions bring, with its version: can each be loaded?"""
    for group in GROUPS:
        for plugin in group.installed_plugins():
            detail = f"{plugin.name}: {group.noun} of {plugin.distribution} {plugin.version}"
            if plugin.problem:
                hint = f"it is not used; uninstall {plugin.distribution}, or another version of it"
                yield Finding("plug-in", Status.WARN, f"{detail}: {plugin.problem}", hint)
            else:
                yield Finding("plug-in", Status.OK, detail)


def doctor(
    model: opt.Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address that serve would listen on.")] = opt.DEFAULT_HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port that serve would listen on.")] = opt.DEFAULT_PORT,
    ssd: Annotated[
        list[str] | None, typer.Option(help="DIR=20GiB, as serve would be given: is this a place for KV? Repeatable.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="URL of a running router: what is wrong with its cluster, instead of this machine?"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="With --cluster: the key of --metrics-key.", envvar="MEMSERVE_CHAT_KEY"),
    ] = None,
    expect: Annotated[
        str | None, typer.Option(help="With --cluster: members that there should be, as prefill=2,decode=2,store=1.")
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a router's cluster port: can it be reached, does it take the secret?"),
    ] = None,
    cluster_secret_file: credentials.ClusterSecretFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this machine, the model and the installation, or a cluster that runs. Exit status 1: something essential is
    missing."""
    findings: list[Finding] = []
    if cluster is not None or join is not None:
        from memserve.cli.doctor_cluster import examine_cluster, examine_port, read_expected

        if cluster is not None:
            findings += examine_cluster(cluster, api_key, read_expected(expect))
        if join is not None:
            findings += examine_port(join, cluster_secret_file)
        closing = ("the cluster is well, as far as its router says", "the cluster is not well: see what says FAIL")
    else:
        findings += [*examine(model, host, port), *check_disks(ssd or [])]
        closing = (f"ready to serve: {_serve_command(model, findings)}", "not ready: fix what says FAIL")
    worst = Status.FAIL if any(finding.status is Status.FAIL for finding in findings) else Status.OK
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"ok": worst is Status.OK, "checks": listed}, indent=1))
    else:
        for finding in findings:
            print_finding(finding)
        typer.echo(closing[worst is not Status.OK])
    if worst is Status.FAIL:
        raise typer.Exit(1)


def examine(model: str, host: str, port: int) -> Iterator[Finding]:
    """All findings, in the order of the report."""
    yield from check_python()
    yield from check_native()
    yield from check_packages()
    yield from check_torch()
    yield from check_machine()
    yield from check_model(model)
    yield from check_memory_bound(model)
    yield from check_port(host, port)
    yield from check_extras()
    yield from check_plugins()


def _serve_command(model: str, findings: list[Finding]) -> str:
    """The command to type next: with the chosen model, and any free port if the usual one is taken."""
    is_port_taken = any(finding.name == "port" and finding.status is not Status.OK for finding in findings)
    command = "memserve serve" + (f" --model {shlex.quote(model)}" if model != DEFAULT_MODEL else "")
    return command + (" --port 0" if is_port_taken else "")
