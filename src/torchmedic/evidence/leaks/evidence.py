"""A holder that grows, with the source that fills and empties it: whether that has an end, and which line it is."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from torchmedic.evidence.leaks.grown_memory import GrownMemory
from torchmedic.evidence.leaks.keys import counts, is_bounded, is_by_identity, key_of, never_returns
from torchmedic.evidence.leaks.lifetimes import Lifetime, is_last_line, may_be_given_up
from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Site, Traffic, given_by_caller
from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.evidence.leaks.source.training_loops import training_loops
from torchmedic.evidence.memory.source.differentiated import is_name_differentiated
from torchmedic.observe.heap.walk import Held
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location, place
from torchmedic.source.spots import Place
from torchmedic.source.syntax import CALLABLES, Path, callee, calls_in, function_around, has_line, syntax_tree
from torchmedic.source.user_variables import user_files

_CACHE_PASSES = 3  # over the data, after which a cache has all of it
_WHOLE_PASSES = 2  # over the data, after which what is kept of it should be whole
_MIN_ITEM_BYTES = 64
_BEYOND_MEMORY = 1.2  # times the memory that is left
_LONG_STEPS = 128  # or
_MUCH_BYTES = 256 << 20  # that nobody gives up at the end of an epoch without a line that says so


class LeakEvidence(GrownMemory):
    """A growth with what the source says of it: the evidence for the rules TM450 to TM454."""

    @property
    def step_number(self) -> int:
        return self.growth.last.step

    @functools.cached_property
    def _files(self) -> list[str]:
        return list(dict.fromkeys([*user_files(), *(frame.f_code.co_filename for frame in self._frames)]))

    @functools.cached_property
    def traffic(self) -> Traffic:
        return traffic(self.growth.held, self._files)

    @functools.cached_property
    def put(self) -> Site | None:
        """The line that fills the holder."""
        return next(iter(self.traffic.puts), None)

    def at_put(self, role: Role, label: str) -> Location | None:
        """The line that fills the holder; where the source does not show it, the line that training is at."""
        if self.put is not None:
            return node_location(role, self.put.file, self.put.node, label)
        frame = self._frames[0] if self._frames else None
        return place(role, frame.f_code.co_filename, frame.f_lineno, "training is here") if frame is not None else None

    @functools.cached_property
    def giver(self) -> Site | None:
        """The only call that gives a helper what it stores, where the line that fills the holder is in a helper."""
        return given_by_caller(self.put, self._files) if self.put is not None else None

    def at_call(self, role: Role, where: Place, method: str, label: str) -> Location:
        """The call of a method on a line, or the whole line."""
        calls = [
            node for node in calls_in(syntax_tree(where.file)) if has_line(node, where.line) and callee(node) == method
        ]
        if len(calls) == 1:
            return node_location(role, where.file, calls[0], label)
        return place(role, where.file, where.line, label)

    @functools.cached_property
    def is_emptied(self) -> bool:
        """Whether the source shows that the holder is emptied or made anew, even if that was not seen yet."""
        takes, is_far = self.traffic.takes, self.far_limit is not None
        if self.growth.what != "data":
            takes = [site for site in takes if not is_last_line(site, self._frames)]
        is_limited = not is_far and (self.traffic.is_limited or bool(self.growth.held.most))
        lifetime = Lifetime(self.growth.held, self._frames, self._files)
        return bool(takes) or is_limited or lifetime.is_one_call or lifetime.has_passing_owner

    @functools.cached_property
    def may_be_given_up(self) -> bool:
        """Whether the holder has not outlived a turn of the loops around yet, and has not taken much so far."""
        growth = self.growth
        if self.is_notable or self.is_critical or growth.period != "step" or self.worker is not None:
            return False
        many = self.bytes_held >= _MUCH_BYTES if growth.what == "data" else growth.periods >= _LONG_STEPS
        return not many and may_be_given_up(growth, self._frames)

    @functools.cached_property
    def far_limit(self) -> tuple[int, int] | None:
        """The items that a bounded container may have, and their bytes, where memory ends long before."""
        growth, limit = self.growth, self.growth.held.most
        if limit <= growth.held.size or not growth.held.size or growth.held.kind != "items":
            return None
        grown = growth.rate * max(1, growth.periods)
        held = self.bytes_held / growth.held.size
        each = max(held, self.measured / grown if growth.what != "data" and grown else held, _MIN_ITEM_BYTES)
        is_far = self.left and limit * each > _BEYOND_MEMORY * (self.left + self.bytes_held)
        return (limit, int(limit * each)) if is_far else None

    @functools.cached_property
    def may_fill_up(self) -> bool:
        """Whether the holder is filled by key, and may soon have all keys that there are."""
        if self.put is None or self.far_limit is not None or self.is_critical:
            return False
        if is_bounded(self.put):
            return True
        if counts(self.growth.held, self.put, self._files):
            return False
        if self.growth.what == "graphs" and is_by_identity(self.put):
            return False
        return self.grew_over_passes() < _WHOLE_PASSES if self.has_passes else not self.is_notable

    @property
    def is_cache(self) -> bool:
        """Whether the holder is a cache, which stops growing when it has everything once."""
        held, put = self.growth.held, self.put
        if put is None or not (held.via == "cache" or put.is_guarded):
            return False
        if never_returns(held, put, self._files):
            return False
        # Of what is left, one of several workers sees an ever smaller part in each pass: such growth is not steady.
        passes = max(_CACHE_PASSES, 2 * self.worker[1]) if self.worker is not None else _CACHE_PASSES
        return self.grew_over_passes() < passes

    def grew_over_passes(self) -> int:
        """Over how many passes over its data set the holder went on growing; 0 where that is not known."""
        first, last = self.growth.first.marks, self.growth.last.marks
        return max((last[mark] - first.get(mark, 0) for mark in last if mark.startswith("pass ")), default=0)

    @property
    def has_passes(self) -> bool:
        return any(mark.startswith("pass ") for mark in self.growth.last.marks)

    @functools.cached_property
    def may_be_whole_soon(self) -> bool:
        """Whether the data was not passed over twice yet, and what is kept of it may be wanted as a whole."""
        reads_data = any(mark.startswith(("pass ", "stream ")) for mark in self.growth.last.marks)
        if not reads_data or self.grew_over_passes() >= _WHOLE_PASSES or self.is_critical:
            return False
        return bool(self.growth.held.via) or is_read(self.growth.held, self.traffic, self._files)

    @functools.cached_property
    def is_trained_on(self) -> bool:
        """Whether the holder is filled between trainings, which then use all of it: labelled samples, games, stages."""
        if self.put is None or self.is_critical or self.growth.held.via == "cache":
            return False  # a cached function is filled wherever it is called
        return training_loops(self._files).read_what_others_fill(self.growth.held, self.put)

    @property
    def is_of_library(self) -> bool:
        """Whether the holder belongs to an object of a library, and no line of the user's own fills it."""
        held = self.growth.held
        whole = re.sub(r"\[.*?\]", "", held.name)
        return self.put is None and "." in whole and not whole.endswith(f".{held.last}")

    @property
    def goes_backward(self) -> bool:
        """Whether a loss is made from the items, so that they need their graphs."""
        return is_name_differentiated(self.growth.held.last, self._files)


