"""The table of an autopsy in words, and the lines of the user's that belong to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.format import listed, size
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.memory.accounting.holder import Holder
from torchmedic.evidence.memory.attempts import pinned_by_first_attempt
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.by_line import Line
from torchmedic.evidence.memory.fake.ledger import Made
from torchmedic.evidence.memory.source.fillers import assigned_at, fillers_of
from torchmedic.evidence.memory.source.run_again import is_run_again
from torchmedic.evidence.memory.table import Row
from torchmedic.observe.memory.limits import refusing
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import Frame
from torchmedic.source.user_code import is_user_file, relative

_MIN_ROW_SHARE = 0.01  # share of the total: smaller rows are summed up
_MAX_LINES = 4
_MIN_BLAMED_SHARE = 0.03  # share of all tensors, with what is asked for: no line is to blame for less


def table(autopsy: Autopsy) -> list[str]:
    """One text per row, the biggest first; together they are all of what was in use."""
    rows = _counted(autopsy)
    total = sum(row.nbytes for row in rows)
    if not total:
        return []
    shown = sorted((row for row in rows if row.nbytes >= _MIN_ROW_SHARE * total), key=lambda row: -row.nbytes)
    texts = [_row(row.nbytes, total, row.heading) for row in shown]
    rest = total - sum(row.nbytes for row in shown)
    if rest > total // 1000:
        texts.append(_row(rest, total, "everything else"))
    who = "the process holds" if not autopsy.exhaustion.on_device else "in use on the device when memory ran out:"
    beside = ""
    if len(rows) < len(autopsy.rows):
        who = f"of the {size(autopsy.measured.limit or 0)} that the process may have, it held"
        others = [f"{row.heading} {size(row.nbytes)}" for row in autopsy.rows if row not in rows and row.nbytes]
        beside = f"beside it, and not counted: {listed(others, 3)}" if others else ""
    return [f"{who} {size(total)}", *texts, *([beside] if beside else [])]


def _counted(autopsy: Autopsy) -> list[Row]:
    """The rows that take from what the process may have."""
    return [row for row in autopsy.rows if not (row.is_outside and autopsy.measured.is_capped)]


def _row(nbytes: int, total: int, heading: str) -> str:
    return f"{size(nbytes):>9} {100 * nbytes / total:3.0f} %  {heading}"


def activations(autopsy: Autopsy) -> list[str]:
    """Where the saved activations come from, and how that was found out."""
    lines = [line for line in autopsy.saved_lines if line.nbytes >= 1 << 20][:_MAX_LINES]
    if not lines:
        return []
    texts = [f"saved for backward: {_line(line)}" for line in lines]
    if autopsy.method == "fake replay":
        texts.append("lines by a replay of the step on fake tensors, bytes by the graph itself")
    else:
        why = f" ({autopsy.why_not_replayed})" if autopsy.why_not_replayed else ""
        texts.append(f"no replay on fake tensors{why}: layers and bytes by the graph itself")
    return texts


def _line(line: Line) -> str:
    where = f"by {line.node}" if line.node else ""
    if line.spot is not None:
        where = f"at {_short(line.spot.file)}:{line.spot.line}"
    inside = f", in {listed([f'`{name}`' for name in line.modules], 2)}" if line.modules else ""
    return f"{size(line.nbytes)} in {count(line.tensors, 'tensor')} {where}{inside}".replace(" ,", ",")


def _short(file: str) -> str:
    """A file of the user's from where the run was started, one of a library from where it is installed."""
    return relative(file) if is_user_file(file) else re.split(r"[/\\](?:site|dist)-packages[/\\]", file)[-1]


def holders(autopsy: Autopsy, most: int = 3) -> list[str]:
    """What the user's names hold beside the headings of the table."""
    total = max(1, autopsy.book.everything + autopsy.book.plain_objects)
    return [
        f"`{holder.path}`{_function(holder)} holds {size(nbytes)} in {count(number, autopsy.book.kind_of(holder))}"
        for holder, nbytes, number in autopsy.holders()[:most]
        if nbytes >= 0.05 * total and nbytes >= 1 << 20
    ]


