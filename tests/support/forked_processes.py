"""Processes of memserve that begin as a fork of one that has imported torch, transformers and memserve already.

``python -m memserve ...`` imports for up to 2 s of CPU before its first own line, and the suite starts hundreds.
:func:`fork_processes` lets ``subprocess.Popen`` fork them from a template instead, in the test's process and in all
that come from it::

    test -- Popen --> template -- fork --> middle -- fork --> process      the middle ends at once: the process becomes
                                                                           a child of the test, its subreaper just then
    process -- Popen --> its own template, forked at its beginning

Such a process is a child of the one that started it, with its own environment, descriptors, group, signals, network,
folder and command line in ``/proc``. What else is different: its hash seed and ``/proc/*/environ`` are the template's,
torch is loaded in a router as well, and at the end Python takes nothing apart. Where a test is about those,
:func:`executed` has all processes executed; so are those whose environment has something else that libraries read when
they are loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

from memserve.system.process import set_thread_environment
from places import ROOT

ARGUMENTS_BYTES = 4096
"""Room for the words of a process in the place of the template's own."""
LATE = (
    "CUDA_VISIBLE_DEVICES", "MEMSERVE_", "NIXL_", "OTEL_", "PYTEST_", "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_NCCL_", "UCX_",
)  # fmt: skip
"""Variables of the environment that nothing reads while it is loaded or imported."""
PATH = "PYTHONPATH"
"""Of the environment, too, as long as nothing in it is imported before all else."""
MODULES = ("memserve", "memserve.model.loading.conversion", "memserve.model.workers.processes", "gpu_worker_main")
SCRIPTS = tuple(
    str(ROOT / name)
    for name in (
        "bench/transfer.py", "scripts/gpu_check.py", "tests/support/faulty_instance.py",
        "tests/support/faulty_store.py", "tests/support/holding_client.py", "tests/support/impatient_memserve.py",
        "tests/support/served_double.py",
    )
)  # fmt: skip
"""Programs that are forked: what follows ``-m``, and files."""
HEARD = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_REQUEST_BYTES = 1 << 17
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_LIBC = ctypes.CDLL(None, use_errno=True)

_start = subprocess.Popen._execute_child
_names = list(signature(_start).parameters)[1:]


