"""Mailboxes: what arrives, in which order, and what never does."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import zmq

from memserve.base.errors import UserError
from memserve.protocol import codec as wire
from memserve.protocol.messages import AnyMessage, Cancel, Expelled, Leave, QueryKvEvents
from memserve.protocol.peers import ROUTER, Peer
from memserve.transport.curve import CurveKeys
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from memserve.transport.outbound import SEND_QUEUE_MAX, configure
from memserve.transport.probe import ProbeResult, no_router_error, probe_address, waiting_lines
from waiting import eventually, stop_process

SECRET = "the secret of this test's cluster"
A, B = Peer("a", 1), Peer("b", 1)


class Reader:
    """A mailbox, and what it heard."""

    def __init__(self, me: Peer, secret: str = SECRET, port: int = 0) -> None:
        self.heard: list[tuple[Peer, AnyMessage]] = []
        self._news = threading.Condition()
        self.box = ZmqMailbox(me, ListenAddress(secret, port=port), self._on_message)

    def _on_message(self, sender: Peer, message: AnyMessage) -> None:
        with self._news:
            self.heard.append((sender, message))
            self._news.notify_all()

    def wait(self, count: int, timeout_s: float = 10) -> list[AnyMessage]:
        """The first ``count`` messages."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.heard) >= count, timeout_s), f"{len(self.heard)} of {count}"
        return [message for _, message in self.heard]

    @property
    def port(self) -> int:
        return int(self.box.address.rsplit(":", 1)[1])


@pytest.fixture
def open_box() -> Iterator[Callable[..., Reader]]:
    """Opens readers that are closed after the test."""
    with ExitStack() as stack:

        def build(*args: object, **named: object) -> Reader:
            reader = Reader(*args, **named)
            stack.callback(reader.box.close)
            return reader

        yield build


