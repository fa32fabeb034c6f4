"""The rank that left the common way is found in made-up logs, and healthy logs that differ in lines are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmedic.detect.ranks.alignment import first_difference
from torchmedic.detect.ranks.culprit import forward_without_backward, named
from torchmedic.detect.ranks.late import gave_up
from torchmedic.detect.ranks.messages import unequal_message, unequal_turns, unmatched
from torchmedic.diagnose import registry
from torchmedic.diagnose.rule import Draft
from torchmedic.records import StackFrame
from torchmedic.records.ranks import BACKWARD, FORWARD, WRAPPED, Collective, HandledException, Job, RankLog, RankState


def call(op: str, line: int, *, shape: tuple[int, ...] = (), peer: int | None = None, **more: object) -> Collective:
    frames = (StackFrame(file="train.py", line=line, function="main"),)
    return Collective(op=op, frames=frames, shapes=(shape,) if shape else (), peer=peer, **more)  # type: ignore[arg-type]


def log(rank: int, *calls: Collective, complete: bool = True) -> RankLog:
    numbered = [
        Collective(
            op=each.op,
            group=each.group,
            ordinal=place + 1,
            shapes=each.shapes,
            dtypes=each.dtypes,
            peer=each.peer,
            tag=each.tag,
            frames=each.frames,
            library=each.library,
            native=each.native,
            thread=each.thread,
            time=float(place),
        )
        for place, each in enumerate(calls)
    ]
    return RankLog(rank=rank, pid=100 + rank, world_size=4, calls=tuple(numbered), complete=complete)


STEP = (call("all_reduce", 10, shape=(4,)), call("all_reduce", 11, shape=(2,)))
SAVE, END = call("barrier", 20), call("barrier", 30)


def test_equal_logs_do_not_differ() -> None:
    assert first_difference([log(rank, *STEP, *STEP, END) for rank in range(3)]) is None


def test_a_call_too_many_is_found_where_it_was_made_and_not_where_the_job_stands() -> None:
    """The barrier of `save` pairs with the last barrier of the other rank; rank 0 then waits alone at its own last."""
    difference = first_difference([log(0, *STEP, SAVE, END), log(1, *STEP, END)])
    assert difference is not None
    assert difference.call is not None
    assert (difference.kind, difference.culprits, difference.call.site) == ("extra", (0,), SAVE.site)


def test_two_calls_of_a_library_are_no_call_with_other_contents() -> None:
    """A Trainer gathers counts in each turn of its loop, and a loss behind the loop, all under one line of the user."""

    def gather(dtype: str, line: int) -> Collective:
        library = (StackFrame(file="/lib/trainer.py", line=line, function="loop"),)
        return call("all_gather", 10, shape=(1,), dtypes=(dtype,), library=library)

    turn, behind = gather("int64", 50), gather("float32", 90)
    difference = first_difference([log(0, turn, turn, behind), log(1, turn, turn, turn)])
    assert difference is not None
    assert difference.kind != "content"


def test_the_majority_goes_the_common_way() -> None:
    difference = first_difference([log(0, *STEP, END), log(1, *STEP, SAVE, END), log(2, *STEP, END)])
    assert difference is not None
    assert (difference.culprits, difference.others, difference.by) == ((1,), (0, 2), "majority")


def test_of_two_ranks_the_one_that_leaves_its_habit_is_to_blame() -> None:
    difference = first_difference([log(0, *STEP, *STEP, *STEP), log(1, *STEP, *STEP, STEP[1])])
    assert difference is not None
    assert (difference.culprits, difference.by, difference.kind) == ((1,), "habit", "missing")


def test_a_habit_of_one_rank_is_no_habit_of_all() -> None:
    """Rank 0 alone makes a broadcast at line 21, which pairs with line 34 of rank 1 until there is no such line."""
    own, other = call("broadcast", 21, shape=(8,)), call("broadcast", 34, shape=(8,))
    difference = first_difference([log(0, *STEP, own, *STEP, own), log(1, *STEP, other, *STEP, END)])
    assert difference is not None
    assert difference.by == "nothing"


def test_the_same_collective_at_another_line_is_healthy() -> None:
    send, take = call("broadcast", 5, shape=(3,), peer=0), call("broadcast", 7, shape=(3,), peer=0)
    assert first_difference([log(0, send, *STEP, send, END), log(1, take, *STEP, take, END)]) is None


def test_healthy_lines_do_not_hide_a_later_cause() -> None:
    send, take = call("broadcast", 5, shape=(3,), peer=0), call("broadcast", 7, shape=(3,), peer=0)
    difference = first_difference([log(0, send, *STEP, SAVE, *STEP, END), log(1, take, *STEP, *STEP, END)])
    assert difference is not None
    assert difference.call is not None
    assert difference.call.site == SAVE.site


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call("all_gather", 9, shape=(4,)), call("all_gather", 9, shape=(3,))),
        (call("all_reduce", 9, dtypes=("float32",)), call("all_reduce", 9, dtypes=("float64",))),
        (call("broadcast", 9, peer=0), call("broadcast", 9, peer=1)),
    ],
)
def test_contents_that_do_not_fit(one: Collective, other: Collective) -> None:
    difference = first_difference([log(0, *STEP, one), log(1, *STEP, one), log(2, *STEP, other)])
    assert difference is not None
    assert (difference.kind, difference.culprits) == ("content", (2,))


def test_all_to_all_may_have_other_shapes_on_each_rank() -> None:
    logs = [log(rank, *STEP, call("all_to_all", 9, shape=(rank + 1,))) for rank in range(2)]
    assert first_difference(logs) is None


def test_a_part_of_all_to_all_that_the_other_rank_does_not_take() -> None:
    even, uneven = (Collective(op="all_to_all", shapes=(sent, (4, 4))) for sent in ((4, 4), (6, 2)))
    assert first_difference([log(0, even, even), log(1, even, even)]) is None
    difference = first_difference([log(0, even, even, END), log(1, even, uneven, END)])
    assert difference is not None
    assert difference.call is not None
    assert difference.expected is not None
    assert (difference.kind, difference.culprits, difference.others) == ("content", (1,), (0,))
    assert (difference.call.shapes, difference.expected.shapes) == (((6,),), ((4,),))


def test_a_member_that_went_past_the_call_of_its_group_is_to_blame_though_it_waits_too() -> None:
    """Rank 2 waits for rank 3 in their group, and rank 3 waits for rank 2 at the end: it is ahead."""
    made = (call("new_group", 1, shape=(0, 1)), call("new_group", 2, shape=(2, 3)))
    first, second = (call("all_reduce", 9, group=name) for name in "12")
    logs = [log(0, *made, first, END), log(1, *made, first, END), log(2, *made, second), log(3, *made, END)]
    difference = first_difference(logs)
    assert difference is not None
    assert (difference.kind, difference.group, difference.culprits) == ("stopped", "2", (3,))


def test_a_rank_without_a_further_call_has_stopped() -> None:
    difference = first_difference([log(0, *STEP, *STEP), log(1, *STEP)])
    assert difference is not None
    assert (difference.kind, difference.culprits, difference.call) == ("stopped", (1,), None)


def test_a_group_of_some_ranks_is_compared_among_its_members() -> None:
    inner = call("all_reduce", 40, group="1")
    assert first_difference([log(0, *STEP, inner, END), log(1, *STEP, END), log(2, *STEP, inner, END)]) is None


def test_calls_made_by_torch_count_only_where_all_logs_have_them() -> None:
    bucket = call("all_reduce", 12, native=True)
    logs = [log(0, bucket, *STEP, END), log(1, *STEP, END, complete=False)]
    assert first_difference(logs) is None


def test_overwritten_calls_are_left_out() -> None:
    whole = log(0, *STEP, *STEP, END)
    short = RankLog(rank=1, pid=2, world_size=2, calls=whole.calls[2:], complete=True, dropped=2)
    assert first_difference([whole, short]) is None


def test_two_ranks_that_both_receive_wait_for_each_other() -> None:
    found = unmatched([log(0, call("recv", 3, peer=1)), log(1, call("recv", 3, peer=0))])
    assert [rank for rank, _ in found] == [0, 1]
    assert unmatched([log(0, call("recv", 3, peer=1)), log(1, call("send", 3, peer=0))]) == []


def test_a_rank_waits_for_each_of_its_asynchronous_messages(tmp_path: Path) -> None:
    """The last call of rank 1 has met its partner, and the one before it has not."""
    script = tmp_path / "train.py"
    script.write_text("dist.isend(x, 2)\ndist.send(x, 2)\ndist.irecv(y, 0)\n")

    def told(line: int) -> list[tuple[int, str]]:
        frames = [(StackFrame(file=str(script), line=each, function="main"),) for each in (line, 3)]
        calls = (Collective(op="send", peer=2, frames=frames[0]), Collective(op="recv", peer=0, frames=frames[1]))
        logs = [log(0, call("send", 3, peer=1), END), log(1, *calls), log(2, END)]
        return [(rank, each.op) for rank, each in unmatched(logs)]

    assert told(1) == [(1, "send")]
    assert told(2) == []  # a call that had ended before the next was made


@pytest.mark.parametrize(("tag", "waiting"), [(0, []), (5, [0, 1])])
def test_messages_meet_only_with_the_same_tag(tag: int, waiting: list[int]) -> None:
    logs = [log(0, call("send", 10, peer=1, tag=tag)), log(1, call("recv", 20, peer=0))]
    assert [rank for rank, _ in unmatched(logs)] == waiting


def test_groups_with_other_members_and_models_of_another_size_differ() -> None:
    for op, complete in (("new_group", True), (BACKWARD, False)):
        logs = [log(rank, call(op, 10, shape=(0, rank)), complete=complete) for rank in (1, 2)]
        difference = first_difference(logs)
        assert difference is not None
        assert difference.kind == "content"


def test_of_two_ranks_the_one_that_left_the_loop_is_to_blame(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("for step in range(count):\n    forward()\n    backward()\nbarrier()\n")

    def at(op: str, line: int) -> Collective:
        return Collective(op=op, frames=(StackFrame(file=str(script), line=line, function="<module>"),))

    for stays, leaves in ((0, 1), (1, 0)):
        logs = [log(stays, at("all_reduce", 3), at("broadcast", 2)), log(leaves, at("all_reduce", 3), at("barrier", 4))]
        difference = first_difference(sorted(logs, key=lambda each: each.rank))
        assert difference is not None
        assert difference.by == "nothing"
        found = named(difference, [])
        assert (found.by, found.culprits) == ("loop", (leaves,))


@pytest.mark.parametrize(("answered", "culprit"), [(False, 0), (True, 1)])
def test_a_call_under_an_if_about_the_rank_that_nobody_answers(tmp_path: Path, answered: bool, culprit: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "for epoch in range(3):\n    step()\n    if rank == 0:\n        step()\n    else:\n        step()\n"
    )

    def at(line: int) -> Collective:
        return Collective(op="broadcast", frames=(StackFrame(file=str(script), line=line, function="<module>"),))

    logs = [log(0, at(2), at(4), at(2), at(4)), log(1, at(2), at(6 if answered else 2), at(2))]
    difference = first_difference(logs)
    assert difference is not None
    found = named(difference, [RankState(rank=each.rank, fate="ended", log=each) for each in logs])
    assert found.culprits == (culprit,)


def test_a_forward_without_its_backward() -> None:
    forward, backward = call(FORWARD, 13), call(BACKWARD, 17)
    skipped = forward_without_backward(log(1, forward, backward, forward, backward, forward, forward, backward))
    assert skipped is not None
    assert skipped.time == 4.0
    assert forward_without_backward(log(0, forward, backward, forward, backward)) is None


def test_two_forwards_for_each_backward_are_a_habit() -> None:
    """A discriminator is called for real and for fake samples, on one line."""
    step = (call(FORWARD, 13), call(FORWARD, 13), call(BACKWARD, 17))
    assert forward_without_backward(log(0, *step, *step, *step)) is None


def test_backwards_stand_for_the_calls_of_a_rank_that_has_died() -> None:
    """gloo aborts a rank whose partner is in another bucket; what torch called there is lost."""
    first, second = call(BACKWARD, 21), call(BACKWARD, 28)
    whole = log(0, first, second, first, second, first, second, complete=False)
    bucket = call("all_reduce", 21, native=True)
    difference = first_difference([whole, log(1, first, bucket, second, bucket, second)])
    assert difference is not None
    assert difference.expected is not None
    assert (difference.kind, difference.culprits) == ("missing", (1,))
    assert difference.expected.site == first.site


@pytest.mark.parametrize(("taken", "sent", "number"), [(5, 4, 4), (4, 4, None), (6, 4, None), (1, 0, None)])
def test_a_loop_of_messages_with_one_turn_too_many(taken: int, sent: int, number: int | None) -> None:
    """Rank 1 takes messages at line 39; rank 0 sends them at line 18, and waits for an answer then."""
    there = log(0, *[call("send", 18, peer=1)] * sent, call("recv", 23, peer=1))
    here = log(1, call("send", 45, peer=0), *[call("recv", 39, peer=0)] * taken)
    found = unequal_turns(here, there, here.calls[-1])
    assert (found[1] if found is not None else None) == number


@pytest.mark.parametrize(("before", "usual"), [(5, 5), (4, 4), (0, 0)])
def test_a_row_of_messages_of_a_stage_in_the_middle(before: int, usual: int) -> None:
    """Rank 1 hands on what it gets from rank 0; the messages with rank 0 do not end the row of those with rank 2."""
    turn = call("recv", 24, peer=0), call("send", 29, peer=2)
    taken, returned = call("recv", 24, peer=1), call("send", 41, peer=1)
    middle = log(1, *turn * before, call("recv", 38, peer=2), *turn * 5)
    last = log(2, *[taken] * before, returned, *[taken] * 4, returned)
    found = unequal_turns(middle, last, middle.calls[-1])
    assert found is not None
    assert (found.answer.site, found.number, found.usual) == (taken.site, 4, usual)


def waiting(*ranks: RankState) -> Job:
    return Job(world_size=len(ranks), ranks=ranks)


def test_a_rank_that_gave_up_waiting_for_another() -> None:
    """Calls are made at the seconds 0, 1, 2 of the logs. Rank 1 is at its third call, and gives up at second 8."""
    first, second = log(0, *STEP, call(FORWARD, 40)), log(1, *STEP, END)
    found = gave_up(waiting(RankState(rank=0, log=first), RankState(rank=1, log=second, raised=8.0)))
    assert found is not None
    assert (found.state.rank, [state.rank for state in found.late], found.waited) == (1, [0], 6.0)


@pytest.mark.parametrize(
    ("calls", "raised"),
    [
        ((*STEP, END), 8.0),  # the other rank had come
        (STEP, 2.5),  # an exception without a wait
        (STEP, 0.0),  # no exception, or one about a lost connection
    ],
)
def test_a_rank_that_raised_for_another_reason(calls: tuple[Collective, ...], raised: float) -> None:
    states = RankState(rank=0, log=log(0, *calls)), RankState(rank=1, log=log(1, *STEP, END), raised=raised)
    assert gave_up(waiting(*states)) is None


def test_a_message_to_a_rank_that_the_job_does_not_have() -> None:
    state = RankState(rank=1, log=log(1, call("send", 18, peer=2)))
    job = Job(world_size=2, ranks=(state,), unmatched=((1, call("send", 18, peer=2)),))
    draft = registry.load("ranks.message_without_partner").check(job)
    assert draft is not None
    assert draft.message == "rank 1 waits in `send` to rank 2, and the job has no rank 2"


def test_a_message_larger_than_its_buffer() -> None:
    def message(op: str, line: int, peer: int, rows: int) -> Collective:
        return call(op, line, shape=(rows, 2), peer=peer, dtypes=("float32",))

    sends = (message("send", 10, 1, 8), message("send", 10, 1, 3), message("recv", 11, 1, 3))
    takes = (message("recv", 20, 0, 8), message("recv", 20, 0, 8), message("send", 21, 0, 8))
    found = unequal_message([log(0, *sends), log(1, *takes)])
    assert found is not None
    assert found.call is not None
    assert found.expected is not None
    assert (found.culprits, found.call.site, found.expected.site) == ((0,), sends[1].site, takes[1].site)
    assert unequal_message([log(0, *sends[:2]), log(1, *takes[:2])]) is None  # smaller, which may be meant so
    assert (
        unequal_message([log(0, sends[0]), log(1, call("recv", 20, shape=(2, 8), peer=0, dtypes=("float32",)))]) is None
    )
    narrow = call("send", 10, shape=(8, 2), peer=1, dtypes=("bfloat16",))
    assert unequal_message([log(0, narrow), log(1, takes[0])]) is not None  # as many numbers, of another size


def test_a_ring_of_ranks_that_all_send_first() -> None:
    waits = tuple((rank, call("send", 18, peer=(rank + 1) % 3)) for rank in range(3))
    states = tuple(RankState(rank=rank, log=log(rank, wait)) for rank, wait in waits)
    check = registry.load("ranks.message_without_partner").check
    draft = check(Job(world_size=3, ranks=states, unmatched=waits))
    assert draft is not None
    assert draft.cause == "ranks 0, 1 and 2 all wait in `send`, each for the next: none comes to its `recv`"


WATCH = call("all_reduce", 40, shape=(1,), thread=1)


def test_the_order_of_two_threads_hides_no_call_that_one_thread_left_out() -> None:
    """The second thread is sometimes first, which is no mistake of the rank that leaves a call out."""
    first, second = STEP
    difference = first_difference([log(0, first, second, WATCH, *STEP, SAVE), log(1, first, WATCH, second, END)])
    assert difference is not None
    assert difference.call is not None
    assert difference.expected is not None
    assert {difference.call.thread, difference.expected.thread} == {0}


def test_a_second_thread_that_is_late_in_its_own_group_is_not_the_cause() -> None:
    late = call("all_reduce", 40, shape=(1,), group="1", thread=1)
    difference = first_difference([log(0, late, *STEP, END), log(1, *STEP, SAVE, END)])
    assert difference is not None
    assert (difference.kind, difference.group) == ("extra", "0")


def test_a_rank_in_the_handler_of_an_exception_left_the_way_of_the_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("try:\n    work()\n    more()\nfinally:\n    barrier()\nafter()\n")

    def at(op: str, line: int) -> Collective:
        return Collective(op=op, frames=(StackFrame(file=str(script), line=line, function="<module>"),))

    def state(rank: int, last: Collective, raised_at: int | None = None) -> RankState:
        frames = (StackFrame(file=str(script), line=raised_at or 0, function="<module>"),)
        handles = HandledException(kind="ValueError", text="bad", frames=frames, time=1.0) if raised_at else None
        return RankState(rank=rank, fate="running", log=log(rank, last), handles=handles)

    for raised_at, theirs, rank in ((2, 3, 0), (2, 2, 0), (2, 6, None), (None, 3, None)):
        states = [state(0, at("barrier", 5), raised_at), state(1, at("all_reduce", theirs))]
        difference = first_difference([each.log for each in states if each.log is not None])
        assert difference is not None
        found = named(difference, states)
        assert (found.culprits[0] if found.by == "exception" else None) == rank
        job = Job(world_size=2, ranks=tuple(states), difference=found)
        told = registry.load("ranks.collective_after_exception").check(job)
        assert (told is not None) == (rank is not None)


def test_models_with_other_buffers_cannot_be_wrapped_together() -> None:
    logs = [log(rank, END, call(WRAPPED, 12, shape=(rank, 64 * rank))) for rank in range(2)]
    difference = first_difference(logs)
    states = tuple(RankState(rank=each.rank, log=each) for each in logs)
    told = registry.load("ranks.collective_contents_differ").check(
        Job(world_size=2, ranks=states, difference=difference)
    )
    assert isinstance(told, Draft)
    assert "buffers (1 with 64 elements) on rank 1 and (0 with 0 elements) on rank 0" in told.message
