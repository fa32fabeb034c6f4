"""What the page draws is what was recorded: sums, bounds and order."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from runs import ORDER, box, whole

from torchmedic.report.html import charts, holders, run_data, series
from torchmedic.report.html.run_data import Autopsy, AutopsyLine
from torchmedic.runfolder import confidential, files
from torchmedic.runfolder.stall import read_stalls, write_stall


def test_time_by_phase_adds_up_to_the_steps() -> None:
    strip = series.step_strip(box(30))
    assert strip is not None
    assert [bar.first for bar in strip.bars] == list(range(29))  # the last one did not end
    assert all(bar.total == pytest.approx(0.04) for bar in strip.bars)
    assert {phase: pytest.approx(0.25) for phase in ORDER} == {phase: strip.shares[phase] for phase in ORDER}
    assert sum(strip.shares.values()) == pytest.approx(1.0)
    assert (strip.open_phase, strip.open_step) == ("optimizer", 29)
    assert strip.usual == pytest.approx(0.04)


def test_many_steps_become_averages_that_keep_the_total() -> None:
    strip = series.step_strip(box(250))
    assert strip is not None
    assert len(strip.bars) <= series.MAX_BARS
    assert (strip.bars[0].first, strip.bars[-1].last) == (0, 248)
    seconds = sum(bar.total * (bar.last - bar.first + 1) for bar in strip.bars)
    assert seconds == pytest.approx(249 * 0.04)


def test_a_step_whose_beginning_was_overwritten_is_not_shown() -> None:
    whole_box = box(10)
    cut = replace(whole_box, moments=whole_box.moments[6:])  # in the middle of step 1
    strip = series.step_strip(cut)
    assert strip is not None
    assert strip.bars[0].first == 2


def test_one_slow_step_does_not_flatten_the_others() -> None:
    slow = box(30)
    late = [replace(moment, time=moment.time + (10.0 if moment.step > 0 else 0.0)) for moment in slow.moments]
    strip = series.step_strip(replace(slow, moments=tuple(late)))
    assert strip is not None
    assert strip.cut == 1
    assert strip.ceiling == pytest.approx(0.06)
    assert all(0 <= rect.y <= charts.HEIGHT and rect.height >= 0 for rect in charts.step_plot(strip).rects)


def test_too_few_steps_are_no_picture() -> None:
    assert series.step_strip(None) is None
    assert series.step_strip(box(1)) is None
    assert series.step_strip(replace(box(5), moments=())) is None


def test_thinning_keeps_ends_and_extremes() -> None:
    values = [float(number % 7) for number in range(5000)]
    values[1234], values[4321] = 99.0, -99.0
    kept = series.thinned(values, 600)
    assert len(kept) <= 600
    assert {0, 1234, 4321, 4999} <= set(kept)
    assert kept == sorted(kept)


def test_the_memory_curve_joins_both_sources_and_marks_the_failure() -> None:
    process = whole().processes[0]
    curve = series.memory_curve(process)
    assert curve is not None
    assert len(curve.x) == len(curve.lines[0].values) <= series.MAX_POINTS
    assert list(curve.x) == sorted(curve.x)
    assert [line.name for line in curve.lines] == ["resident memory of the process", "allocated on the device"]
    assert [(mark.x, mark.text) for mark in curve.marks] == [(9.5, "some text, step 12")]
    assert series.memory_curve(replace(process, box=None, memory=process.memory[:2])) is None


def test_a_short_and_flat_memory_curve_is_no_picture() -> None:
    process = replace(whole().processes[0], box=None)
    flat = tuple(replace(line, time=100 + line.time / 1000, rss=500, allocated=None) for line in process.memory)
    assert series.memory_curve(replace(process, memory=flat)) is None
    growing = tuple(replace(line, rss=500 + 10 * number) for number, line in enumerate(flat))
    assert series.memory_curve(replace(process, memory=growing)) is not None


def test_memory_is_split_into_parts_that_add_up() -> None:
    lines = tuple(AutopsyLine(nbytes=10, file=f"f{number}.py", line=1) for number in range(15))
    rows = {"saved activations": 200, "parameters": 800, "tiny": 0} | {f"row {number}": 9 for number in range(30)}
    block = holders.memory_split(Autopsy(time=0.0, where="host", rows=rows, lines=lines))
    assert block is not None
    assert block.nbytes == sum(part.nbytes for part in block.parts) == sum(rows.values())
    saved = next(part for part in block.parts if part.name == "saved activations")
    assert sum(leaf.nbytes for leaf in saved.parts) == saved.nbytes
    assert saved.parts[-1] == holders.Block(name="other lines", nbytes=100)
    assert sum(rect.width for rect in charts.icicle(block).rects if rect.y == 32.0) == pytest.approx(
        charts.WIDTH, abs=1
    )


def test_lines_that_hold_more_than_their_heading_are_not_drawn() -> None:
    autopsy = Autopsy(time=0.0, rows={"saved activations": 5}, lines=(AutopsyLine(nbytes=9, file="f.py", line=1),))
    block = holders.memory_split(autopsy)
    assert block is not None
    assert block.parts[0].parts == ()
    assert holders.memory_split(Autopsy(time=0.0, rows={})) is None


def test_files_are_named_as_the_report_names_them() -> None:
    assert holders.short_name("/work/job/model/net.py", {"model/net.py", "t.py"}) == "model/net.py"
    assert holders.short_name("/elsewhere/other.py", {"net.py"}) == "/elsewhere/other.py"


def test_threads_that_wait_for_each_other_are_a_circle() -> None:
    found = holders.waiters(whole().stalls[0])
    assert [each.target for each in found] == [1, 0]
    graph = charts.wait_graph(found)
    assert graph is not None
    assert [arrow.cycle for arrow in graph.arrows] == [True, True]
    assert charts.wait_graph(tuple(replace(each, target=None) for each in found)) is None


def test_processes_share_one_axis_of_time() -> None:
    first = whole().processes[0]
    quiet = replace(first, name="rank1", box=replace(box(30), moments=box(30).moments[:60]))
    strip = series.rank_strip([first, quiet])
    assert strip is not None
    assert strip.first_quiet is not None
    assert (strip.first_quiet.name, strip.first_quiet.last_step) == ("rank1", 14)
    # A process that ended well did not stop: it was done.
    assert quiet.box is not None
    done = series.rank_strip([first, replace(quiet, box=replace(quiet.box, clean_exit=True))])
    assert done is not None
    assert done.first_quiet is None
    assert strip.rows[1].quiet == pytest.approx(59 / 119, abs=0.01)
    for row in strip.rows:
        assert all(left[2] == pytest.approx(right[1]) for left, right in zip(row.spans, row.spans[1:], strict=False))
    assert series.rank_strip([first]) is None


def test_a_stall_is_kept_unless_the_run_is_confidential(tmp_path: Path) -> None:
    stall = whole().stalls[0]
    write_stall(tmp_path, stall)
    write_stall(tmp_path, stall, 3)
    assert list(read_stalls(tmp_path)) == [stall, stall]
    (tmp_path / "stall.3.json").write_text("{")
    assert list(read_stalls(tmp_path)) == [stall]
    secret = tmp_path / "secret"
    secret.mkdir()
    confidential.mark_confidential(secret)
    write_stall(secret, stall)
    assert list(read_stalls(secret)) == []


def test_damaged_files_are_passed_over(tmp_path: Path) -> None:
    files.write_report(tmp_path, whole().report)
    folder = tmp_path / "rank0"
    folder.mkdir()
    (folder / "blackbox").write_bytes(b"TMBLKBOX")
    good = b'{"kind":"memory","time":1.5,"rss":5}\n'
    lines = [b"{", b"[]", b'{"kind":"memory","time":"x"}', b'{"kind":"memory-autopsy"}', b"\xff", b'{"time":1.0}']
    (folder / "events.jsonl").write_bytes(good + b"\n".join(lines))
    (tmp_path / "gpu.json").write_text("nonsense")
    data = run_data.read(tmp_path)
    (process,) = data.processes
    assert (process.box, len(process.memory), process.autopsies) == (None, 1, ())
