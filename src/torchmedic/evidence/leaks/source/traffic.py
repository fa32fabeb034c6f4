"""The lines of the user's code that put something into a holder, take something out or start it anew.

A holder may be no container: a chain or tree, a cached function, an object, a table of hooks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from torchmedic.evidence.leaks.source.container_traffic import of_container
from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Site, Traffic, functions_of, nodes_of
from torchmedic.observe.heap.walk import Held
from torchmedic.records.memory import HeldMemory
from torchmedic.source.assignments import is_blank
from torchmedic.source.syntax import callee, last_name
from torchmedic.source.user_variables import user_files

# The methods that fill a table of hooks, where their name is not that of the table: `register_forward_hook`.
_HOOK_METHODS = {
    "_backward_hooks": ("register_full_backward_hook", "register_backward_hook", "register_hook"),
    "_backward_pre_hooks": ("register_full_backward_pre_hook",),
    "_optimizer_step_pre_hooks": ("register_step_pre_hook",),
    "_optimizer_step_post_hooks": ("register_step_post_hook",),
    "_post_accumulate_grad_hooks": ("register_post_accumulate_grad_hook",),
}


def traffic(held: Held, files: Iterable[str]) -> Traffic:
    """Every line that may change a holder, those that put tensors in before those that put in numbers."""
    known = list(dict.fromkeys([held.file, *files])) if held.file else list(files)
    if held.kind == "hooks":
        return of_hooks(held, known)
    if held.inner:
        return of_inner(held, known)
    if held.via:
        return of_pieces(held, known)
    return of_container(held, known)


def of_inner(held: Held, files: list[str]) -> Traffic:
    """The traffic of pieces that are made at one line and filled at another: the line that fills comes first."""
    whole = held._replace(inner="")
    outer = of_pieces(whole, files) if held.via else of_container(whole, files)
    one = held._replace(name=f"x.{held.inner}", last=held.inner, local=0, via="", inner="", owners=())
    filled = [site for site in of_container(one, files).puts if isinstance(site.node, ast.Call)]
    filled.sort(key=lambda site: not _mentions(site.node, held.last))  # others may have an attribute of that name
    return outer._replace(puts=[*filled, *outer.puts])


def _mentions(node: ast.AST, name: str) -> bool:
    return any(last_name(part) == name for part in ast.walk(node))


def of_pieces(held: Held, files: list[str]) -> Traffic:
    """The lines that fill and cut something that is no container: a chain or tree, a cached function, an object."""
    plain = held._replace(via="")
    files = list(dict.fromkeys([held.file, *files]))
    if held.via == "cache":
        return Traffic(list(_cached(plain, files)), list(_cleared(plain, files)), False)
    if held.via == "attributes":
        return Traffic([site for site, name in _calls(plain, files) if name == "setattr"], [], False)
    return _of_links(held, of_container(plain, files), files)


def _of_links(held: Held, of_head: Traffic, files: list[str]) -> Traffic:
    """The traffic of objects that lead to each other by an attribute; `of_head` is that of the first one."""
    links = HolderName(held._replace(name=f"x.{held.via}", last=held.via, via="", owners=()))
    filled: list[Site] = []
    linked: list[Site] = []
    cut: list[Site] = []
    for file in files:
        for node, path in nodes_of(file):
            filled += [Site(file, node, value, path) for value in links.puts(node)]  # type: ignore[arg-type]
            new = links.starts(node)
            site = Site(file, node, new, path)  # type: ignore[arg-type]
            if new is not None and not isinstance(new, ast.Constant):
                linked += [site] if not (site.builds and is_blank(new)) else []
            elif links.takes(node) or (new is not None and not site.builds and (site.function or site.loops)):
                cut.append(site._replace(value=None))
    # What is taken out of the place where a chain begins takes no link out of it.
    anew = [site for site in of_head.takes if isinstance(site.value, ast.Call | ast.Constant)]
    puts = [*filled, *of_head.puts, *sorted(linked, key=lambda site: site.builds)]
    return Traffic(puts, [*cut, *anew], of_head.is_limited)


def _cached(held: Held, files: list[str]) -> Iterator[Site]:
    """The decorators that give a function a cache."""
    for file, function in functions_of(held.last, files):
        for decorator in function.decorator_list:
            if "cache" in ast.unparse(decorator):
                yield Site(file, decorator, None, ())


def _cleared(held: Held, files: list[str]) -> Iterator[Site]:
    for file in files:
        for node, path in nodes_of(file):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="cache_clear", value=ast.Name(id=name) | ast.Attribute(attr=name))
                ) if name == held.last:
                    yield Site(file, node, None, path)


def _calls(held: Held, files: list[str]) -> Iterator[tuple[Site, str]]:
    """The calls whose first argument is the holder, each with the name of the function."""
    name = HolderName(held)
    for file in files:
        for node, path in nodes_of(file):
            if isinstance(node, ast.Call) and node.args and name.may_stand(file, path):
                first = node.args[0]
                if name.is_meant_by(first) or (isinstance(first, ast.Name) and first.id == "self"):
                    yield Site(file, node, node.args[-1], path), callee(node)


def of_hooks(held: Held, files: list[str]) -> Traffic:
    """The calls that register hooks in a table; those that may run again and again first."""
    methods = _HOOK_METHODS.get(held.last, (f"register{held.last.removesuffix('s')}",))
    puts = [
        Site(file, node, node.args[0] if node.args else None, path)
        for file in dict.fromkeys(files)
        for node, path in nodes_of(file)
        if isinstance(node, ast.Call) and callee(node) in methods
    ]
    return Traffic(sorted(puts, key=lambda site: (site.builds, not site.loops and site.function is None)), [], False)


def with_lines(found: list[tuple[Held, int]]) -> list[HeldMemory]:
    """Holders and their bytes, each with the line that fills it."""
    holders = []
    for held, nbytes in found:
        put = next(iter(traffic(held, user_files()).puts), None)
        holders.append(
            HeldMemory(
                name=held.name,
                nbytes=nbytes,
                items=held.size if held.kind == "items" else 0,
                file=put.file if put is not None else "",
                line=put.node.lineno if put is not None else 0,
            )
        )
    return holders
