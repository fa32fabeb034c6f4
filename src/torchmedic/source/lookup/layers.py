"""Which layer gave a tensor its size, and where the user built it.

At a loss the model has already returned, so no frame of it is left. But the tensor's autograd graph leads to the
parameters of the layer that made it, and the model is still held by a variable, or by an attribute of a trainer.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.records import Location, Role
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.layer_construction import (
    _built_in_class,
    built_at,
    built_below,
    given_modules,
    held_modules,
)
from torchmedic.source.lookup.origins import origin_of, user_argument
from torchmedic.source.objects.graph import walk
from torchmedic.source.objects.parts import is_users
from torchmedic.source.syntax import FUNCTIONS, callee, has_line, innermost, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file, relative
from torchmedic.source.user_variables import user_trees

_COPIED = ("TransformerEncoderLayer", "TransformerDecoderLayer")
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_MAX_NODES = 64  # of the graph behind a tensor: far enough for a head with its softmax and its reshaping


def maker_of(tensor: torch.Tensor, size: int, frames: list[Frame]) -> torch.nn.Module | None:
    """The layer whose parameter gives a tensor this size; without a graph, the only layer that could."""
    parameter = _parameter_behind(tensor, size)
    owned = [
        module
        for root in _models(frames)
        for module in root.modules()
        if any(held is parameter if parameter is not None else False for held in module._parameters.values())
        or (parameter is None and _outputs(module) == size)
    ]
    distinct = list({id(module): module for module in owned}.values())
    return distinct[0] if len(distinct) == 1 else None


def layer_built_at(frames: list[Frame], layer: torch.nn.Module, label: str) -> Location | None:
    """The line that built a layer, also if an attribute of a trainer holds the model or a helper function built it.

    For a layer that a library builds, the line is that of the user's setting.
    """
    found = _built_at(frames, layer, label)
    if found is None:
        return _only_call(frames, layer, label)
    if not is_user_file(os.path.abspath(found.file)):
        return _set_by_user(frames, layer, found, label) or found
    name = type(layer).__name__
    return _in_helper(found, name, label) or _named_in_table(found, name, label) or found


def _only_call(frames: list[Frame], layer: torch.nn.Module, label: str) -> Location | None:
    """The only call of a layer's class in the user's files, where a model has one such layer and no library built it.

    So is a layer found that a function built which has returned.
    """
    made = list(_calls_of(type(layer).__name__))
    for root in _models(frames) if len(made) == 1 else ():
        alike = [path for path, module in root.named_modules() if type(module) is type(layer)]
        holders = [root.get_submodule(path.rpartition(".")[0]) for path in alike]
        is_own = all(is_users(type(each)) or isinstance(each, _CONTAINERS) for each in holders)
        if len(alike) == 1 and is_own and root.get_submodule(alike[0]) is layer:
            return node_location("origin", made[0].file, made[0].call, label)
    return None


def repeated_block(frames: list[Frame], layer: torch.nn.Module) -> torch.nn.Module | None:
    """The module of the user's that holds a layer as an attribute, if a model has several modules of that class.

    The line that builds the layer then builds the same layer in all of them.
    """
    for root in _models(frames):
        path = next((path for path, module in root.named_modules() if module is layer), "")
        holder, _, attribute = path.rpartition(".")
        block = root.get_submodule(holder)
        alike = [each for each in root.modules() if type(each) is type(block)]
        if holder and is_users(type(block)) and len(alike) > 1 and all(attribute in each._modules for each in alike):
            return block
    return None


def _named_in_table(built: Location, name: str, label: str) -> Location | None:
    """The only text in the user's files that is the name of a class which no line of them calls: `("Softmax", {})`."""
    if any(True for _ in _calls_of(name)):
        return None
    texts = [
        (file, node)
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, ast.Constant) and node.value == name
    ]
    return node_location(built.role, *texts[0], label) if len(texts) == 1 else None


def _set_by_user(frames: list[Frame], layer: torch.nn.Module, built: Location, label: str) -> Location | None:
    """The only keyword in the user's files that has the name of a layer's size; else the call that built the model.

    Before that call comes the one that made the configuration of the model.

    `nn.Linear(config.hidden_size, config.num_labels)` of a library leads to `BertConfig(num_labels=4)`.
    """
    size = 0 if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) else 1  # position among the arguments
    calls = [
        node
        for node in nodes_in(syntax_tree(os.path.abspath(built.file)))
        if isinstance(node, ast.Call) and node.lineno == built.line and callee(node) == type(layer).__name__
    ]
    match calls[0].args[size : size + 1] if calls else []:
        case [ast.Attribute(attr=name) | ast.Name(id=name)]:
            pass
        case _:
            name = ""
    models = [root for root in _models(frames) if any(module is layer for module in root.modules())]
    others = [getattr(getattr(model, "config", None), "attribute_map", None) for model in models]
    names = {name, *(each.get(name, name) for each in others if isinstance(each, dict))}
    given = [
        (file, word)
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg in names
    ]
    if len(given) == 1:
        return node_location("origin", *given[0], label)
    configs = [getattr(model, "config", None) for model in models]
    for kinds in (
        {type(each).__name__ for each in configs if each is not None},
        {type(each).__name__ for each in models},
    ):
        made = [each for kind in kinds for each in _calls_of(kind)]
        if len(made) == 1:
            return node_location("origin", made[0].file, made[0].call, label)
    return None


