"""What the check-up of the first steps has found out, with the places in the user's source that belong to it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Sequence
from types import FrameType

import msgspec
import torch

from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.node_births import Birth, Site
from torchmedic.observe.checkup.unreached_parameters import Unreached
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.numbers.windows import Copy
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import Frame, place, position_of, stack_of
from torchmedic.source.lookup.gradient_switches import switch_around
from torchmedic.source.lookup.layers import layer_built_at, repeated_block, roots
from torchmedic.source.lookup.optimizers import Construction
from torchmedic.source.objects.weak_table import WeakTable
from torchmedic.source.spots import Spot
from torchmedic.source.syntax import FUNCTIONS, innermost, syntax_tree

_COMPILED = "_orig_mod."  # what `torch.compile` puts before the names of a module


class CheckUp:
    """Evidence for the rules about a single step.

    Args:
        graphs: The calls of backward that were looked at, oldest first.
        frame: Where training is now, for the objects that are alive; None at the end of the script.
        optimized: The parameters that optimizers hold.
        unreached: The parameters without a gradient, once that is known.
        models: Modules that are known to be trained, where no frame holds them.
        past: The weights of some updates ago.
        sure_after_one: Whether one look is enough, because somebody asks about this very batch.
        drawn: Sizes of batches whose items a DataLoader has drawn at random.
        constructions: The calls that built optimizers.
        first_call: The first backward call, where it was kept.
    """

    def __init__(
        self,
        graphs: Sequence[LossGraph],
        frame: FrameType | None,
        *,
        optimized: Sequence[torch.Tensor] = (),
        unreached: Unreached | None = None,
        models: Sequence[torch.nn.Module] = (),
        rank: int = 0,
        past: Copy | None = None,
        sure_after_one: bool = False,
        drawn: Collection[int] = (),
        constructions: WeakTable[Construction] | None = None,
        first_call: KeptBackward | None = None,
    ) -> None:
        self.graphs = graphs
        self.optimized = optimized
        self.unreached = unreached
        self.rank = rank
        self.past = past
        self._sure_after_one = sure_after_one
        self.drawn = drawn
        self.constructions = constructions or WeakTable[Construction]()
        self.first_call = first_call
        self._frame = frame
        self._models = models

    @property
    def step_number(self) -> int | None:
        return self.graphs[-1].step if self.graphs else None

    @functools.cached_property
    def frames(self) -> list[Frame]:
        """The frames of the training loop, outermost first."""
        return stack_of(self._frame)

    @functools.cached_property
    def models(self) -> list[torch.nn.Module]:
        """The models in sight."""
        called = self.unreached.cuts.modules if self.unreached is not None else ()
        return list({id(module): module for module in (*self._models, *roots(self.frames), *called)}.values())

    def of_line(self, graph: LossGraph) -> list[LossGraph]:
        """The graphs of the line that called backward, oldest first."""
        return [other for other in self.graphs if other.key == graph.key]

    def is_enough(self, looks: int, wanted: int) -> bool:
        """Whether a line was looked at often enough to say what it does in every step."""
        return looks >= (1 if self._sure_after_one else wanted)

    # Places

    def at(self, role: Role, sites: Sequence[Site], label: str) -> Location | None:
        """The user's innermost line."""
        return spot_of(sites[0]).location(role, label) if sites else None

    def switched_off(self, sites: Sequence[Site]) -> Location | None:
        """The expression that switches gradients off around one of these instructions, the innermost first."""
        switches = (switch_around(site.code.co_filename, spot_of(site).line) for site in sites)
        return next((switch.location() for switch in switches if switch is not None), None)

    def of_node(self, role: Role, node: Node | None, label: str) -> Location | None:
        """Where an operation was written down: the layer that it is, or the call."""
        return None if node is None or node.birth is None else self.of_birth(role, node.birth, label)

    def of_end(self, graph: LossGraph, node: Node, label: str) -> list[Location]:
        """The cause, where an operation is one at the end of a model that should not be there.

        Where the layer belongs to a class of blocks that follow each other, this is the line that builds its block.
        """
        found = self.of_node("cause", node, label)
        if found is None:
            return []
        layer = _layer_of(node)
        earlier = [graph.nodes[number] for number in graph.below(node.number) if number != node.number]
        is_repeated = layer is not None and any(
            _layer_of(other) not in (None, layer) and _site_of(other) == _site_of(node) for other in earlier
        )
        block = repeated_block(self.frames, layer) if layer is not None and is_repeated else None
        built = self.built("cause", block, f"a `{type(block).__name__}`: {label}") if block is not None else None
        if built is None or (built.file, built.line) == (found.file, found.line):
            return [found]
        return [built, msgspec.structs.replace(found, role="origin", label="each of these blocks has one")]

    def of_birth(self, role: Role, birth: Birth, label: str) -> Location | None:
        layer = birth.layer() if birth.layer is not None else None
        built = self.built(role, layer, label) if layer is not None else None
        return built or self.at(role, birth.sites, label)

    def built(self, role: Role, layer: torch.nn.Module, label: str) -> Location | None:
        """The line that built a layer."""
        found = layer_built_at(self.frames, layer, label)
        return msgspec.structs.replace(found, role=role) if found is not None else None

    def backward_call(self, graph: LossGraph, role: Role, label: str) -> Location:
        return place(role, *graph.key, label)

    def statements(self, graph: LossGraph) -> Iterator[ast.stmt]:
        """The statements of the function, or of the script, that calls backward."""
        file, line = graph.key
        tree = syntax_tree(file)
        if tree is None:
            return
        around = innermost(tree, line, FUNCTIONS) or tree
        yield from (node for node in ast.walk(around) if isinstance(node, ast.stmt) and node is not around)

    # Parameters

    def name_of(self, tensor: torch.Tensor) -> str:
        """A parameter as its model calls it; empty where no model in sight has it."""
        return max((name for _, name, _ in self.owners(tensor)), key=len, default="")

    def owners(self, tensor: torch.Tensor) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
        """The models that have a parameter, its name there, and the layer that holds it."""
        for model in self.models:
            for path, module in model.named_modules():
                for name, held in module._parameters.items():
                    if held is tensor:
                        yield model, f"{path}.{name}".lstrip(".").replace(_COMPILED, ""), module


def _layer_of(node: Node) -> torch.nn.Module | None:
    return node.birth.layer() if node.birth is not None and node.birth.layer is not None else None


def _site_of(node: Node) -> Site | None:
    return node.birth.sites[0] if node.birth is not None and node.birth.sites else None


def spot_of(site: Site) -> Spot:
    """The expression of an instruction."""
    code = site.code
    line, end_line, column, end_column = position_of(code, site.lasti)
    return Spot(code.co_filename, line or code.co_firstlineno, column, end_line, end_column, code.co_name)
