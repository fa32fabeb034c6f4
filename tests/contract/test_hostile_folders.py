"""A run folder is data that people mail to each other: nothing in it is executed, and nothing in it breaks a verb."""

from __future__ import annotations

import ast
import io
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import clean_environment

from torchmedic.assist.reading import source_context
from torchmedic.cli import main
from torchmedic.errors import UnreadableRun
from torchmedic.observe.step import blackbox
from torchmedic.records import Diagnosis, Location, Moment, Report, Treatment, encode
from torchmedic.report.console import stdout_console
from torchmedic.report.live import render
from torchmedic.report.terminal import print_all
from torchmedic.repro import allowed, recipe, store
from torchmedic.repro.recipe import Bad, Input, Line, Many, Plain, Raises, Recipe, Ref, Slice, Special
from torchmedic.repro.script import text
from torchmedic.runfolder import black_box, events, files
from torchmedic.supervise.watching import Watch

pytestmark = pytest.mark.timeout(300)
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
SHADOWS = ("torch", "json", "msgspec", "rich", "safetensors", "psutil", "struct", "textwrap")
COMMAND = Path(sys.executable).parent / "torchmedic"

DIVISION = Recipe(
    code="TM201",
    name="division-by-zero",
    message="0 / 0",
    inputs=(Input(name="x", dtype="float32", shape=(1,), fill=0),),
    lines=(Line(target="torch.div", args=(Ref("x"), Ref("x")), result="result"),),
    outcome=Bad(kind="nan", of="result"),
)
FOUND = Diagnosis(
    code="TM201",
    name="division-by-zero",
    grade="proven",
    message="0 / 0",
    cause="x is 0",
    locations=(Location(role="cause", file="a.py", line=2, column=5, end_column=9, code="y = x / x", label="0 / 0"),),
    evidence=("step 1",),
    treatments=(Treatment(title="add", proven=True, result="finite", patch="@@ -2 +2 @@\n-y\n+z\n"),),
)


def write_run(folder: Path, held: Recipe = DIVISION) -> Path:
    """A run folder with one diagnosis and its recording."""
    (folder / "rank0").mkdir(parents=True)
    files.write_report(folder, Report(diagnoses=(FOUND,)))
    recipe.write(recipe.json_path(folder / "rank0", 0), held, None)
    return folder


def line(target: str, *args: Any, result: str = "result", **fields: Any) -> Recipe:
    return msgspec.structs.replace(
        DIVISION, lines=(*DIVISION.lines, Line(target=target, args=args, result=result, **fields))
    )