def _built_at(frames: list[Frame], layer: torch.nn.Module, label: str) -> Location | None:
    found = built_at(frames, layer, label)
    if found is not None:
        return found
    for _, owner, name, root in held_modules(frames):
        path = next((path for path, module in root.named_modules() if module is layer), None)
        if path is None or owner is None:
            continue
        node = _built_in_class(type(owner), f"{name}.{path}".rstrip("."))
        if node is not None:
            return node_location("origin", node[0], node[1], label)
    for root in [*given_modules(frames), *_models(frames)]:
        path = next((path for path, module in root.named_modules() if module is layer), None)
        node = built_below(root, path, type(layer)) if path else None
        if node is not None:
            return node_location("origin", node[0], node[1], label)
    return None


def table_built_at(frames: list[Frame], table: Any, layer: torch.nn.Module | None, label: str) -> Location | None:
    """The line that made a table: the layer that holds it, the attribute that it is, or the variable."""
    if layer is not None:
        return layer_built_at(frames, layer, label)
    if table is None:
        return None
    for root in roots(frames):
        for module in root.modules():
            for name, held in [*module._parameters.items(), *module._buffers.items(), *module.__dict__.items()]:
                if held is table:
                    node = _built_in_class(type(module), name)
                    if node is not None:
                        return node_location("origin", node[0], node[1], label)
    passed = user_argument(frames, table)
    if passed is None:
        return None
    origin = origin_of(frames, passed[0], passed[1].node)
    return None if origin is None else origin.location("origin", label)


def roots(frames: list[Frame]) -> list[torch.nn.Module]:
    """The modules that the user's live frames hold, the innermost frame's first, each once."""
    return list({id(module): module for *_, module in held_modules(frames)}.values())


def _models(frames: list[Frame]) -> list[torch.nn.Module]:
    """What `roots` gives; where only a library holds the model, the modules in its frames, outermost first."""
    given = [value for frame in frames if not frame.is_user for value in frame.variables.values()]
    found = {id(value): value for value in given if isinstance(value, torch.nn.Module)}
    return roots(frames) or list(found.values())


def _outputs(module: torch.nn.Module) -> int | None:
    for name in ("out_features", "out_channels"):
        size = module.__dict__.get(name)
        if isinstance(size, int):
            return size
    return None


def _parameter_behind(tensor: torch.Tensor, size: int) -> torch.Tensor | None:
    """The nearest parameter in the graph of a tensor that has this size."""
    for node in walk([tensor.grad_fn], most=_MAX_NODES, nearest_first=True):
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, torch.Tensor) and size in parameter.shape:
            return parameter
    return None


class _Made(NamedTuple):
    file: str
    call: ast.Call
    function: str  # that it stands in


def constructed_at(kind: type, numbers: tuple[int, ...], built: Location | None, label: str) -> Location | None:
    """The one call that can have built a layer; None where several can."""
    fitting = [each for each in _calls_of(kind.__name__) if _fits(each.call, numbers)]
    here = [each for each in fitting if built is not None and _is_at(each, built)]
    if len(here) == 1:
        return node_location("cause", here[0].file, here[0].call, label)
    return node_location("cause", fitting[0].file, fitting[0].call, label) if len(fitting) == 1 else None


def copied_layer_built_at(role: Role, label: str) -> Location | None:
    """The one call that builds a layer of a Transformer, which makes copies of the layer."""
    made = [each for kind in _COPIED for each in _calls_of(kind)]
    return node_location(role, made[0].file, made[0].call, label) if len(made) == 1 else None


def _in_helper(built: Location, name: str, label: str) -> Location | None:
    """The only call of a class in the helper functions of the function around a line; None if the line has such a call.

    So `self.body = nn.Sequential(*parts)` leads to the line of a helper function that makes one of the parts. Where the
    line calls what a table or a parameter holds, as `HEADS[name](...)`, any function of the user's may be the helper.
    """
    tree = syntax_tree(os.path.abspath(built.file))
    around = innermost(tree, built.line, FUNCTIONS) if tree is not None else None
    if around is None or any(_is_at(each, built) for each in _calls_of(name)):
        return None
    calls = [node for node in ast.walk(around) if isinstance(node, ast.Call)]
    called = {callee(node) for node in calls}
    within = [each for each in _calls_of(name) if each.function]
    fitting = [each for each in within if each.function in called]
    if not fitting and any(_is_chosen(node, around) for node in calls if has_line(node, built.line)):
        fitting = within
    return node_location(built.role, fitting[0].file, fitting[0].call, label) if len(fitting) == 1 else None


def _is_chosen(call: ast.Call, around: ast.AST) -> bool:
    """Whether a call is one of what a table, another call or a parameter of the function holds."""
    match call.func:
        case ast.Subscript() | ast.Call():
            return True
        case ast.Name(id=name):
            return any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(around))
    return False


def _is_at(made: _Made, built: Location) -> bool:
    last = made.call.end_lineno or made.call.lineno
    return relative(made.file) == built.file and made.call.lineno <= built.line <= last


def _fits(call: ast.Call, numbers: tuple[int, ...]) -> bool:
    """Whether no plain number among its arguments says otherwise."""
    known = [each.value if isinstance(each, ast.Constant) else None for each in call.args]
    return all(value is None or value == number for value, number in zip(known, numbers, strict=False))


def _calls_of(name: str) -> Iterator[_Made]:
    for file, tree in sorted(user_trees(), key=lambda each: each[0]):
        yield from _within(tree, "", name, file)


def _within(tree: ast.AST, function: str, name: str, file: str) -> Iterator[_Made]:
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, FUNCTIONS) else function
        if isinstance(node, ast.Call) and callee(node) == name:
            yield _Made(file, node, inside)
        yield from _within(node, inside, name, file)
