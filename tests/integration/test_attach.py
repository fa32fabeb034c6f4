"""`torchmedic attach` on real processes that hang, that work, and that are not for us. Nothing is done to them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from processes import awaited, child, child_of, is_gone, linux_only, seen

from torchmedic import cli
from torchmedic.errors import UsageError
from torchmedic.records import Report
from torchmedic.records.inside import PyFrame, PyThread
from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.records.stall import Stall
from torchmedic.supervise.attach import looks, stacks, targets, verdict
from torchmedic.supervise.attach.attach import Answer, attach, resolve
from torchmedic.supervise.proc import process, pyspy, tree

pytestmark = linux_only
with_stacks = pytest.mark.skipif(
    pyspy.executable() is None or sys.version_info >= (3, 15), reason="py-spy must be there and know this Python"
)

STUCK = """
import threading
lock = threading.Lock()
def step():
    lock.acquire()
    lock.acquire()
step()
"""


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "LONG_SECONDS", 0.3)


def written(folder: Path, source: str) -> str:
    """Code that runs a script of this source, so that its lines are a file's."""
    path = folder / "train.py"
    path.write_text(source)
    return f"__file__ = {str(path)!r}; exec(compile(open(__file__).read(), __file__, 'exec'))"


def look(pid: int) -> Answer:
    """A verdict; another one where py-spy was too slow to see the stacks of all."""

    def seen_by_all() -> Answer | None:
        answer = attach(pid, seconds=0.6)
        return answer if not any("not seen" in note for note in answer.notes) else None

    return awaited(seen_by_all)


def waiting(pid: int) -> ProcessView:
    return seen(pid, lambda view: view.main is not None and view.main.syscall == "futex")