def _function(holder: Holder) -> str:
    return f" of {holder.function}()" if holder.function and holder.function != "<module>" else ""


def biggest(autopsy: Autopsy, most: int = 3) -> list[tuple[str, int]]:
    """The biggest holders: headings of the table that stand for something that somebody holds."""
    rows = [
        (row.heading, row.nbytes)
        for row in _counted(autopsy)
        if row.nbytes > 0 and row.heading not in ("reserved by the allocator, not in use", "not accounted for")
    ]
    return sorted(rows, key=lambda row: -row[1])[:most]


def limit(autopsy: Autopsy) -> list[str]:
    """The limit of the process that was reached, if that is why memory had ended."""
    host = autopsy.measured.host
    bound = refusing(host, autopsy.asked) if host is not None else None
    if bound is None:
        return []
    return [f"the process may have {size(bound.limit)} of {bound.of} ({bound.name}, `{bound.option}`)"]


def shown(draft: Draft, autopsy: Autopsy, *, limits: bool = True) -> Draft:
    """Add the whole table to a diagnosis, and what belongs to it."""
    draft.because(*(limit(autopsy) if limits else ()))
    draft.because(*table(autopsy), *activations(autopsy), *holders(autopsy))
    ended_with = autopsy.evidence.incident.error
    if ended_with is not autopsy.evidence.error:
        draft.because(f"the run ended with {type(ended_with).__name__}, raised while this was handled")
    pinned = pinned_by_first_attempt(autopsy.evidence, autopsy.book)
    if pinned > 1 << 20:
        draft.because(f"the out-of-memory before this one is still being handled: its frames hold {size(pinned)}")
        draft.help(
            "leave the `except` block before you retry: until then the exception keeps the memory of the first attempt"
        )
    return draft


class _Candidate(NamedTuple):
    """A line that may be the one to show, by the bytes that it stands for."""

    nbytes: int
    location: Location