X = Ref("x")
HOSTILE_RECIPES = {
    "attribute walk": line("Tensor.__getattribute__", X, Plain("__class__")),
    "dunder method": line("Tensor.__reduce_ex__", X, Plain(2)),
    "python function": line("Tensor.register_hook", X, Ref("torch")),
    "load": line("torch.load", Plain("/tmp/x.pt")),
    "save": line("torch.save", X, Plain("/tmp/x.pt")),
    "hub": line("torch.hub.load", Plain("a/b"), Plain("c")),
    "file": line("torch.from_file", Plain("/tmp/x"), kwargs={"shared": Plain(True), "size": Plain(4)}),
    "file operator": line("torch.ops.aten.from_file.default", Plain("/tmp/x")),
    "scripted save": line("torch.ops.aten.save.default", X, Plain("/tmp/x")),
    "other operators": line("torch.ops.prim.rangelist.default", Plain(3)),
    "library": line("torch.ops.load_library", Plain("/tmp/x.so")),
    "compile": line("torch.compile", X),
    "module": line("torch.utils.cpp_extension.load", Plain("x")),
    "builtin": line("eval", Plain("1")),
    "operator": line("operator.attrgetter", Plain("__class__")),
    "semicolon": line("torch.div;import os", X, X),
    "newline": line("torch.div\nimport os\n#", X, X),
    "unicode": line("torch.d\u0131v", X, X),
    "container": line("torch.nn.Sequential", X, result="layer"),
    "call of an input": line("call", X),
    "layer from a function": line("torch.div", X, X, result="layer"),
    "builtin as a reference": line("torch.div", Ref("open"), X),
    "module as a reference": line("torch.div", Ref("torch"), X),
    "later result": line("torch.div", Ref("later"), X, result="later"),
    "method of a text": line("Tensor.format", Plain("{0.__class__}"), X),
    "result hides torch": line("torch.div", X, X, result="torch"),
    "dunder result": line("torch.div", X, X, result="__builtins__"),
    "keyword": line("torch.div", X, X, kwargs={"lambda": X}),
    "call in a keyword": line("torch.div", X, X, kwargs={"a=open('x','w'),b": X}),
    "call in a constant": line("torch.div", X, Special("torch.float32;open('x')")),
    "function as a constant": line("torch.div", X, Special("torch.quantile")),
    "module as a constant": line("torch.div", X, Special("torch.sparse")),
    "nested reference": line("torch.stack", Many((Slice((Ref("exec"), Plain(None), Plain(None))),))),
    "input hides torch": msgspec.structs.replace(
        DIVISION, inputs=(*DIVISION.inputs, Input(name="torch", dtype="float32", shape=(1,), fill=0))
    ),
    "dtype": msgspec.structs.replace(DIVISION, inputs=(Input(name="x", dtype="load", shape=(1,), fill=0),)),
    "device": msgspec.structs.replace(
        DIVISION, inputs=(Input(name="x", dtype="float32", shape=(1,), fill=0, device='cpu"+x+"'),)
    ),
    "huge input": msgspec.structs.replace(
        DIVISION, inputs=(Input(name="x", dtype="float32", shape=(1 << 40,), fill=0),)
    ),
    "autocast": msgspec.structs.replace(DIVISION, autocast="load"),
    "outcome": msgspec.structs.replace(DIVISION, outcome=Bad(kind="nan", of="torch")),
    "error name": msgspec.structs.replace(DIVISION, outcome=Raises(kind='"+open("x")+"', fragment="", pattern="")),
}


@pytest.mark.parametrize("name", HOSTILE_RECIPES)
def test_a_recipe_calls_nothing_but_torch(tmp_path: Path, name: str) -> None:
    path = recipe.json_path(tmp_path, 0)
    recipe.write(path, HOSTILE_RECIPES[name], None)
    with pytest.raises(UnreadableRun):
        store.read(recipe.read(path), recipe.values_path(path))


def test_recipes_that_torchmedic_writes_are_allowed() -> None:
    allowed.check(DIVISION)
    allowed.check(line("torch.nn.functional.cross_entropy", X, X, kwargs={"label_smoothing": Plain(0.1)}))
    allowed.check(line("torch.linalg.inv", X))
    allowed.check(line("Tensor.to", X, Special("torch.bfloat16")))
    allowed.check(
        line("operator.getitem", X, Many((Special("..."), Slice((Plain(0), Plain(None), Plain(2)))), "tuple"))
    )
    allowed.check(line("torch.ops.aten._softmax.default", X, Plain(0), Plain(False)))
    built = line("torch.nn.Linear", Plain(1), Plain(2), result="layer")
    called = (*built.lines, Line(target="call", args=(Ref("layer"), X), result="result"))
    allowed.check(msgspec.structs.replace(built, lines=called))


def test_the_verb_executes_nothing_of_a_hostile_recipe(tmp_path: Path) -> None:
    hit = tmp_path / "hit"
    lines = [Line(target="Tensor.__getattribute__", args=(Ref("torch"), Plain("os")), result="a")]
    lines += [Line(target="Tensor.system", args=(Ref("a"), Plain(f"touch {hit}")), result="result")]
    run = write_run(tmp_path / "run", msgspec.structs.replace(DIVISION, lines=tuple(lines)))
    done = command(tmp_path, "repro", "run")
    assert (done.returncode, hit.exists()) == (2, False)
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (run / "repro.py").exists()


