"""What /proc shows of real processes that wait: for a mutex, a pipe, a socket, a lock, or nobody."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from processes import awaited, child, child_of, linux_only, seen

from torchmedic.records.process import FutexWait, ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import file_locks, futexes, last_run, process, sockets, syscalls, tree, waits
from torchmedic.supervise.proc.futexes import numbers_of

pytestmark = linux_only

MUTEX = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_init(ctypes.byref(mutex), None)
taken = threading.Event()
def hold():
    libc.pthread_mutex_lock(ctypes.byref(mutex))
    taken.set()
    time.sleep(100)
threading.Thread(target=hold, daemon=True).start()
taken.wait()
if os.fork() == 0:
    libc.pthread_mutex_lock(ctypes.byref(mutex))
libc.pthread_mutex_lock(ctypes.byref(mutex))
"""


def test_the_owner_of_a_mutex_and_of_one_inherited_through_fork() -> None:
    with child(MUTEX) as started:
        parent = seen(started.pid, lambda view: any(wait.owner for wait in view.futexes if wait.tid == view.pid))
        (wait,) = (wait for wait in parent.futexes if wait.tid == started.pid)
        holder = next(thread.tid for thread in parent.threads if thread.tid != started.pid)
        assert (wait.owner, wait.owner_lives) == (holder, True)

        forked = child_of(started.pid, lambda view: view.futexes)
        (wait,) = forked.futexes
        assert (wait.owner, wait.owner_lives, wait.owner_process) == (holder, False, started.pid)
        assert not wait.timed


def test_what_is_no_mutex_has_no_owner() -> None:
    """Python's locks, conditions and its GIL, and the end of a thread."""
    source = """
    import ctypes, re, threading, time
    libc = ctypes.CDLL(None)
    lock, condition = threading.Lock(), threading.Condition()
    lock.acquire()
    def wait():
        with condition:
            condition.wait()
    threading.Thread(target=wait).start()
    threading.Thread(target=lambda: lock.acquire(timeout=100)).start()
    pausing = ctypes.c_ulong()  # not one of Python's, which are detached
    libc.pthread_create(ctypes.byref(pausing), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)
    threading.Thread(target=libc.pthread_join, args=(pausing, None)).start()
    input()
    threading.Thread(target=lambda: re.match("(a?){40}a{40}", "a" * 40)).start()
    lock.acquire()
    """
    with child(source, stdin=subprocess.PIPE) as started:
        # None of them comes to its wait any more once somebody keeps the GIL.
        seen(started.pid, lambda view: len(view.futexes) == 3 and _pausing(view) and view.main.syscall == "read")
        started.stdin.write(b"\n")
        started.stdin.flush()
        view = seen(
            started.pid,
            lambda view: (
                any(wait.tid == view.pid and wait.timed for wait in view.futexes)
                and any(thread.state == "R" for thread in view.threads)
            ),
        )
        assert [wait.owner for wait in view.futexes] == [None] * 4
        assert [wait.joins for wait in view.futexes if wait.joins] == _pausing(view)

        # The main thread wants the GIL: it wakes every 5 ms to ask for it, and uses no CPU to speak of.
        rates = awaited(lambda: _asking(view))
        busiest = max(rates.threads, key=lambda thread: thread.cpu)
        assert busiest.tid != started.pid
        assert busiest.busy > 3 * rates.main.busy


def _pausing(view: ProcessView) -> list[int]:
    return [thread.tid for thread in view.threads if thread.syscall in ("pause", "ppoll")]


def _asking(before: ProcessView) -> ProcessView | None:
    """Who has no core does not show what it wants it for."""
    time.sleep(0.2)
    (rates,) = tree.compare_all([before], tree.tree(before.pid))
    return rates if rates.main.wakes > 20 else None


def test_bytes_that_only_resemble_a_mutex_name_nobody() -> None:
    def owner(lock: int, count: int, who: int, users: int, kind: int, *, rest: bytes = bytes(20)) -> int | None:
        return futexes._owner(struct.pack("<IIIII", lock, count, who, users, kind) + rest, 2, 0)

    assert owner(2, 0, 77, 1, 0) == 77
    assert owner(2, 1, 77, 1, 1) == 77, "recursive"
    assert owner(1, 0, 77, 1, 0) is None, "locked, but nobody waits"
    assert owner(2, 0, 0, 0, 0) is None, "a bare word: the lock of an allocator's arena"
    assert owner(2, 1, 77, 0x7F40, 0) is None, "a count and a pointer: the lock of a stream"
    assert owner(2, 0, 77, 1, 0x5000) is None, "no kind of mutex"
    assert owner(2, 0, 77, 1, 0, rest=bytes(12) + b"\x01" * 8) is None, "something else follows"


