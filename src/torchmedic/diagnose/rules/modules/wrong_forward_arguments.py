"""A module was called with arguments that its `forward` does not accept.

What: the arguments of `module(...)` are passed to `module.forward(...)`. An argument is missing, there is one too many,
or an argument has a name that `forward` does not have. The same happens to a function of the script that a library
calls: a hook, a callback, a method of a Trainer that a subclass writes anew.

Why: a loss called without its target, `nn.Sequential`, which passes one value from module to module, a `forward`
without `self`, or a signature that was changed in one place only. A Trainer that wants the loss of the model leaves out
all fields of the data that are no arguments of `forward`, so labels under another name never arrive, nor does a field
that only `compute_loss` or a collate function reads.

Cure: call the module with the arguments of its signature, or change the signature. What a library calls takes the
arguments of its documentation; `**kwargs` at the end takes those of a later version. A Trainer keeps all fields with
`TrainingArguments(remove_unused_columns=False)`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import fed_by, layer_name
from torchmedic.evidence.dataset_item import fetch_again
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, frames_of, node_location, place
from torchmedic.source.lookup.failing_call import raising_call
from torchmedic.source.lookup.origins import CALLING
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, nodes_in
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import user_trees

_REFUSED = re.compile(r"([\w.<>]+)\(\) (?:takes|got|missing) ")  # what Python says of arguments
_MAX_TEXT = 120  # of a call


@rule("TM173", "wrong-forward-arguments")
def check(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.frames[-1] if evidence.frames else None
    if frame is not None and "ValueError" in evidence.kinds and evidence.says("did not return a loss"):
        return _without_labels(evidence)
    if "KeyError" in evidence.kinds:
        return _removed_field(evidence)
    if frame is None or "TypeError" not in evidence.kinds:
        return None
    if not frame.is_user and (called := _called_back(evidence, frame)) is not None:
        return _own_function(evidence, frame, called)
    call = raising_call(frame)
    if frame.function in CALLING and frame.module is not None and not frame.is_user:
        if call is None or not isinstance(frame.node, ast.Call) or ast.unparse(frame.node.func) != "forward_call":
            return None  # a hook was called, not `forward`
        module = frame.module
        args, kwargs = frame.variables.get("args", ()), frame.variables.get("kwargs", {})
    elif call is not None and isinstance(owner := getattr(call.function, "__self__", None), nn.Module):
        if call.op != "forward" or not call.whole:
            return None
        module = owner
        args = tuple(argument.value for argument in call.arguments if not argument.name)
        kwargs = {argument.name: argument.value for argument in call.arguments if argument.name}
    else:
        return None
    why = _unbindable(module, args, kwargs)
    return _diagnosis(evidence, module, why, args, kwargs) if why else None


def _called_back(evidence: RaisedEvidence, frame: Frame) -> FunctionType | None:
    """The script's own function that a library was calling, by its name in the message and the library's variables."""
    named = _REFUSED.match(evidence.message)
    for value in frame.variables.values() if named is not None else ():
        method = inspect.getattr_static(type(value), named[1].rpartition(".")[2], None) if named is not None else None
        for each in (value, getattr(value, "__func__", None), getattr(method, "__func__", method)):
            if isinstance(each, FunctionType) and named is not None and each.__qualname__ == named[1]:
                is_own = is_user_file(each.__code__.co_filename)
                return each if is_own and each.__name__ not in ("forward", "<lambda>") else None
    return None


def _own_function(evidence: RaisedEvidence, frame: Frame, called: FunctionType) -> Draft:
    library = str(frame.live.f_globals.get("__name__", "")).partition(".")[0] or "a library"
    name, code, call = called.__name__, called.__code__, frame.node
    why = evidence.message.partition("() ")[2]
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` cannot take the arguments that {library} calls it with"
    draft.cause = f"it is {why}" if why.startswith("missing") else f"it {why}"
    given = isinstance(call, ast.Call) and library == "torch" and all(isinstance(a, ast.Starred) for a in call.args)
    its_own = place("origin" if given else "cause", code.co_filename, code.co_firstlineno, f"{library} calls this")
    if given:  # `checkpoint(function, a, b)`
        draft.at(*evidence.at_user_line("cause", f"passed on to `{name}`"), its_own)
        return draft.help(f"give `{name}` the arguments that it takes")
    draft.at(its_own, *evidence.at_user_line("surfaced", f"{library} runs from here"))
    draft.because(f"{library} calls it as `{ast.unparse(call)[:_MAX_TEXT]}`" if isinstance(call, ast.Call) else "")
    return draft.help(f"give `{name}` the parameters that {library} passes, or let it end in `*args, **kwargs`")


def _without_labels(evidence: RaisedEvidence) -> Draft | None:
    """A Trainer wants the loss of the model, and the model was not given the labels that it computes one from."""
    for frame in reversed(evidence.library_frames):
        model, inputs = frame.variables.get("model"), frame.variables.get("inputs")
        if not isinstance(model, nn.Module) or not isinstance(inputs, Mapping):
            continue
        names = list(inspect.signature(model.forward).parameters)
        labels = [name for name in names if "label" in name and name not in inputs]
        if not labels:
            return None
        draft = check.draft(evidence, "proven")
        draft.message = f"the model returned no loss: its `forward` was not given `{labels[0]}`"
        draft.cause = f"it takes ({', '.join(names)}), and the batch holds {listed([f'`{name}`' for name in inputs])}"
        other = _field_of_labels(names)
        data = getattr(frame.variables.get("self"), "train_dataset", None)
        item = getattr(getattr(type(data), "__getitem__", None), "__code__", None)
        if other is not None:
            draft.at(other, *evidence.at_user_line("surfaced", "wants a loss"))
        elif item is not None and is_user_file(item.co_filename):
            draft.at(place("cause", item.co_filename, item.co_firstlineno, f"gives no `{labels[0]}`"))
            draft.at(*evidence.at_user_line("surfaced", "wants a loss"))
        else:
            draft.at(*evidence.at_user_line("cause", f"the batches hold no `{labels[0]}`"))
        draft.because("a Trainer leaves out all fields of an item that are no arguments of `forward`")
        return draft.help(f"call the field with the labels `{labels[0]}` in each item of the dataset")
    return None


def _field_of_labels(taken: list[str]) -> Location | None:
    """The line that names the only field of an item which `forward` does not take."""
    item = fetch_again(0, lambda value, depth: isinstance(value, Mapping))
    fields = [name for name in (item.dataset[0] if item is not None else ()) if name not in taken]
    named = [
        (file, node)
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, ast.Constant) and len(fields) == 1 and node.value == fields[0]
    ]
    return node_location("cause", *named[0], "`forward` takes no field of this name") if len(named) == 1 else None


def _removed_field(evidence: RaisedEvidence) -> Draft | None:
    """A Trainer has removed a field of the data that `forward` does not take, and code of the user's reads it."""
    error = evidence.incident.error
    field = error.args[0] if error.args else None
    owners = [frame.variables.get("self") for frame in frames_of(error.__traceback__)]
    trainer = next((each for each in owners if isinstance(getattr(each, "_signature_columns", None), list)), None)
    args = getattr(trainer, "args", None)
    if not isinstance(field, str) or trainer is None or getattr(args, "remove_unused_columns", None) is not True:
        return None
    columns = getattr(getattr(trainer, "train_dataset", None), "column_names", None) or ()
    if field in trainer._signature_columns or not (field in columns or fetch_again(0, _has(field)) is not None):
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"the Trainer has removed `{field}` from the data: `forward` does not take it"
    draft.cause = (
        f"`remove_unused_columns` is on, and `forward` takes {listed([f'`{each}`' for each in _taken(trainer)])}"
    )
    made = [
        Place(file, node.lineno)
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, ast.Call) and callee(node) == type(args).__name__
    ]
    if len(made) == 1:
        draft.at(place("cause", *made[0], "leaves `remove_unused_columns` on"))
    draft.at(*evidence.at_user_line("surfaced" if len(made) == 1 else "cause", f"reads `{field}`"))
    draft.because(f"the items of the dataset have `{field}`, and the batch has not")
    return draft.help(f"pass `remove_unused_columns=False` to `{type(args).__name__}`")