def is_read(held: Held, traffic: Traffic, files: list[str]) -> bool:
    """Whether a line uses a holder for more than to put something in, or to ask how long it is."""
    name = HolderName(held)
    filling = {id(owner) for site in traffic.puts for owner in _owners(site.node)}
    keys = {(site.function, ast.dump(key)) for site in traffic.puts if (key := key_of(site)) is not None}
    for file in dict.fromkeys([held.file, *files]):
        tree = syntax_tree(file) if file else None
        for node, path in _nodes_with_paths(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and callee(node) == "len":
                filling |= {id(each) for each in node.args}
            elif isinstance(node, ast.Subscript) and (function_around(path), ast.dump(node.slice)) in keys:
                filling.add(id(node.value))  # what was put in at this moment
            elif (
                isinstance(node, ast.Name | ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and id(node) not in filling
                and name.may_stand(file, path)
                and name.at(path).is_meant_by(node)
            ):
                return True
    return False


def _owners(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a statement that name the holder which it fills."""
    owner: ast.AST | None = None
    match node:
        case ast.Call(func=ast.Attribute(value=value)):
            owner = value
        case ast.Assign(targets=[target, *_]) | ast.AugAssign(target=target):
            owner = target
    while owner is not None:
        yield owner
        owner = getattr(owner, "value", None) or getattr(owner, "func", None)


def _nodes_with_paths(tree: ast.AST) -> Iterator[tuple[ast.AST, Path]]:
    """Every node of a file, outer ones first, with the functions and classes around it."""
    pending: list[tuple[ast.AST, Path]] = [(tree, ())]
    while pending:
        node, path = pending.pop()
        yield node, path
        inner = (*path, node) if isinstance(node, CALLABLES | ast.ClassDef) else path
        pending.extend((child, inner) for child in ast.iter_child_nodes(node))