def test_pipes_and_who_is_at_the_other_end() -> None:
    read_end, write_end = os.pipe()
    with (
        child("import os\nwhile True: os.write(1, b'x' * 4096)", stdout=subprocess.PIPE) as full,
        child("input()", stdin=read_end) as asks,
        child("import select; select.select([0], [], [], 100)", stdin=read_end) as selects,
        child("import select; p = select.poll(); p.register(0, select.POLLIN); p.poll()", stdin=read_end) as polls,
        child("import select; p = select.epoll(); p.register(0); p.poll()", stdin=read_end) as epolls,
    ):
        (wait,) = seen(full.pid, _is_in("write")).files
        assert (wait.action, wait.descriptor, wait.peers) == ("write", 1, (os.getpid(),))
        (wait,) = seen(asks.pid, _is_in("read")).files
        assert (wait.action, wait.descriptor, wait.peers) == ("read", 0, (os.getpid(),))
        assert wait.target.startswith("pipe:")
        for poller, timed in ((selects, True), (polls, False), (epolls, False)):
            (wait,) = seen(poller.pid, _is_in("poll")).files
            assert (wait.action, wait.descriptor, wait.wants, wait.timed) == ("poll", 0, "read", timed)
            assert wait.peers == (os.getpid(),)
    os.close(read_end)
    os.close(write_end)


def _is_in(action: str) -> Callable[[ProcessView], bool]:
    """Asleep in such a call on one of its standard streams or sockets, not on a file that it starts with."""
    return lambda view: any(
        wait.action == action and (wait.descriptor < 2 or wait.connection or wait.target.startswith("socket:"))
        for wait in view.files
    )


def test_sockets_and_the_process_at_the_other_end() -> None:
    duplex = """
    import os, socket, time
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        time.sleep(100)
    theirs.close()
    ours.recv(1)
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port})).recv(1)"
        with child(connect) as client, child(duplex) as pair:
            (wait,) = seen(client.pid, _is_in("read")).files
            assert wait.peers == (os.getpid(),), "nobody has accepted, but this one listens"
            accepted, _ = server.accept()
            (wait,) = seen(client.pid, _is_in("read")).files
            assert (wait.action, wait.remote, wait.connection) == ("read", f"127.0.0.1:{port}", "ESTABLISHED")
            assert wait.peers == (os.getpid(),)
            accepted.close()

            (wait,) = seen(pair.pid, _is_in("read")).files
            assert wait.peers == (child_of(pair.pid).pid,)


def test_addresses_of_both_kinds() -> None:
    assert sockets._address("0100007F:1F90") == "127.0.0.1:8080"
    assert sockets._address("00000000000000000000000001000000:0050") == "[::1]:80"
    assert sockets._address("0000000000000000FFFF00000100007F:1F90") == "127.0.0.1:8080"


def test_file_locks_name_their_holder(tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    path.touch()
    heir = f"""
    import fcntl, os, time
    file = open({str(path)!r}, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    if os.fork() == 0:
        time.sleep(100)
    os._exit(0)
    """
    wants = "import fcntl; fcntl.{}(open({!r}, 'r+'), fcntl.LOCK_EX)"
    with open(path, "r+") as file:
        for call in ("flock", "lockf"):
            getattr(fcntl, call)(file, fcntl.LOCK_EX)
            with child(wants.format(call, str(path))) as waits_for_it:
                (lock,) = seen(waits_for_it.pid, lambda view: view.locks).locks
            assert (lock.path, lock.holder, lock.holder_lives) == (str(path), os.getpid(), True)
            assert lock.age is not None
            assert "python" in lock.command
            getattr(fcntl, call)(file, fcntl.LOCK_UN)
    with child(heir) as dead:
        dead.wait()
        with child(wants.format("flock", str(path))) as waits_for_it:
            (lock,) = seen(waits_for_it.pid, lambda view: view.locks).locks
        assert not lock.holder_lives
        assert process.read(lock.holder) is not None
        assert lock.holder != dead.pid
        os.kill(lock.holder, signal.SIGKILL)


def test_lines_of_proc_locks() -> None:
    listing = "1: FLOCK  ADVISORY  WRITE 11 fe:00:7 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 12 fe:00:7 0 EOF\nnonsense\n"
    held, waiter = file_locks.entries(listing)
    assert (held.pid, held.waits, waiter.pid, waiter.waits) == (11, False, 12, True)


def test_states_of_a_tree_with_a_dead_child_and_an_orphan() -> None:
    source = """
    import os, signal, sys, time
    killed = os.fork()
    if killed == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            time.sleep(100)
        os._exit(0)
    os.waitpid(middle, 0)
    print("ready", flush=True)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGSTOP)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "SECRET": "x"}
    with child(source, stdout=subprocess.PIPE, env=environment) as started:
        assert started.stdout is not None
        started.stdout.readline()
        stopped = seen(started.pid, lambda view: view.state == "T")
        assert stopped.environment["OMP_NUM_THREADS"] == "3"
        assert "SECRET" not in stopped.environment
        assert stopped.caught_signals >> (signal.SIGUSR1 - 1) & 1
        assert abs(stopped.started - time.time()) < 60
        assert stopped.rss > 1 << 20
        family = tree.tree(started.pid)
        assert family[0].pid == started.pid
        (dead,) = (view for view in family if view.state == "Z")
        assert (dead.parent, dead.exit_status) == (started.pid, -signal.SIGKILL)
        (orphan,) = (view for view in family if view.parent not in (started.pid, stopped.parent))
        seen(orphan.pid, lambda view: view.main and view.main.syscall == "clock_nanosleep")