def most_held(autopsy: Autopsy) -> Location | None:
    """The line that holds most: that of the failing operation, of saved activations, or that fills a container."""
    label = f"{size(autopsy.asked)} asked for here" if autopsy.asked else "refused here"
    failing = next(iter(autopsy.evidence.at_user_line("cause", label)), None)
    faint = _MIN_BLAMED_SHARE * (autopsy.book.everything + (autopsy.asked or 0))
    lines = _lines_of_user(autopsy, faint)
    again = [] if lines else _made_again(autopsy)
    here = sum(line.nbytes for line in lines if failing is not None and _is_at(line, failing))
    giant = _giant(autopsy)
    if giant is not None and giant.place.spot is not None and here <= giant.nbytes:
        return giant.place.spot.location("cause", f"{size(giant.nbytes)} made here")
    candidates: list[_Candidate] = []
    if failing is not None and autopsy.asked and not (autopsy.in_backward and (lines or again)):
        candidates.append(_refused(failing, autopsy.asked, here))
    candidates += [_saved(line) for line in lines[:1]]
    candidates += [_computed_again(line) for line in again[:1]]
    candidates += _held(autopsy, faint)
    if not autopsy.asked:  # it may be large itself: what is to blame instead must be so, too
        candidates = [each for each in candidates if each.nbytes > autopsy.measured.used // 4]
    return max(candidates, key=lambda each: each.nbytes).location if candidates else failing


def _lines_of_user(autopsy: Autopsy, faint: float) -> list[Line]:
    """Lines of the user's that have saved activations; none if most was saved elsewhere, or little at all."""
    lines = [line for line in autopsy.saved_lines if line.spot is not None and is_user_file(line.spot.file)]
    if not lines or lines[0].nbytes < faint:
        return []  # it is not that: weights, say
    others = [line.nbytes for line in autopsy.saved_lines if line not in lines]
    return lines if lines[0].nbytes >= max(others, default=0) else []


def _refused(failing: Location, asked: int, here: int) -> _Candidate:
    """The line that failed; `here` are the bytes that the same line has saved."""
    if here > asked:
        label = f"{size(here)} saved for backward here, {size(asked)} more refused"
        failing = msgspec.structs.replace(failing, label=label)
    return _Candidate(asked + here, failing)


def _saved(line: Line) -> _Candidate:
    assert line.spot is not None
    inside = f" in {listed([f'`{name}`' for name in line.modules], 2)}" if line.modules else ""
    return _Candidate(line.nbytes, line.spot.location("cause", f"{size(line.nbytes)} saved for backward{inside}"))


def _computed_again(line: Line) -> _Candidate:
    assert line.spot is not None
    label = f"{size(line.nbytes)} are there in backward that were made here"
    return _Candidate(line.nbytes, line.spot.location("cause", label))


def _held(autopsy: Autopsy, faint: float) -> list[_Candidate]:
    """The line that fills the name that holds most, if that is enough to be blamed."""
    for holder, nbytes, _ in autopsy.holders()[:1]:
        where = filled_at(holder, "cause", f"`{holder.path}` holds {size(nbytes)}", autopsy.evidence.frames)
        if where is not None and nbytes >= faint:
            return [_Candidate(nbytes, where)]
    return []


def _giant(autopsy: Autopsy) -> Made | None:
    """The one tensor that is most of all there is, where no more than that was asked for: the step has made it before.

    What failed has only made another of its size, as `torch.tanh(pairs)` does.
    """
    ledger, asked, book = autopsy.replayed, autopsy.asked or 0, autopsy.book
    if ledger is None or not asked or autopsy.in_backward:
        return None
    loose = ("saved activations", "held", "not traced")
    largest = max((memory.nbytes for under, memory in book.entries.values() if under in loose), default=0)
    if largest < asked or largest < book.everything // 2:
        return None
    user, last = autopsy.evidence.user_frame, None
    for each in ledger.made:
        spot = each.place.spot
        if each is autopsy.failing or (spot and user and (spot.file, spot.line) == (user.file, user.line)):
            break  # a replay may go on where the step had failed
        last = each if each.nbytes == largest else last
    return last if last is not None and last.place.spot is not None and is_user_file(last.place.spot.file) else None


def _made_again(autopsy: Autopsy) -> list[Line]:
    """Lines of the user's whose results backward had computed again, if that is half of what it asked for, or more."""
    least = (autopsy.asked or 0) // 2
    found = autopsy.replay_recomputation()
    return [each for each in found if each.spot and is_user_file(each.spot.file) and each.nbytes >= least]


def _is_at(line: Line, place: Location) -> bool:
    return line.spot is not None and (relative(line.spot.file), line.spot.line) == (place.file, place.line)


def filled_at(holder: Holder, role: Role, label: str, frames: Sequence[Frame] = ()) -> Location | None:
    """The statement that puts things into a container, or gives a variable its value: one that is run now, if any."""
    found = [each for each in fillers_of(holder) or assigned_at(holder) if is_user_file(each.file)]
    running = (each for each in found if is_run_again(each, frames))
    return next(running, found[0]).location(role, label) if found else None


def differentiated(autopsy: Autopsy) -> Location | None:
    """In backward: the forward line whose gradient was being computed."""
    at = autopsy.forward_place
    if at is None or at.spot is None:
        return None
    inside = f" (`{at.module}`)" if at.module else ""
    return at.spot.location("origin", f"its gradient was being computed{inside}")


def noticed(autopsy: Autopsy) -> tuple[Location, ...]:
    label = f"{size(autopsy.asked)} were refused here" if autopsy.asked else "refused here"
    return autopsy.evidence.at_user_line("surfaced", label)