@with_stacks
def test_a_process_that_stands_still(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with child(written(tmp_path, STUCK)) as started:
        waiting(started.pid)
        before = process.read(started.pid)
        status = cli.main(["attach", "--seconds", "0.6", str(started.pid)])
        out, err = capsys.readouterr()
        assert status == 1, err
        assert out == ""
        assert "error[TM5" in err
        assert "train.py:6" in err
        assert "not seen" not in err
        assert cli.main(["attach", "--seconds", "0.6", "--format", "json", str(started.pid)]) == 1
        report = msgspec.json.decode(capsys.readouterr().out, type=Report)
        assert report.outcome.symptom == "hang"
        place = report.diagnoses[0].cause_location
        assert place is not None
        assert place.line == 6
        # It has not run at all meanwhile, so it was neither stopped nor sent anything.
        after = process.read(started.pid)
        assert before is not None
        assert after is not None
        assert [thread.switches for thread in after.threads] == [thread.switches for thread in before.threads]


@with_stacks
def test_processes_that_work(tmp_path: Path) -> None:
    source = """
import math
def step(x):
    for n in range(1000):
        x += math.sqrt(n)
    return x
while True:
    step(0)
"""
    with (
        child(written(tmp_path, source)) as busy,
        child("while True: pass") as spins,
        child("import time; time.sleep(100)") as sleeps,
    ):
        for started in (busy, spins, sleeps):
            seen(started.pid, lambda view: view.cpu > 0.1 or view.main.syscall == "clock_nanosleep")
        for started in (busy, spins):
            answer = look(started.pid)
            assert not answer.hung, answer
            assert answer.lines or answer.diagnoses
        answer = look(sleeps.pid)
        assert not answer.hung, answer


@with_stacks
def test_a_lock_inherited_through_fork(tmp_path: Path) -> None:
    source = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
mutex, taken = ctypes.create_string_buffer(64), threading.Event()
def hold():
    libc.pthread_mutex_lock(ctypes.byref(mutex)); taken.set()
    time.sleep(100)
threading.Thread(target=hold, daemon=True).start()
taken.wait()
def native_call():
    libc.pthread_mutex_lock(ctypes.byref(mutex))
child = os.fork()
if child == 0:
    native_call()
os.waitpid(child, 0)
"""
    with child(written(tmp_path, source)) as started:
        seen(started.pid, lambda view: view.main is not None and view.main.syscall == "wait4")
        child_of(started.pid, lambda view: view.futexes)
        answer = look(started.pid)
        (diagnosis,) = answer.diagnoses
        assert (diagnosis.code, diagnosis.grade) == ("TM503", "proven")
        place = diagnosis.cause_location
        assert place is not None
        assert place.line == 11


@with_stacks
def test_a_call_that_holds_the_gil(tmp_path: Path) -> None:
    source = """
import re, threading, time
def beat():
    while True:
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
re.match("(a?){40}a{40}", "a" * 40)
"""
    with child(written(tmp_path, source)) as started:
        seen(started.pid, lambda view: any(wait.timed and wait.tid != view.pid for wait in view.futexes))
        # Who asks for the GIL must come to a core to be seen to do so.
        found = awaited(lambda: [each for each in look(started.pid).diagnoses if each.code == "TM501"])
        (diagnosis,) = found
        place = diagnosis.cause_location
        assert place is not None
        assert place.line == 7


@with_stacks
def test_ranks_below_a_launcher_are_told_once(tmp_path: Path) -> None:
    path = tmp_path / "rank.py"
    path.write_text(STUCK)
    source = f"""
    import os, subprocess, sys
    for rank in range(2):
        variables = {{**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}}
        subprocess.Popen([sys.executable, "-S", {str(path)!r}], env=variables)
    os.wait()
    """
    with child(source) as launcher:
        seen(launcher.pid, lambda view: view.main is not None and view.main.syscall == "wait4")
        for number in tree.pids(launcher.pid)[1:]:
            waiting(number)
            assert targets.root_of_job(number) == launcher.pid  # to attach to one rank is to attach to all
        assert targets.root_of_job(launcher.pid) == launcher.pid
        # py-spy may be too slow for one of them, which is then another finding.
        answer = awaited(lambda: found if len((found := look(launcher.pid)).diagnoses) == 1 else None)
        (diagnosis,) = answer.diagnoses
        assert answer.hung
        assert diagnosis.evidence[-1] == "the same holds for 2 ranks: 0, 1"


def test_without_py_spy_the_kernel_alone_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pyspy, "executable", lambda: None)
    with child(STUCK) as started:
        waiting(started.pid)
        assert cli.main(["attach", "--seconds", "0.6", str(started.pid)]) == 1
        err = capsys.readouterr().err
        assert "TM590" in err
        assert "waits in `futex`" in err
        assert "pip install 'torchmedic[py-spy]'" in err


def test_one_process_of_several_that_py_spy_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = PyThread(ident=1, tid=7, main=True, frames=(PyFrame(file="train.py", line=1, function="f"),))
    dumps = {7: pyspy.Dump(threads=(thread,)), 8: pyspy.Dump(failure="py-spy did not answer")}
    monkeypatch.setattr(pyspy, "executable", lambda: "py-spy")
    monkeypatch.setattr(pyspy, "dump", lambda pid, **options: dumps[pid])
    taken = stacks.Stacks([7, 8])
    assert taken.unseen() == []
    taken.take(native=False)
    assert (taken.failure, taken.unseen()) == ("", [8])


def test_one_line_for_what_cannot_be_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def complaint(*arguments: str) -> str:
        assert cli.main(["attach", "--seconds", "0.5", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        return err

    assert "there is no process" in complaint("2147483646")
    assert "not a process id" in complaint("train.py")
    assert "not between" in complaint("--seconds", "0", "1")
    with subprocess.Popen(["sleep", "100"]) as sleep:
        try:
            assert "is no Python process" in complaint(str(sleep.pid))
        finally:
            sleep.kill()
    with child("import os\nif os.fork() == 0: os._exit(3)\nimport time; time.sleep(100)") as parent:
        dead = None
        while dead is None:
            numbers = targets.below(parent.pid, tuple(filter(None, map(process.read, tree.pids(parent.pid)))))
            dead = next((view for view in numbers if view.state == "Z"), None)
        assert "is dead (exit status 3)" in complaint(str(dead.pid))
    if (kernel := process.read(2)) is not None and kernel.name == "kthreadd":
        assert "thread of the kernel" in complaint("2")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs the /proc of Linux" in complaint("1")


def test_a_process_that_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(started: subprocess.Popen[bytes], is_over: Callable[[], object]) -> None:
        seen(started.pid, lambda view: view.main.syscall == "clock_nanosleep")

        def meanwhile(moment: float) -> None:
            started.send_signal(signal.SIGTERM)
            awaited(is_over)

        monkeypatch.setattr(looks, "_sleep_until", meanwhile)
        with pytest.raises(UsageError, match="ended while"):
            look(started.pid)

    with child("import time; time.sleep(100)") as zombie:
        ended(zombie, lambda: is_gone(zombie.pid))
    with child("import time; time.sleep(100)") as gone:
        ended(gone, lambda: gone.poll() is not None)


def test_the_number_of_a_thread_stands_for_its_process() -> None:
    with child("import threading, time; threading.Thread(target=time.sleep, args=(100,)).start()") as started:
        view = seen(started.pid, lambda view: len(view.threads) == 2)
        assert resolve(view.threads[1].tid) == started.pid


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="takes root to become somebody else")
def test_as_another_user() -> None:
    look_at = "import sys; from torchmedic.cli import main; sys.exit(main(['attach', '--seconds', '0.5', sys.argv[1]]))"
    with child("import time; time.sleep(100)") as started:
        done = subprocess.run(
            [
                "setpriv",
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                sys.executable,
                "-c",
                look_at,
                str(started.pid),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
        )
    if "Permission denied" in done.stderr or "No module named" in done.stderr:
        pytest.skip("that user cannot read this Python")
    assert done.returncode == 2, done.stderr
    assert f"process {started.pid} (python" in done.stderr
    assert "belongs to root: try `sudo " in done.stderr
    assert done.stderr.count("\n") == 1


def test_who_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def view(pid: int, parent: int, *command: str, **variables: str) -> ProcessView:
        return ProcessView(pid=pid, parent=parent, command=("python", *command), state="S", environment=variables)

    users: set[int] = set()
    monkeypatch.setattr(targets, "has_torch", lambda each: each.pid in users)

    def trains(*views: ProcessView) -> list[int]:
        return [each.pid for each in targets.training(views, {each.pid for each in views})]

    users = {1, 2, 3}
    shell, script = view(1, 0), view(2, 1, "train.py")
    assert trains(shell, script) == [1, 2], "both use torch"
    users = {2, 3}
    assert trains(shell, script, view(3, 2, "-c", "from multiprocessing.resource_tracker import main")) == [2]
    ranks = [view(2, 1, RANK="0"), view(3, 1, RANK="1"), view(4, 3, RANK="1")]
    assert trains(shell, *ranks) == [2, 3], "a worker has the variables of its rank"
    users = set()
    assert trains(shell, script) == [1], "no torch at all"


def test_what_only_takes_its_time_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that goes by the run's own clock has none here: it is believed once the wait is long."""
    monkeypatch.setattr(verdict, "LONG_SECONDS", 10.0)

    def judged(asleep: float) -> verdict.Verdict:
        main = ThreadView(tid=7, state="S", syscall="futex", asleep=asleep)
        view = ProcessView(pid=7, state="S", threads=(main,), elapsed=2.0, busy=0.0)
        return verdict.judge(Stall(pid=7, still=2.0, limit=2.0, attached=True, processes=(view,)), ())

    assert judged(3.0).state == "unclear"
    assert judged(30.0).state == "hung"


LOCKS = """
import os, threading, time
class Cache:
    def __init__(self):
        self.lock = threading.Lock()
    def refresh(self):
        with self.lock:
            time.sleep(100)
    def get(self):
        with self.lock:
            return 1
def crossed(first, second, then):
    with first:
        then.wait()
        with second:
            pass
if KIND == "order":
    one, two, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
    def other():
        with two:
            both.wait()
            with one:
                pass
    threading.Thread(target=other, daemon=True).start()
    with one:
        both.wait()
        with two:
            pass
elif KIND == "arguments":
    one, two, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
    threading.Thread(target=crossed, args=(two, one, both), daemon=True).start()
    crossed(one, two, both)
elif KIND == "fork":
    cache = Cache()
    threading.Thread(target=cache.refresh, daemon=True).start()
    while not cache.lock.locked(): time.sleep(0.01)
    child = os.fork()
    if child == 0:
        cache.get()
    os.waitpid(child, 0)
elif KIND == "others":
    cache, another = Cache(), Cache()
    threading.Thread(target=cache.refresh, daemon=True).start()
    threading.Thread(target=another.get, daemon=True).start()
    while not cache.lock.locked(): time.sleep(0.01)
    cache.get()
"""


@with_stacks
@pytest.mark.parametrize(
    ("kind", "code", "line"), [("order", "TM502", 27), ("arguments", "TM502", 15), ("fork", "TM503", 10)]
)
def test_locks_of_python_are_known_by_their_lines(tmp_path: Path, kind: str, code: str, line: int) -> None:
    with child(written(tmp_path, f"KIND = {kind!r}{LOCKS}")) as started:
        if kind == "fork":
            child_of(started.pid, lambda view: view.main is not None and view.main.syscall == "futex")
        else:
            seen(started.pid, lambda view: [each.syscall for each in view.threads] == ["futex", "futex"])
        answer = look(started.pid)
        assert answer.hung, answer
        (diagnosis,) = answer.diagnoses
        place = diagnosis.cause_location
        assert place is not None
        assert (diagnosis.code, diagnosis.grade, place.line) == (code, "proven", line)


@with_stacks
def test_a_lock_that_another_thread_holds_for_long_is_no_deadlock(tmp_path: Path) -> None:
    with child(written(tmp_path, f"KIND = 'others'{LOCKS}")) as started:
        seen(started.pid, lambda view: view.main is not None and view.main.syscall == "futex")
        answer = look(started.pid)
        assert "TM502" not in {diagnosis.code for diagnosis in answer.diagnoses}