def test_rates_between_two_looks() -> None:
    source = """
    import os
    zero, null = os.open("/dev/zero", os.O_RDONLY), os.open("/dev/null", os.O_WRONLY)
    while True:
        os.write(null, os.read(zero, 1 << 16))
    """
    with child(source) as started:
        before = seen(started.pid, lambda view: view.io and view.io[1] > 1 << 20)
        later = seen(started.pid, lambda view: view.io[1] > before.io[1] + (1 << 30))
        (after,) = tree.compare_all([before], [later])
        assert after.elapsed == later.taken - before.taken
        assert after.busy == pytest.approx((later.main.cpu - before.main.cpu) / after.elapsed)
        assert after.busy > 0
        assert after.bytes_read == pytest.approx((later.io[0] - before.io[0]) / after.elapsed)
        assert after.bytes_written == pytest.approx((later.io[1] - before.io[1]) / after.elapsed)
    another = msgspec.structs.replace(after, started=after.started + 100, taken=after.taken + 1, busy=None)
    assert tree.compare(before, another).busy is None, "the number belongs to another process now"


def test_how_long_a_thread_has_not_run() -> None:
    """Known at the first look, and no worse than by two looks: the clocks of the CPUs differ."""
    begun = time.monotonic()
    with child("import time; time.sleep(100)") as started:
        seen(started.pid, lambda view: view.main and view.main.syscall == "clock_nanosleep")
        since = time.monotonic()
        time.sleep(0.5)
        least = time.monotonic() - since
        (view,) = waits.with_waits(tree.tree(started.pid))
        assert view.main is not None
        if view.main.asleep is None:
            pytest.skip("this kernel keeps no notes")
        assert least - 0.1 < view.main.asleep < time.monotonic() - begun + 0.1
        (view,) = waits.with_waits(tree.compare_all([view], tree.tree(started.pid)))
        assert view.main is not None
        assert view.main.asleep is not None
        assert view.main.asleep >= view.elapsed
    awake = ThreadView(tid=1, state="S", wakes=3.0)
    assert last_run._checked(500.0, awake, 1.5) == 1.5, "it woke in between"
    assert last_run._checked(None, msgspec.structs.replace(awake, wakes=0.0), 1.5) == 1.5
    assert last_run._checked(None, awake, 1.5) is None


