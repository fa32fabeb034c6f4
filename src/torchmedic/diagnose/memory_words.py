"""The table of an autopsy in words, and the lines of the user's that belong to it."""

from __future__ import annotations

from torchmedic.diagnose.describe import count, listed
from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.rule import Draft
from torchmedic.records import Location, Role
from torchmedic.replay.memory.autopsy import Autopsy
from torchmedic.replay.memory.fillers import assigned_at, fillers_of
from torchmedic.replay.memory.holders import Holder
from torchmedic.replay.memory.lines import Line
from torchmedic.replay.source import relative

_SMALL = 0.01  # of the total: such rows are summed up
_MOST_LINES = 4


def table(autopsy: Autopsy) -> list[str]:
    """One text per row, the biggest first; together they are all of what was in use."""
    total = sum(row.nbytes for row in autopsy.rows)
    if not total:
        return []
    shown = sorted((row for row in autopsy.rows if row.nbytes >= _SMALL * total), key=lambda row: -row.nbytes)
    texts = [_row(row.nbytes, total, row.heading) for row in shown]
    rest = total - sum(row.nbytes for row in shown)
    if rest:
        texts.append(_row(rest, total, "everything else"))
    who = "the process holds" if not autopsy.exhaustion.on_device else "in use on the device when memory ran out:"
    return [f"{who} {size(total)}", *texts]


def _row(nbytes: int, total: int, heading: str) -> str:
    return f"{size(nbytes):>9} {100 * nbytes / total:3.0f} %  {heading}"


def activations(autopsy: Autopsy) -> list[str]:
    """Where the saved activations come from, and how that was found out."""
    lines = [line for line in autopsy.saved_lines if line.nbytes >= 1 << 20][:_MOST_LINES]
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
    where = f"at {relative(line.spot.file)}:{line.spot.line}" if line.spot is not None else f"by {line.node}"
    inside = f", in {listed([f'`{name}`' for name in line.modules], 2)}" if line.modules else ""
    return f"{size(line.nbytes)} in {count(line.tensors, 'tensor')} {where}{inside}"


def holders(autopsy: Autopsy, most: int = 3) -> list[str]:
    """What the user's names hold beside the headings of the table."""
    total = max(1, autopsy.book.everything)
    return [
        f"`{holder.path}`{_function(holder)} holds {size(nbytes)} in {count(number, 'tensor')}"
        for holder, nbytes, number in autopsy.holders()[:most]
        if nbytes >= 0.05 * total and nbytes >= 1 << 20
    ]


def _function(holder: Holder) -> str:
    return f" of {holder.function}()" if holder.function and holder.function != "<module>" else ""


def biggest(autopsy: Autopsy, most: int = 3) -> list[tuple[str, int]]:
    """The biggest holders: headings of the table that stand for something that somebody holds."""
    rows = [
        (row.heading, row.nbytes)
        for row in autopsy.rows
        if row.nbytes > 0 and row.heading not in ("reserved by the allocator, not in use", "not accounted for")
    ]
    return sorted(rows, key=lambda row: -row[1])[:most]


def shown(draft: Draft, autopsy: Autopsy) -> Draft:
    """Add the whole table to a diagnosis."""
    return draft.because(*table(autopsy), *activations(autopsy), *holders(autopsy))


def most_held(autopsy: Autopsy, role: Role) -> Location | None:
    """The line that holds most: that of the failing operation, of saved activations, or that fills a container."""
    candidates: list[tuple[int, Location]] = []
    failing = autopsy.evidence.at_user_line(role, f"{size(autopsy.asked)} asked for here" if autopsy.asked else "")
    lines = [line for line in autopsy.saved_lines if line.spot is not None]
    if failing and autopsy.asked and not (autopsy.in_backward and lines):
        here = sum(line.nbytes for line in lines if _is_at(line, failing[0]))
        candidates.append((autopsy.asked + here, failing[0]))
    for line in lines[:1]:
        assert line.spot is not None
        inside = f" in {listed([f'`{name}`' for name in line.modules], 2)}" if line.modules else ""
        candidates.append((line.nbytes, line.spot.location(role, f"{size(line.nbytes)} saved for backward{inside}")))
    for holder, nbytes, _ in autopsy.holders()[:1]:
        where = filled_at(holder, role, f"`{holder.path}` holds {size(nbytes)}")
        if where is not None:
            candidates.append((nbytes, where))
    if not candidates:
        return failing[0] if failing else None
    return max(candidates, key=lambda each: each[0])[1]


def _is_at(line: Line, place: Location) -> bool:
    return line.spot is not None and (relative(line.spot.file), line.spot.line) == (place.file, place.line)


def filled_at(holder: Holder, role: Role, label: str) -> Location | None:
    """The statement that puts things into a container, or gives a variable its value."""
    found = fillers_of(holder) or assigned_at(holder)
    return found[0].location(role, label) if found else None


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