@pytest.fixture
def raw_push() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """PUSH sockets outside of any mailbox; ``keys`` None speaks in clear text."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def build(address: str, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        push = context.socket(zmq.PUSH)
        push.linger = 0
        if keys:
            keys.configure_client(push)
        push.connect(address)
        return push

    yield build
    context.destroy(linger=0)


def test_messages_arrive_once_and_in_order_from_many_threads(open_box: Callable[..., Reader]) -> None:
    a, b = open_box(A), open_box(B)
    a.box.connect(B, b.box.address)
    threads = [
        threading.Thread(target=lambda k=k: [a.box.send(B, QueryKvEvents(1000 * k + i)) for i in range(200)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    numbers = [message.first for message in b.wait(800)]
    for k in range(4):
        assert [n for n in numbers if n // 1000 == k] == list(range(1000 * k, 1000 * k + 200))
    assert {sender for sender, _ in b.heard} == {A}
    counters = b.box.counters
    assert (counters.received, counters.repeated, counters.malformed, counters.misdirected) == (800, 0, 0, 0)
    assert a.box.counters.sent == 800 and a.box.counters.sent_bytes == counters.received_bytes


def test_unknown_peers_lose_their_letters(open_box: Callable[..., Reader]) -> None:
    a = open_box(A)
    a.box.send(B, Leave())
    a.box.connect(B, "not an address")
    a.box.send(B, Leave())
    assert (a.box.counters.sent, a.box.counters.lost_unknown) == (0, 2)


def test_only_the_generation_that_is_meant_hears(open_box: Callable[..., Reader]) -> None:
    a, b = open_box(A), open_box(Peer("b", 7))
    for generation in (6, 0, 8, 7):  # 0: whoever bears the name
        a.box.connect(Peer("b", generation), b.box.address)
        a.box.send(Peer("b", generation), QueryKvEvents(generation))
        eventually(lambda g=generation: sum(vars_of(b)) == {6: 1, 0: 2, 8: 3, 7: 4}[g])
    assert [message.first for message in b.wait(2)] == [0, 7]
    b.box.restart_as(Peer("b", 8))
    a.box.send(Peer("b", 7), QueryKvEvents(70))
    eventually(lambda: b.box.counters.misdirected == 3)
    a.box.connect(Peer("c", 1), b.box.address)
    a.box.send(Peer("c", 1), Leave())
    eventually(lambda: b.box.counters.misdirected == 4)
    assert len(b.heard) == 2


def test_any_generation_is_reached_over_known_connection(open_box: Callable[..., Reader]) -> None:
    """An instance joins again: its router is known, but may have been started anew."""
    a, b = open_box(A), open_box(Peer("b", 7))
    a.box.connect(Peer("b", 7), b.box.address)
    a.box.send(Peer("b", 0), QueryKvEvents(1))
    a.box.send(Peer("b", 6), QueryKvEvents(2))
    a.box.send(Peer("b", 7), QueryKvEvents(3))
    assert b.wait(2) == [QueryKvEvents(1), QueryKvEvents(3)]
    assert a.box.counters.lost_unknown == 1


def vars_of(reader: Reader) -> tuple[int, int]:
    return reader.box.counters.received, reader.box.counters.misdirected


def test_disconnect_drops_and_forgets(open_box: Callable[..., Reader]) -> None:
    a, b = open_box(A), open_box(B)
    a.box.connect(B, b.box.address)
    a.box.disconnect(Peer("b", 2))  # another one: nothing happens
    a.box.send(B, QueryKvEvents(1))
    b.wait(1)
    a.box.disconnect(B)
    a.box.send(B, QueryKvEvents(2))
    assert a.box.counters.lost_unknown == 1
    a.box.connect(B, b.box.address)
    a.box.send(B, QueryKvEvents(3))
    assert [message.first for message in b.wait(2)] == [1, 3]


def test_sender_is_answered_without_a_connection_to_it(open_box: Callable[..., Reader]) -> None:
    """An expelled instance is told so; a second word within the second is lost."""
    router, late = open_box(Peer(ROUTER, 5)), open_box(A)
    late.box.connect(Peer(ROUTER, 0), router.box.address)
    late.box.send(Peer(ROUTER, 0), Leave())
    router.wait(1)
    router.box.send(A, Expelled("you were silent"))
    router.box.send(A, Expelled("you were silent"))
    assert late.wait(1) == [Expelled("you were silent")]
    assert late.heard[0][0] == Peer(ROUTER, 5)
    assert router.box.counters.lost_unknown == 1


def test_strangers_are_not_heard_but_named(
    open_box: Callable[..., Reader], raw_push: Callable[..., zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    b = open_box(B)
    letter = wire.seal(A, "tcp://127.0.0.1:1", B, 1, wire.encode(Leave()))
    other = CurveKeys.derived_from("some other cluster's secret")
    ours = CurveKeys.derived_from(SECRET)
    fresh = CurveKeys(*zmq.curve_keypair())

    class KnowsOnlyThePublicKey(CurveKeys):
        def configure_client(self, socket: zmq.Socket[bytes]) -> None:
            socket.curve_serverkey = ours.public
            socket.curve_publickey, socket.curve_secretkey = fresh.public, fresh.secret

    strangers = [None, other, KnowsOnlyThePublicKey(ours.public, ours.secret)]
    sockets = [raw_push(b.box.address, keys) for keys in strangers]
    for push in sockets:
        push.send(letter)
    with socket.create_connection(("127.0.0.1", b.port)) as plain:  # not even ZeroMQ
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        eventually(lambda: "it does not speak this protocol" in caplog.text)
        eventually(lambda: b.box.counters.handshakes_failed >= 4)
    for why in ("it does not speak this protocol", "it has another cluster secret"):
        told = [record.message for record in caplog.records if why in record.message]
        # They try again and again: one line a host. One that hung up before it was looked at has no address any more.
        hosts = [re.match(r"rejected (127\.0\.0\.1(?=:\d+ at)|an unknown address)", line) for line in told]
        assert told and all(hosts) and len({host[1] for host in hosts if host}) == len(told)
    assert vars_of(b) == (0, 0) and b.box.counters.malformed == 0
    a = open_box(A)  # and the cluster still works
    a.box.connect(B, b.box.address)
    a.box.send(B, Leave())
    assert b.wait(1) == [Leave()]


def test_mailbox_with_another_secret_is_ignored(open_box: Callable[..., Reader]) -> None:
    b, thief = open_box(B), open_box(A, "some other cluster's secret")
    thief.box.connect(B, b.box.address)
    thief.box.send(B, Leave())
    eventually(lambda: b.box.counters.handshakes_failed >= 1)
    assert b.heard == []


def test_members_that_come_and_go_are_no_strangers(
    open_box: Callable[..., Reader],
    raw_push: Callable[..., zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Connections of one letter, while one that says nothing stands at the door."""
    b = open_box(B)
    with socket.create_connection(("127.0.0.1", b.port)):
        for number in range(1, 21):
            push = raw_push(b.box.address, CurveKeys.derived_from(SECRET))
            push.send(wire.seal(A, "tcp://127.0.0.1:1", B, number, wire.encode(QueryKvEvents(number))))
            b.wait(number)
            push.close(0)
        assert b.box.counters.handshakes_failed == 0 and "rejected" not in caplog.text
    eventually(lambda: b.box.counters.handshakes_failed == 1)
    assert "it broke off before it had shown the cluster's secret" in caplog.text


