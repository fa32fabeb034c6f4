"""Which lines register hooks in a table of a module, a tensor or an optimizer."""

from __future__ import annotations

import ast

from torchmedic.evidence.leaks.source.sites import Site, Traffic, nodes_of
from torchmedic.observe.heap.walk import Held
from torchmedic.source.syntax import callee

# Tables that more than one method fills; of the others the method is called as the table is.
_METHODS = {
    "_backward_hooks": ("register_full_backward_hook", "register_backward_hook", "register_hook"),
    "_backward_pre_hooks": ("register_full_backward_pre_hook",),
    "_optimizer_step_pre_hooks": ("register_step_pre_hook",),
    "_optimizer_step_post_hooks": ("register_step_post_hook",),
    "_post_accumulate_grad_hooks": ("register_post_accumulate_grad_hook",),
}


def of_hooks(held: Held, files: list[str]) -> Traffic:
    """The calls that register there; those that may be run again and again first."""
    methods = _METHODS.get(held.last, (f"register{held.last.removesuffix('s')}",))
    puts = [
        Site(file, node, node.args[0] if node.args else None, path)
        for file in dict.fromkeys(files)
        for node, path in nodes_of(file)
        if isinstance(node, ast.Call) and callee(node) in methods
    ]
    return Traffic(sorted(puts, key=lambda site: (site.builds, not site.loops and site.function is None)), [], False)