class Template:
    """The line to a process that forks."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.owner_pid = os.getpid()
        self._lock = threading.Lock()

    def fork_process(self, request: dict[str, Any], fds: list[int]) -> int:
        """The id of the new process, a child of this one. Raises ``OSError`` where the template has ended."""
        with self._lock:
            _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.line, [pickle.dumps(request)], fds)
                answer = self.line.recv(64)
            finally:
                _LIBC.prctl(_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise ConnectionError("the template of processes has ended")
        return int(answer)


_template: Template | None = None
_begin: Callable[[], Template] | None = None
_loaded: dict[str, str] = {}
"""The environment that was there when libraries were loaded."""


def _early(environment: dict[str, str]) -> dict[str, str]:
    is_late = not any(os.path.isfile(os.path.join(folder, "sitecustomize.py")) for folder in _path(environment))
    late = (*LATE, PATH) if is_late else LATE
    return {name: text for name, text in environment.items() if not name.startswith(late)}


def _path(environment: Mapping[str, str]) -> list[str]:
    """The folders of ``PYTHONPATH``."""
    return [os.path.abspath(folder) for folder in environment.get(PATH, "").split(os.pathsep) if folder]


def _words_of(arguments: Any) -> tuple[str, str, list[str]] | None:
    """What of the command line comes before the words of the program, the program, and the whole."""
    words = list(map(os.fsdecode, arguments)) if isinstance(arguments, (list, tuple)) else []
    if words[:1] != [sys.executable]:
        return None
    for options, programs in (([], SCRIPTS), (["-m"], MODULES), (["-P", "-m"], MODULES)):
        at = 1 + len(options)
        if words[1:at] == options and words[at : at + 1] and words[at] in programs:
            return " ".join(options), words[at], words
    return None


def _request(given: dict[str, Any]) -> dict[str, Any] | None:
    """What the template is told; ``None``: the process is executed."""
    found = _words_of(given["args"])
    plain = not given["shell"] and given["executable"] in (None, sys.executable) and given["preexec_fn"] is None
    as_we = given["umask"] < 0 and given["uid"] is None and given["gid"] is None and given["gids"] is None
    if found is None or not plain or not as_we or not given["close_fds"]:
        return None
    environment = dict(os.environ if given["env"] is None else given["env"])
    if _early(environment) != _loaded or signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return None
    options, program, words = found
    if sum(len(os.fsencode(word)) + 1 for word in words) > ARGUMENTS_BYTES:
        return None
    return {
        "options": options, "program": program, "words": words, "environment": environment,
        "folder": os.path.abspath(os.fsdecode(given["cwd"] or os.getcwd())),
        "cores": os.sched_getaffinity(0), "group": given["process_group"], "session": given["start_new_session"],
        "network": f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net",
        "ignored": [sig for sig in HEARD if signal.getsignal(sig) is signal.SIG_IGN],
    }  # fmt: skip


class ForkingPopen(subprocess.Popen):
    """As its base, which executes what is not forked."""

    def _execute_child(self, *arguments: Any) -> None:
        given = dict(zip(_names, arguments, strict=True))
        request = _request(given) if _begin is not None else None
        if request is None:
            _start(self, *arguments)
            return
        pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        standard = {at: pipe if pipe >= 0 else at for at, pipe in enumerate(pipes)}
        wanted = {at: fd for at, fd in standard.items() if _is_open(fd)} | {fd: fd for fd in given["pass_fds"]}
        request["targets"] = list(wanted)
        template = _current()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)  # else an answer would be taken for that of the next
        try:
            self.pid = template.fork_process(request, list(wanted.values()))
            self._child_created = True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        own = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in own))


def enter_network(path: str) -> None:
    """Let this thread, and what it starts, be in the network namespace at ``path``. Raises :class:`OSError`."""
    if os.path.samefile(path, "/proc/thread-self/ns/net"):
        return  # which needs no rights
    with open(path) as file:
        if _LIBC.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False


def _current() -> Template:
    global _template
    if _template is None or _template.owner_pid != os.getpid():  # a fork of multiprocessing has none of its own
        assert _begin is not None
        _template = _begin()
    return _template


def fork_processes() -> None:
    """From now on, in this process and in those that come from it. The template starts with the first of them."""
    global _begin
    set_thread_environment()  # as processes of memserve do themselves
    environment = dict(os.environ)
    _loaded.update(_early(environment))

    def begin() -> Template:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([os.path.dirname(__file__), *filter(None, [environment.get(PATH)])])
        code = "import sys, forked_processes; forked_processes.serve(int(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(theirs.fileno()), " " * ARGUMENTS_BYTES]
        with theirs:
            subprocess.Popen(command, env=environment | {PATH: path}, pass_fds=[theirs.fileno()])
        return Template(ours)

    _begin = begin
    subprocess.Popen = ForkingPopen


@contextlib.contextmanager
def executed() -> Iterator[None]:
    """Within it all processes are executed."""
    global _begin
    begin, _begin = _begin, None
    try:
        yield
    finally:
        _begin = begin


# -- the template


def serve(line_fd: int) -> None:
    """The template's program."""
    import importlib

    own = os.environ.pop(PATH).split(os.pathsep)[1:]
    if own:
        os.environ[PATH] = os.pathsep.join(own)
    _loaded.update(_early(dict(os.environ)))
    enter_network(f"/proc/{os.getppid()}/ns/net")  # of its first thread: another one may have begun this
    del sys.path[0]  # '' of -c
    if sys.path[0] not in own:
        del sys.path[0]  # this file's folder
    from memserve.system.imports import leave_compiler_out

    leave_compiler_out("cpu")
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    line = socket.socket(fileno=line_fd)
    line.set_inheritable(False)
    _run(*_next_process(line))


IMPORTED = (
    "accelerate", "gguf", "httptools", "numpy", "starlette.applications", "tokenizers", "typer._adapters",
    "uvicorn.loops.auto", "uvicorn.lifespan.on", "uvloop", "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama", "transformers.models.auto", "transformers.models.auto.processing_auto",
    "transformers.tokenization_utils_tokenizers", "memserve.api.app", "memserve.cli.main",
    "memserve.cli.cluster.serve", "memserve.cli.cluster.instance", "memserve.cli.cluster.router",
    "memserve.cli.cluster.store", "memserve.host.autoscaling", "memserve.host.instance", "memserve.host.router",
    "memserve.host.supervisor", "memserve.model.capture.forward", "memserve.model.device",
    "memserve.model.loading.card", "memserve.model.loading.conversion", "memserve.model.loading.loader",
    "memserve.model.loading.precision", "memserve.model.workers.gpu_group", "memserve.model.workers.recurrent",
    "memserve.model.workers.trial",
)  # fmt: skip
"""What nearly all of them import."""