def command(folder: Path, *words: str, module: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """A verb as a person types it: `torchmedic ...`, or `python -m torchmedic ...`."""
    start = [sys.executable, "-m", "torchmedic"] if module else [str(COMMAND)]
    return subprocess.run(
        [*start, *words],
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=250,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def shadow(folder: Path, *names: str) -> Path:
    """Files with the names of modules, which say so if they are imported."""
    hits = folder / "imported.txt"
    for name in names:
        note = f"import sys\nwith open({str(hits)!r}, 'a') as file: file.write({name!r} + ' ' + sys.argv[0] + '\\n')\n"
        (folder / f"{name}.py").write_text(note + f"mine = {name!r}\n")
    return hits


@pytest.mark.parametrize("module", [False, True])
def test_modules_in_the_working_folder_are_not_imported(tmp_path: Path, module: bool) -> None:
    run = write_run(tmp_path / "run")
    hits = shadow(run, *SHADOWS, *([] if module else ["torchmedic"]))
    (run / "train.py").write_text("print('trained')\n")
    verbs = [("report", "."), ("watch", "."), ("preflight", "train.py"), ("repro", "-o", "../out.py", ".")]
    for words in verbs[:2] if module else verbs:  # the others start the same children
        done = command(run, *words, module=module)
        assert "Traceback" not in done.stderr
        assert not hits.exists(), (words, hits.read_text(), done.stderr)
    assert module or (tmp_path / "out.py").exists()
    done = command(run, "run", "train.py", module=module)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert not hits.exists(), hits.read_text()


@pytest.mark.slow
def test_modules_on_the_python_path_come_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    hits = shadow(run, *SHADOWS)
    for words in (("report", "."), ("preflight",), ("repro", "-o", "../out.py", ".")):
        done = command(run, *words, PYTHONPATH=f".{os.pathsep}{os.pathsep}{tmp_path}")
        assert not hits.exists(), (words, hits.read_text(), done.stderr)


def test_no_script_is_written_beside_foreign_modules(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    hits = shadow(run, "torch")
    done = command(tmp_path, "repro", "run")
    assert done.returncode == 2
    assert "would import torch.py" in done.stderr
    assert not hits.exists()
    assert not (run / "repro.py").exists()


USES_ITS_OWN = """
import torch
import msgspec, rich, torchmedic
print(msgspec.mine, rich.mine, torchmedic.mine)
model = torch.nn.Linear(2, 2)
def step(x):
    model(x).sum().backward()
step(torch.zeros(1, 3))
"""


def test_modules_beside_the_script_are_the_scripts_and_not_ours(tmp_path: Path) -> None:
    hits = shadow(tmp_path, "msgspec", "rich", "torchmedic", "psutil")
    (tmp_path / "train.py").write_text(USES_ITS_OWN)
    done = command(tmp_path, "run", "--output", "run", "train.py")
    assert done.stdout == "msgspec rich torchmedic\n"
    assert "error[TM151]" in done.stderr  # so the agent worked
    assert "fault of its own" not in done.stderr
    assert "not watching" not in done.stderr
    # Each once, by the script; and `psutil`, which the script does not import, not at all.
    assert hits.read_text().split()[::2] == ["msgspec", "rich", "torchmedic"]


TEXTS = st.text(st.characters() | st.sampled_from("\"'\\\n\r\t#{}\x1b\u2028"), max_size=40)


@FUZZ
@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_no_text_of_a_recipe_becomes_code(message: str, name: str, note: str, fragment: str) -> None:
    held = msgspec.structs.replace(
        DIVISION,
        message=message,
        name=name,
        source=note,
        place=name,
        torch=fragment,
        lines=(msgspec.structs.replace(DIVISION.lines[0], note=note),),
        outcome=Raises(kind="RuntimeError", fragment=fragment, pattern=""),
    )
    try:
        allowed.check(held)
    except ValueError:
        return
    written, expected = (
        ast.parse(text(store.read(each, Path("none")), Path("values.safetensors"))[0])
        for each in (held, msgspec.structs.replace(DIVISION, outcome=held.outcome))
    )
    # All but the docstring is the same program.
    assert list(map(ast.dump, written.body[1:])) == list(map(ast.dump, expected.body[1:]))


def hostile_reports(folder: Path) -> dict[str, Path]:
    """Run folders whose `report.json` is hostile, by what is wrong."""
    place = json.loads(encode(FOUND))
    wide = {**place, "locations": [{**place["locations"][0], "column": 10**9, "end_column": 10**9 + 5}]}
    contents: dict[str, bytes] = {
        "nested": b"[" * 100_000 + b"]" * 100_000,
        "nested inside": b'{"schema": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "column": json.dumps({"schema": 1, "diagnoses": [wide]}).encode(),
        "negative": json.dumps(
            {"diagnoses": [{**place, "locations": [{**place["locations"][0], "line": -5}]}]}
        ).encode(),
        "many": json.dumps({"schema": 1, "diagnoses": [place] * 20_000}).encode(),
        "much evidence": json.dumps({"schema": 1, "diagnoses": [{**place, "evidence": ["a"] * 20_000}]}).encode(),
        "huge text": json.dumps({"schema": 1, "diagnoses": [{**place, "message": "x" * 50_000_000}]}).encode(),
        "number": b'{"schema": 1, "outcome": {"steps": ' + b"9" * 5000 + b"}}",
        "newer": b'{"schema": 2, "diagnoses": "of another kind"}',
        "not utf-8": b'{"schema": 1, "outcome": {"symptom": "\xff\xfe"}}',
        "empty": b"",
        "text": b"hello",
    }
    runs = {name: folder / name for name in (*contents, "pipe", "link", "folder", "device")}
    for name, run in runs.items():
        (run / "rank0").mkdir(parents=True)
        if name in contents:
            (run / "report.json").write_bytes(contents[name])
    os.mkfifo(runs["pipe"] / "report.json")
    (folder / "outside.json").write_bytes(encode(Report()))
    (runs["link"] / "report.json").symlink_to(folder / "outside.json")
    (runs["folder"] / "report.json").mkdir()
    (runs["device"] / "report.json").symlink_to("/dev/zero")
    return runs


@pytest.mark.parametrize("verb", ["report", "repro"])
def test_a_hostile_report_is_one_line(tmp_path: Path, verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    for name, run in hostile_reports(tmp_path).items():
        assert main([verb, str(run)]) == 2, name
        said = capfd.readouterr()
        assert len(said.err.splitlines()) == 1, (name, said.err[:500])
        assert len(said.err) < 1000, name
        assert said.out == "", name
        if name == "newer":
            assert "newer torchmedic (schema 2" in said.err
    for path in ("/dev/zero", str(tmp_path / "pipe" / "report.json")):
        assert main([verb, path]) == 2
        assert "not a regular file" in capfd.readouterr().err
    assert time.monotonic() - started < 60


def test_watch_survives_a_hostile_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, run in hostile_reports(tmp_path).items():
        (run / "rank0").rmdir()
        assert main(["watch", str(run)]) == 2, name
        assert len(capfd.readouterr().err.splitlines()) == 1, name
        (run / "rank0").mkdir()
        blackbox.FileBox(run / "rank0" / files.BLACK_BOX)
        assert main(["watch", str(run)]) == 0, name  # the process is shown, and that there is no report
        assert "cannot read" in capfd.readouterr().out, name


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = write_run(tmp_path / "other")
    run = tmp_path / "run"
    run.mkdir()
    files.write_report(run, Report(diagnoses=(FOUND,)))
    (run / "rank0").symlink_to(other / "rank0")
    assert main(["repro", str(run)]) == 2
    assert "no operation was recorded" in capfd.readouterr().err
    (run / "rank0").unlink()
    (run / "rank0").mkdir()
    (run / "rank0" / "repro-0.json").symlink_to(other / "rank0" / "repro-0.json")
    assert main(["repro", str(run)]) == 2
    assert "symbolic link" in capfd.readouterr().err


def test_what_torchmedic_itself_writes_is_within_the_limits(tmp_path: Path) -> None:
    endless = msgspec.structs.replace(FOUND, message="x" * 10_000_000, evidence=("\ud800" + "y" * 10_000_000,))
    files.write_report(tmp_path, Report(diagnoses=(endless,)))
    assert files.read_report(tmp_path).diagnoses[0].code == "TM201"
    (tmp_path / "rank0").mkdir()
    files.write_diagnosis(tmp_path / "rank0", endless)
    assert len(files.read_diagnoses(tmp_path / "rank0")) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)


def mutated(document: Any, draw: Any) -> Any:
    """A document with one value anywhere in it replaced."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            collect(value[key])

    collect(document)
    owner, key = draw(st.sampled_from(places))
    owner[key] = draw(JSON)
    return document


@FUZZ
@given(st.data())
def test_fuzzed_reports(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("run")
    document = mutated(json.loads(encode(Report(diagnoses=(FOUND,)))), data.draw)
    (folder / "report.json").write_text(json.dumps(document))
    try:
        report = files.read_report(folder)
    except UnreadableRun:
        return
    console = stdout_console()
    for form in ("full", "concise"):
        with console.capture() as shown:
            print_all(console, report.diagnoses, form, folder)
        assert not set(shown.get()) & set("\x1b\x9b\u202e\x07\r")
    with console.capture():
        console.print(render(Watch(folder).look()))


@FUZZ
@given(st.data())
def test_fuzzed_recipes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("run") / "repro-0.json"
    path.write_text(json.dumps(mutated(json.loads(encode(DIVISION)), data.draw)))
    try:
        program = store.read(recipe.read(path), recipe.values_path(path))
    except UnreadableRun:
        return
    if program.recipe.outcome is not None:
        ast.parse(text(program, path)[0])


@FUZZ
@given(st.binary(max_size=64), st.integers(0, 33_000), st.integers(0, 1100))
def test_fuzzed_black_boxes(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int, slot: int) -> None:
    folder = tmp_path_factory.mktemp("run") / "rank0"
    folder.mkdir()
    path = folder / files.BLACK_BOX
    box = blackbox.FileBox(path)
    for step in range(20):
        box.write(1, step, 0, step, "train.py", 3, 1 << 20, 0)
    whole = bytearray(path.read_bytes())
    for position in (at % 64, at, 64 + 32 * 1024 + slot * 64):
        whole[position : position + len(noise)] = noise
    path.write_bytes(whole)
    try:
        for moment in black_box.read(path).moments:
            assert isinstance(moment, Moment)
    except UnreadableRun:
        pass
    console = stdout_console()
    with console.capture():
        console.print(render(Watch(folder.parent).look()))


@FUZZ
@given(st.lists(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=80), max_size=8))
def test_fuzzed_events(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("rank0")
    known = b'{"kind":"fault","fault":{"where":"a","error":"b"}}'
    (folder / events.EVENTS).write_bytes(b"\n".join([known, b"[" * 100_000, *lines, b"", known]))
    assert len(events.read_faults(folder)) >= 2
    events.read_symptom(folder)
    events.events_of(folder, "fault", events.FaultLine)


@pytest.mark.parametrize("source", ["environment", "pyproject"])
def test_a_configured_output_gets_a_folder_per_run(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    environment = {"TORCHMEDIC_OUTPUT": "runs"} if source == "environment" else {}
    if source == "pyproject":
        (tmp_path / "pyproject.toml").write_text('[tool.torchmedic]\noutput = "runs"\n')
    for _ in range(2):
        done = command(tmp_path, "run", "train.py", **environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    runs = list((tmp_path / "runs").iterdir())
    assert len([run for run in runs if (run / "report.json").is_file()]) == len(runs) == 2
    assert all(stat.S_IMODE(run.stat().st_mode) == 0o700 for run in runs)


@pytest.mark.parametrize("form", ["full", "concise", "json", "sarif", "markdown", "github"])
def test_an_output_of_ascii_gets_escapes(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "Gr\u00f6\u00dfe \U0001f600"
    files.write_report(tmp_path, Report(diagnoses=(msgspec.structs.replace(FOUND, message=message),)))
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["report", "--format", form, str(tmp_path)]) == 0
    said = output.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert r"\u00f6\u00dfe \ud83d\ude00" in said
    if form == "json":
        assert json.loads(said)["diagnoses"][0]["message"] == message


def test_an_assistant_is_shown_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    base = tmp_path / "base"
    run = write_run(base / "run")
    (base / "train.py").write_text("inside = 1\n")
    (tmp_path / "private.py").write_text("secret = 1\n")
    (tmp_path / "private.txt").write_text("secret = 1\n")
    (run / "linked.py").symlink_to(tmp_path / "private.txt")
    (run / "other.py").symlink_to(tmp_path / "private.py")
    names = ("train.py", "../private.py", str(tmp_path / "private.py"), "run/linked.py", "run/other.py")
    places = tuple(Location(role="cause", file=name, line=1, code="") for name in names)
    files.write_report(run, Report(diagnoses=(msgspec.structs.replace(FOUND, locations=places),)))

    shown = source_context(run, base, 0, 8)

    assert "inside = 1" in shown
    assert "secret" not in shown