def test_python_and_the_kernel_number_threads_differently() -> None:
    source = """
    import threading, time
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    print(*(f"{t.ident} {t.native_id}" for t in threading.enumerate()), flush=True)
    while True: pass
    """
    with child(source, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        words = [int(word) for word in started.stdout.readline().split()]
        known = dict(zip(words[::2], words[1::2], strict=True))
        assert numbers_of(started.pid, known) == known, "sleeping threads, and one that runs"
        assert numbers_of(started.pid, [*known, 4096]) == known, "one that is gone"
    assert numbers_of(started.pid, known) == {}


def test_a_process_that_vanishes_is_no_error() -> None:
    with child("import time; time.sleep(100)") as started:
        view = seen(started.pid, lambda view: view.main and view.main.syscall == "clock_nanosleep")
        fake = ThreadView(tid=started.pid, state="S", syscall="poll", arguments=(4096, 3, 0, 0, 0, 0))
        futex = ThreadView(tid=started.pid, state="S", syscall="futex", arguments=(4096, 0x80, 2, 0, 0, 0))
        unlucky = msgspec.structs.replace(view, threads=(fake, futex))
        (blind,) = waits.with_waits([unlucky])
        assert blind.files == ()
        assert blind.futexes == (FutexWait(tid=started.pid),)
    assert process.read(started.pid) is None
    assert tree.tree(started.pid) == ()
    (gone,) = waits.with_waits([unlucky])
    assert gone.files == ()
    assert tree.compare(view, view) is view


def test_where_calls_are_hidden_the_kernel_still_says_where_a_thread_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `kernel.yama.ptrace_scope = 1`: no system calls and no memory, even of one's own processes."""
    path = tmp_path / "cache.lock"
    path.touch()
    monkeypatch.setattr(process, "text", lambda name: None if str(name).endswith("/syscall") else text(name))
    for module in (futexes, waits):
        monkeypatch.setattr(module, "peek", lambda *arguments, **options: b"")
    asks, answers = os.pipe()
    master, slave = os.openpty()
    with (
        open(path, "r+") as file,
        child("import os\nwhile True: os.write(1, b'x' * 4096)", stdout=subprocess.PIPE) as full,
        child("input()", stdin=asks) as reads,
        child("input()", stdin=slave) as types,
        child("import os; os.pipe(); input()", stdin=asks) as unclear,
        child("import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()") as locks,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        with child(f"import fcntl; fcntl.flock(open({str(path)!r}), fcntl.LOCK_EX)") as flocks:
            (wait,) = seen(full.pid, _is_in("write")).files
            assert (wait.action, wait.descriptor, wait.peers) == ("write", 1, (os.getpid(),))
            view = seen(reads.pid, _is_in("read"))
            assert not view.open_to_us
            assert view.main is not None
            assert (view.main.syscall, view.files[0].descriptor) == ("read", 0)
            (wait,) = seen(types.pid, _is_in("read")).files
            assert wait.target.startswith("/dev/pts/")
            (lock,) = seen(flocks.pid, lambda view: view.locks).locks
            assert (lock.holder, lock.path) == (os.getpid(), str(path))
            view = seen(unclear.pid, lambda view: view.main and view.main.syscall == "read")
            assert view.files == (), "two pipes can be meant"
            assert seen(locks.pid, lambda view: view.main and view.main.syscall == "futex").futexes == ()
    for descriptor in (asks, answers, master, slave):
        os.close(descriptor)


def test_many_threads_that_come_and_go() -> None:
    source = """
    import threading, time
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    while True:
        threading.Thread(target=int).start()
    """
    with child(source) as started:
        before = seen(started.pid, lambda view: len(_sleeping(view)) == 100)
        for _ in range(5):
            (view,) = waits.with_waits(tree.compare_all([before], tree.tree(started.pid)))
            assert len(_sleeping(view)) == 100
            assert all(thread.busy is not None for thread in view.threads)


def _sleeping(view: ProcessView) -> list[ThreadView]:
    return [thread for thread in view.threads if thread.syscall == "clock_nanosleep"]


def test_without_proc_there_are_no_answers(tmp_path: Path) -> None:
    assert process.read(1, proc=tmp_path / "none") is None
    assert tree.tree(1, proc=tmp_path) == ()
    assert waits.with_waits([ProcessView(pid=1)], proc=tmp_path) == (ProcessView(pid=1),)
    assert numbers_of(1, [1], proc=tmp_path) == {}


@pytest.mark.parametrize(
    ("line", "machine", "wanted"),
    [
        ("202 0x10 0x80 0x2 0x0 0x0 0x0 0x7ff0 0x7f00\n", "x86_64", "futex"),
        ("98 0x10 0x80 0x2 0x0 0x0 0x0 0x7ff0 0x7f00\n", "aarch64", "futex"),
        ("9999 0x0 0x0 0x0 0x0 0x0 0x0 0x7ff0 0x7f00\n", "x86_64", "9999"),
    ],
)
def test_names_of_calls(line: str, machine: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "_HERE", syscalls._BY_MACHINE[machine])
    call, arguments, pointer = syscalls.parse(line)
    assert (call, len(arguments), pointer) == (wanted, 6, 0x7FF0)
    assert syscalls.parse("running\n") == ("running", (), 0)
    assert syscalls.parse("-1 0x7ff0 0x7f00") == ("", (), 0x7FF0)
    assert syscalls.parse("") == ("", (), 0)


def test_stat_of_a_process_with_an_odd_name(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    (folder / "task" / "7").mkdir(parents=True)
    fields = "S 1 7 7 0 -1 0 0 0 5 0 150 50 0 0 20 0 1 0 100 0 10" + " 0" * 30
    (folder / "stat").write_text(f"7 (a) b ( c) {fields}\n")
    (folder / "task" / "7" / "stat").write_text(f"7 (a) b ( c) {fields}\n")
    view = process.read(7, proc=tmp_path)
    assert view is not None
    assert (view.name, view.state, view.parent, view.open_to_us) == ("a) b ( c", "S", 1, False)
    assert view.cpu == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))


def test_a_process_that_nobody_has_asked_for_its_status_is_not_alive() -> None:
    """Whoever waits for it would pass for a process that makes progress by its children."""
    pid = os.fork()
    if pid == 0:
        time.sleep(0.2)
        os._exit(3)
    try:
        assert process.is_alive(pid)
        assert awaited(lambda: process.stat_of(pid).state == "Z")
        assert not process.is_alive(pid)
    finally:
        os.waitpid(pid, 0)
    assert not process.is_alive(pid)