def _next_process(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request. Returns in the processes, each with its own."""
    _close_all_but(line.fileno())
    while True:
        data, fds, _, _ = socket.recv_fds(line, _REQUEST_BYTES, 250)
        if not data:
            os._exit(0)
        told, tell = os.pipe()
        begun, begin = os.pipe()
        middle = os.fork()
        if not middle:
            pid = os.fork()
            if pid:
                os.write(tell, str(pid).encode())
                os._exit(0)
            os.close(begin)
            os.read(begun, 1)  # until the middle has ended
            return pickle.loads(data) | {"begun": tell}, fds
        for fd in (tell, begun, *fds):
            os.close(fd)
        os.waitpid(middle, 0)  # its child has the other parent now
        answer = os.read(told, 64)
        os.close(begin)
        os.read(told, 1)  # until it is what was asked for
        os.close(told)
        line.send(answer)


def _close_all_but(*kept: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _run(request: dict[str, Any], fds: list[int]) -> None:
    """Become the process, and end as it does."""
    begun = _take_descriptors([*fds, request["begun"]], request["targets"])
    if request["session"]:
        os.setsid()
    if request["group"] is not None and request["group"] >= 0:
        os.setpgid(0, request["group"])
    enter_network(request["network"])
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    before = _path(os.environ)
    os.environ.clear()
    os.environ.update(request["environment"])
    path = _path(os.environ)
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in {*before, *path})]
    _show_words(request["words"])
    os.close(begun)
    _fork_own_template()
    for sig in HEARD:
        ignored = sig in request["ignored"]
        usual = signal.default_int_handler if sig == signal.SIGINT else signal.SIG_DFL
        signal.signal(sig, signal.SIG_IGN if ignored else usual)
    words, program = request["words"], request["program"]
    sys.orig_argv[:] = words
    arguments = words[words.index(program) + 1 :]
    if not request["options"]:
        sys.argv[:] = [program, *arguments]
        sys.path.insert(0, os.path.dirname(program))
        _end(lambda: runpy.run_path(program, run_name="__main__"))
    sys.argv[:] = ["-m", *arguments]
    if request["options"] == "-m":
        sys.path.insert(0, request["folder"])
    _end(lambda: runpy.run_module(program, run_name="__main__", alter_sys=True))


def _end(program: Callable[[], object]) -> None:
    """Run it, and end as Python does, but take nothing apart: that would copy all pages of the template's objects."""
    status: object = 0
    try:
        program()
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            file.flush()
    os._exit((status or 0) & 255)


def _take_descriptors(fds: list[int], targets: list[int]) -> int:
    """All but the last of ``fds`` become ``targets``, in their order; no other stays open. Returns the last."""
    above = max([2, *fds, *targets]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in moved:
            with contextlib.suppress(OSError):
                os.close(fd)
    for fd, target in zip(moved, targets, strict=False):
        os.dup2(fd, target)
        os.close(fd)
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for at, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        file = None
        if at in targets:
            file = os.fdopen(at, mode, encoding="utf-8", closefd=False)
            file.reconfigure(errors="backslashreplace" if at == 2 else "strict")
            file.reconfigure(line_buffering=at == 2 or file.isatty(), write_through=is_unbuffered)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    return moved[-1]


def _fork_own_template() -> None:
    """For what this process will start itself. It ends with it."""
    global _template, _begin
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        os.chdir("/")
        for sig in (signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, signal.SIG_IGN)
        _run(*_next_process(theirs))
    theirs.close()
    own = _template = Template(ours)

    def begin() -> Template:
        return own

    _begin = begin
    subprocess.Popen = ForkingPopen


def _show_words(words: list[str]) -> None:
    """In ``/proc/self/cmdline``."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, min(len(text), end - start - 1))