def test_probe_does_not_count_as_failed_handshake(
    open_box: Callable[..., Reader], caplog: pytest.LogCaptureFixture
) -> None:
    """As a server knocks at a store while it starts: the secret is shown, and nothing said."""
    b = open_box(B)
    with socket.create_connection(("127.0.0.1", b.port)):
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(lambda _: probe_address(b.box.address, SECRET, 20.0), range(8))) == {
                ProbeResult.ACCEPTED
            }
        assert probe_address(b.box.address, "some other cluster's secret", 20.0) is ProbeResult.REJECTED
        eventually(lambda: "it has another cluster secret" in caplog.text)
    eventually(lambda: "it broke off before it had shown" in caplog.text)
    assert "it does not speak this protocol" not in caplog.text


@pytest.mark.parametrize(
    ("secret", "expected"), [(SECRET, ProbeResult.ACCEPTED), ("some other cluster's secret", ProbeResult.REJECTED)]
)
def test_probe_reports_the_reason_for_no_answer(
    open_box: Callable[..., Reader], secret: str, expected: ProbeResult
) -> None:
    assert probe_address(open_box(B).box.address, secret, 20.0) is expected
    assert probe_address("tcp://127.0.0.1:9", secret, 0.1) is ProbeResult.NO_ANSWER
    assert probe_address("no address", secret, 0.1) is ProbeResult.NO_ANSWER


@pytest.mark.parametrize(
    "answer, waits, hint",
    [
        (
            ProbeResult.NO_ANSWER,
            "waiting for the owner at h:1: nothing answers there",
            "is `memserve serve --cluster-port`",
        ),
        (
            ProbeResult.REJECTED,
            "waiting for the owner at h:1: what listens there refuses the secret",
            "give the file",
        ),
        (ProbeResult.ACCEPTED, "waiting for the owner at h:1 to answer: it takes the secret", "is `memserve serve"),
    ],
)
def test_process_reports_why_no_router_answers(answer: ProbeResult, waits: str, hint: str) -> None:
    assert waiting_lines({"tcp://h:1": answer}, "the owner") == [waits]
    error = no_router_error({"tcp://h:1": answer}, "the owner")
    ends = "the owner at h:1 refuses the secret" if answer is ProbeResult.REJECTED else "no owner answers at h:1"
    assert error.message == ends and error.hint.startswith(hint)


