"""Run folders with seeded damage: each verb ends soon, says one line at most, and touches nothing else."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_hostile_folders import FOUND, write_run

from torchmedic.assist import reading as assist
from torchmedic.cli import main
from torchmedic.errors import TorchmedicError
from torchmedic.observe.step import blackbox
from torchmedic.records import encode
from torchmedic.repro import check
from torchmedic.runfolder import files, ring

VERBS: tuple[tuple[str, ...], ...] = (
    *(("report", "--format", name) for name in ("full", "concise", "json", "github", "sarif", "markdown", "prompt")),
    ("report", "--html"),
    ("watch",),
    ("repro",),
    ("try", "--release"),
)
# Beside what `write_run` and the rings of a process make.
OTHERS = {
    ".supervisor": '{"pid": 999999, "time": 1.0}',
    "gpu.json": '{"driver": "1", "gpus": [{"index": 0, "uuid": "GPU-1", "name": "x", "ordinal": 0}]}',
    "settings.json": '{"format": "json"}',
    ".confidential": "/dev/shm/torchmedic-confidential-x",
    "stall.json": "{}",
    "rank0/events.jsonl": '{"kind": "start", "pid": 5, "box": 3}\n{"kind": "memory", "time": 2.0, "rss": 5}\n',
    "rank0/rank.json": '{"rank": 0}',
    "rank0/diagnosis-0.json": encode(FOUND).decode(),
}
WILD: tuple[Any, ...] = (
    *(None, True, -1, 2**31, 2**63, 10**30, 1e308, "", "\x1b[31m", "\ud800", "\0", "\u202e", "x" * 100_000, "a\nb"),
    *("../../etc/passwd", "/dev/zero", "a\0.py", [], {}, [[]], ["a"] * 3000, {"a": {"b": 1}}, [[[[[0]]]]]),
)
Damage = Callable[[Path, random.Random, Path], None]


def build(run: Path) -> Path:
    write_run(run)
    held = {f"held/{os.getpid()}.json": f'{{"pid": {os.getpid()}, "code": "TM201", "until": 4e9}}'}
    for name, text in {**OTHERS, **held}.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
    box = blackbox.FileBox(run / "rank0" / files.BLACK_BOX)
    box.write(1, 1, 0, 1, "train.py", 3, 1 << 20, 0)
    calls = ring.Ring(run / "rank0" / ring.FILE, 0, 2)
    calls.write(ring.described("all_reduce", "0", ((3,),), ("float32",), None), 1, calls.enter((("a.py", 3, "f"),)))
    return run


def bits(path: Path, rng: random.Random, outside: Path) -> None:
    data = bytearray(path.read_bytes())
    used = [at for at, byte in enumerate(data) if byte] or [0]
    for _ in range(rng.choice((1, 3, 30)) if data else 0):
        data[rng.choice(used)] = rng.randrange(256)
    path.write_bytes(data)


def value(path: Path, rng: random.Random, outside: Path) -> None:
    """Replace one value of a JSON document; bytes of any other file."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        places = [(owner, key) for line in lines for owner, key in values(line)]
        owner, key = rng.choice(places)
    except (ValueError, IndexError):
        bits(path, rng, outside)
        return
    owner[key] = rng.choice(WILD)
    path.write_text("\n".join(map(json.dumps, lines)))


def values(document: Any) -> list[tuple[Any, Any]]:
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    return [place for key in keys for place in ((document, key), *values(document[key]))]


def cut(path: Path, rng: random.Random, outside: Path) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size + 1)])


def sparse(path: Path, rng: random.Random, outside: Path) -> None:
    os.truncate(path, 1 << 36)


def link(path: Path, rng: random.Random, outside: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice((outside / "precious.json", outside, Path("/dev/zero"), Path(path.name), Path(".."))))


def pipe(path: Path, rng: random.Random, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path, rng: random.Random, outside: Path) -> None:
    path.unlink()
    path.mkdir()


def listener(path: Path, rng: random.Random, outside: Path) -> None:
    path.unlink()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(outside.parent)


DAMAGES: tuple[Damage, ...] = (bits, value, value, value, cut, sparse, link, pipe, folder, listener)


class Guard:
    """Notes programs that are started, and files outside of a folder that are opened for writing."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "pickle.find_class"):
            self.seen.append(event)
        if event == "open" and not isinstance(args[0], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith((f"{self.inside}/", "/dev/", "/proc/")):
                self.seen.append(f"open {path}")


@pytest.fixture(scope="module")
def guard() -> Guard:
    return Guard()  # an audit hook stays until the process ends


@pytest.mark.timeout(120)  # a pipe that is waited for would never end
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_damaged_folders(
    tmp_path: Path, seed: int, guard: Guard, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "make", lambda *args, **options: None)  # needs a process with torch
    monkeypatch.chdir(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.json").write_text("precious")
    rng = random.Random(seed)
    for number in range(24):
        run = build(tmp_path / f"run{number}")
        told = []
        for path in rng.sample(sorted(path for path in run.rglob("*") if path.is_file()), rng.choice((1, 1, 2, 4))):
            damage = rng.choice(DAMAGES)
            damage(path, rng, outside)
            told.append(f"{path.relative_to(run)}: {damage.__name__}")
        for verb in (*rng.sample(VERBS, 3), ()):
            guard.inside = run
            status = main([*verb, str(run)]) if verb else ask_assistant(run)
            guard.inside = None
            said = capfd.readouterr()
            case = (seed, number, verb, told, said.err[:300])
            assert status in ((0, 1, 2) if verb[:1] in (("repro",), ("try",)) else (0, 2)), case
            assert len(said.err.splitlines()) == (status != 0), case
            assert len(said.out) < 1_000_000, case
            assert not set(said.out + said.err) & set("\x1b\x9b\u202e\x07\0"), case
            assert not guard.seen, (case, guard.seen)
        assert [path.name for path in outside.iterdir()] == ["precious.json"]
        assert (outside / "precious.json").read_text() == "precious", told


def ask_assistant(run: Path) -> int:
    for ask in (lambda: assist.report_text(run), lambda: assist.source_context(run, run.parent, 0, 8)):
        try:
            ask()
        except TorchmedicError:
            continue
    return 0


def test_a_patch_is_not_written_through_a_link(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    run = build(tmp_path / "run")
    (run / ".confidential").unlink()
    (run / "held" / f"{os.getpid()}.release").symlink_to(precious)
    assert main(["try", "--release", str(run)]) == 1
    assert precious.read_text() == "precious"
    (run / "held").rename(tmp_path / "held")
    (run / "held").symlink_to(tmp_path / "held")
    (tmp_path / "fix.diff").write_text("--- a\n+++ b\n")
    assert main(["try", "--seconds", "0.1", str(run), str(tmp_path / "fix.diff")]) == 1
    assert not list((tmp_path / "held").glob("*.patch"))
    assert len(capfd.readouterr().err.splitlines()) == 2