def _has(field: str) -> Callable[[Any, int], bool]:
    return lambda value, depth: isinstance(value, Mapping) and field in value


def _taken(trainer: Any) -> list[str]:
    return list(inspect.signature(trainer.model.forward).parameters)


def _unbindable(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Why the signature cannot take the arguments; empty if it can."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return _without_self(module)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _without_self(module: nn.Module) -> str:
    code = getattr(type(module).forward, "__code__", None)
    return "`forward` takes no argument, not even `self`" if code is not None and code.co_argcount == 0 else ""


def _diagnosis(evidence: RaisedEvidence, module: nn.Module, why: str, args: Any, kwargs: Any) -> Draft:
    given = [*(type(value).__name__ for value in args), *(f"{name}=" for name in kwargs)]
    taken = f"`forward{_signature(module)}`"
    draft = check.draft(evidence, "proven")
    draft.message = f"{layer_name(evidence, module)} was called with arguments that its `forward` does not take: {why}"
    draft.cause = f"it was given ({', '.join(given)}), and takes {taken}"
    draft.at(*evidence.at_user_line("cause", why))
    code = getattr(type(module).forward, "__code__", None)
    if code is not None and not type(module).__module__.startswith("torch."):
        draft.at(place("origin", code.co_filename, code.co_firstlineno, f"takes {_signature(module)}"))
    draft.because(fed_by(evidence, module))
    first = next(iter(inspect.signature(type(module).forward).parameters), None)
    if isinstance(module, nn.Sequential):
        draft.help("`nn.Sequential` takes one value and passes it on: write a module with a `forward` of its own")
    elif isinstance(module, nn.modules.loss._Loss) and len(args) == 1:
        draft.help("call the loss with both the prediction and the target")
    elif first != "self" and code is not None and code.co_argcount == len(args):
        draft.help(f"give `forward` its first parameter, `self`: it now is `{first}`")
    else:
        draft.help("call it with what the signature says, or change the signature")
    return draft


def _signature(module: nn.Module) -> str:
    try:
        names = [
            str(parameter.replace(annotation=inspect.Parameter.empty))
            for parameter in inspect.signature(module.forward).parameters.values()
        ]
    except (TypeError, ValueError):
        names = []
    return f"({', '.join(names)})"