def test_repeated_and_malformed_letters_are_dropped_and_counted(
    open_box: Callable[..., Reader], raw_push: Callable[..., zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """A recorded letter, sent again by a process that even has the key, is not delivered a second time."""
    b = open_box(B)
    push = raw_push(b.box.address, CurveKeys.derived_from(SECRET))
    letters = [wire.seal(A, "tcp://127.0.0.1:1", B, n, wire.encode(QueryKvEvents(n))) for n in (1, 2, 3)]
    for letter in (letters[0], letters[0], letters[2], letters[1], letters[2]):
        push.send(letter)
    eventually(lambda: b.box.counters.repeated == 3)
    assert [message.first for message in b.wait(2)] == [1, 3]
    other = Peer("a", 2)  # a new generation counts from the start
    push.send(wire.seal(other, "", B, 1, wire.encode(QueryKvEvents(4))))
    b.wait(3)
    push.send(b"")
    push.send(b"mss")
    push.send(letters[0][:-1])
    push.send_multipart([letters[0], b"more"])
    push.send(wire.seal(A, "", B, 9, b"\xc1"))
    push.send(wire.MAGIC + bytes([wire.VERSION + 1]) + letters[0][4:])
    eventually(lambda: b.box.counters.other_version == 1)
    assert caplog.text.count("rejected 127.0.0.1 at the cluster port: a message ") >= 2
    assert (b.box.counters.malformed, b.box.counters.received) == (5, 3)


def test_failing_callback_does_not_stop_the_mailbox(open_box: Callable[..., Reader]) -> None:
    a = open_box(A)
    fine: list[AnyMessage] = []

    def fragile(_sender: Peer, message: AnyMessage) -> None:
        if message == QueryKvEvents(0):
            raise RuntimeError("on purpose")
        fine.append(message)

    box = ZmqMailbox(B, ListenAddress(SECRET), fragile)
    try:
        a.box.connect(B, box.address)
        for n in range(3):
            a.box.send(B, QueryKvEvents(n))
        eventually(lambda: len(fine) == 2)
        assert box.counters.callback_errors == 1
    finally:
        box.close()


_CHILD = """
import sys, threading
from memserve.protocol.messages import Peer
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
secret, generation, port, parent = sys.argv[1:]
box = None
def echo(sender, message):
    box.send(sender, message)
box = ZmqMailbox(Peer("b", int(generation)), ListenAddress(secret, port=int(port)), echo)
box.connect(Peer("a", 1), parent)
print(box.address, flush=True)
sys.stdin.read()
box.close()
"""


def start_echo(parent: Reader, generation: int, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-c", _CHILD, SECRET, str(generation), str(port), parent.box.address]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_another_process_stopped_killed_and_started_again(open_box: Callable[..., Reader]) -> None:
    """The sender never waits; a restart at the same address hears what is meant for it, and nothing else."""
    a = open_box(A)
    child, address = start_echo(a, 1)
    second = None
    try:
        a.box.connect(B, address)
        a.box.send(B, Cancel("hello"))
        assert a.wait(1) == [Cancel("hello")]
        stop_process(child.pid)
        begin = time.monotonic()
        long = Cancel("x" * 4096)
        for _ in range(3 * SEND_QUEUE_MAX):
            a.box.send(B, long)
        assert time.monotonic() - begin < 5
        assert a.box.counters.lost_full > 0
        child.kill()
        child.wait()
        second, _ = start_echo(a, 2, int(address.rsplit(":", 1)[1]))
        a.box.connect(Peer("b", 2), address)
        a.box.send(Peer("b", 2), Cancel("again"))
        eventually(lambda: (Peer("b", 2), Cancel("again")) in a.heard)
        assert all(message == Cancel("again") for peer, message in a.heard if peer.generation == 2)
    finally:
        for process in (child, second):
            if process is not None:
                process.kill()
                process.wait()
                process.stdin.close()
                process.stdout.close()


def test_queued_letters_survive_until_the_receiver_opens(open_box: Callable[..., Reader]) -> None:
    """ZeroMQ keeps trying to connect: which end starts first does not matter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    a = open_box(A)
    a.box.connect(B, f"tcp://127.0.0.1:{port}")
    a.box.send(B, QueryKvEvents(1))
    b = open_box(B, port=port)
    assert b.wait(1) == [QueryKvEvents(1)]


def test_closing_lets_queued_letters_leave(open_box: Callable[..., Reader]) -> None:
    b = open_box(B)
    a = ZmqMailbox(A, ListenAddress(SECRET), lambda *_: None)
    a.connect(B, b.box.address)
    for n in range(100):
        a.send(B, QueryKvEvents(n))
    a.close()
    a.close()  # harmless
    a.send(B, QueryKvEvents(100))  # lost
    assert [message.first for message in b.wait(100)] == list(range(100))


def test_bad_arguments_are_the_users_errors(open_box: Callable[..., Reader]) -> None:
    a = open_box(A)
    with pytest.raises(UserError, match="cannot listen"):
        Reader(B, port=a.port)
    with pytest.raises(UserError, match="at least 16 characters"):
        Reader(B, secret="short")
    with pytest.raises(UserError, match="advertise"):
        ZmqMailbox(B, ListenAddress(SECRET, "0.0.0.0"), lambda *_: None)
    everywhere = ZmqMailbox(B, ListenAddress(SECRET, "0.0.0.0", advertise="127.0.0.1"), lambda *_: None)
    a.box.connect(B, everywhere.address)
    a.box.send(B, Leave())
    eventually(lambda: everywhere.counters.received == 1)
    everywhere.close()


def test_keys_follow_from_the_secret_and_stay_out_of_sight() -> None:
    keys = CurveKeys.derived_from(SECRET)
    assert keys == CurveKeys.derived_from(SECRET) != CurveKeys.derived_from(SECRET + "!")
    assert keys.secret.decode() not in repr(keys)


def test_many_lines_fit_into_a_process_that_may_have_few_files() -> None:
    """The soft limit is raised; every line is a socket and a signal."""
    script = """
import resource
from memserve.protocol.messages import Leave, Peer
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))
box = ZmqMailbox(Peer("a", 1), ListenAddress("the secret of this test"), lambda *_: None)
peers = [Peer(str(n), 1) for n in range(200)]
for peer in peers:
    box.connect(peer, box.address)
    box.send(peer, Leave())
print(box.counters.sent)
for peer in peers:
    box.disconnect(peer)
box.close()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "200", run.stderr


def test_lines_are_configured_to_bound_what_they_hold() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push = context.socket(zmq.PUSH)
    configure(push)
    assert (push.sndhwm, push.linger) == (SEND_QUEUE_MAX, 0)
    assert push.maxmsgsize == wire.FRAME_BYTES_MAX + 33, "with what CURVE adds"
    context.destroy()


def test_mailbox_moves_to_an_event_loop_and_back_to_a_thread(open_box: Callable[..., Reader]) -> None:
    """What was queued before the loop came is read; strangers are turned away in the loop as well."""
    a = open_box(A)
    where: list[str] = []
    box = ZmqMailbox(B, ListenAddress(SECRET), lambda _, message: where.append(threading.current_thread().name))
    a.box.connect(B, box.address)

    async def arrived(count: int) -> None:
        async with asyncio.timeout(10):
            while len(where) < count:
                await asyncio.sleep(0.001)

    async def read() -> None:
        time.sleep(0.05)  # letters come while nothing reads
        box.read_in(asyncio.get_running_loop())
        await arrived(600)
        for n in range(600):
            a.box.send(B, QueryKvEvents(n))
        await arrived(1200)
        found = await asyncio.to_thread(probe_address, box.address, "the secret of another cluster", 10)
        assert found is ProbeResult.REJECTED
        async with asyncio.timeout(10):
            while not box.counters.handshakes_failed:
                await asyncio.sleep(0.001)
        box.read_in(None)
        a.box.send(B, Leave())
        await arrived(1201)

    try:
        for n in range(600):
            a.box.send(B, QueryKvEvents(n))
        asyncio.run(read())
        mine = threading.current_thread().name
        assert where[1199] == mine and where[1200] == "mailbox b"
        assert box.counters.received == 1201
    finally:
        box.close()


@pytest.mark.parametrize("closer", ["loop", "thread", "later"])
def test_a_mailbox_that_a_loop_reads_can_be_closed(closer: str) -> None:
    """In the loop, from another thread while it runs, and after it has ended."""
    box = ZmqMailbox(B, ListenAddress(SECRET), lambda *_: None, gives_way=True)

    async def read() -> None:
        box.read_in(asyncio.get_running_loop())
        if closer == "loop":
            box.close()
        elif closer == "thread":
            await asyncio.to_thread(box.close)
        await asyncio.sleep(0)  # the loop goes on without the sockets

    asyncio.run(read())
    box.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(box.address.rpartition(":")[2])), timeout=5)
    assert "mailbox b" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("cores", "gives_way", "policy"), [(1, True, "BATCH"), (1, False, "OTHER"), (2, True, "OTHER")]
)
def test_mailbox_thread_yields_on_a_core_of_its_own(cores: int, gives_way: bool, policy: str) -> None:
    """ZeroMQ's own threads alone: those of Python stay as they are."""
    here = sorted(os.sched_getaffinity(0))
    if len(here) < cores:
        pytest.skip("this machine has one core")
    script = f"""
import os, time
from memserve.protocol.messages import Peer
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
os.sched_setaffinity(0, {here[:cores]})
box = ZmqMailbox(Peer("a", 1), ListenAddress("the secret of this test"), lambda *_: None, gives_way={gives_way})
threads, until_s = [], time.monotonic() + 30
while not any("IO" in name for name, _ in threads):  # they name themselves when they first run
    assert time.monotonic() < until_s, threads
    threads = [(open(f"/proc/self/task/{{task}}/comm").read(), int(task)) for task in os.listdir("/proc/self/task")]
for name, task in threads:
    wanted = os.SCHED_{policy} if name.startswith("ZMQ") else os.SCHED_OTHER
    assert os.sched_getscheduler(task) == wanted, (name, os.sched_getscheduler(task))
print(sum("IO" in name for name, _ in threads))
box.close()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "1", run.stderr
