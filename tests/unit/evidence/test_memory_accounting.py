"""Bytes are counted once, by who holds them, and without disturbing anything."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from torchmedic.detect.failures.exhaustion import exhaustion_of
from torchmedic.evidence.memory.accounting.book import SavedHere
from torchmedic.evidence.memory.accounting.measured import measure
from torchmedic.evidence.memory.accounting.saved_by_graph import tensors_saved_by, weights_before, weights_of
from torchmedic.evidence.memory.accounting.storages import Memory, total
from torchmedic.evidence.memory.accounting.walk import held_tensors
from torchmedic.evidence.memory.attempts import is_lent
from torchmedic.evidence.memory.batch_sizes import longest_row
from torchmedic.evidence.memory.by_line import Alignment, Layers, by_line
from torchmedic.evidence.memory.fake.ledger import ByteLedger, Place, Saved
from torchmedic.source.objects.graph import walk
from torchmedic.source.spots import Spot

CARD = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 80.00 GiB of which 1.00 GiB is "
    "free. Process 77 has 20.00 GiB memory in use. Including non-PyTorch memory, this process has 59.00 GiB memory in "
    "use. 60.00 GiB allowed; Of the allocated memory 50.00 GiB is allocated by PyTorch, and 8.50 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)
GiB = 1 << 30


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.dropout(torch.relu(self.up(self.norm(x))), 0.5, True))


def saved_in(roots: list[torch.Tensor], but: list[torch.Tensor]) -> int:
    """Bytes that the graph behind some tensors has saved, those of other tensors left out."""
    kept = [tensor for node in walk([root.grad_fn for root in roots], set()) for tensor in tensors_saved_by(node)]
    return total([*kept, *but]) - total(but)


def test_storage_that_is_shared_counts_once() -> None:
    weight = torch.randn(100, 100)
    assert total([weight, weight.t(), weight[3:5], weight.detach(), nn.Parameter(weight)]) == 40_000
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (5,), check_invariants=True)
    assert total([sparse]) == 2 * 8 + 2 * 4
    assert total([nn.Linear(2, 2, device="meta").weight, torch.empty(0)]) == 16


def test_what_a_graph_has_saved_is_read_without_unpacking_it() -> None:
    model = nn.Sequential(Block(8), Block(8))
    x = torch.randn(4, 8, requires_grad=True)
    fixed = [x, *model.parameters(), *model.buffers()]
    out = model(x)
    whole = saved_in([out], fixed)
    assert whole > 0
    kept = checkpoint(model, x, use_reentrant=False)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert saved_in([kept], fixed) < whole
    assert not calls, "a checkpoint was computed again"
    out.sum().backward()
    assert saved_in([out], fixed) == 0


def test_a_fake_replay_counts_what_the_real_graph_has_saved_and_changes_nothing() -> None:
    model = nn.Sequential(Block(64), Block(64), nn.Linear(64, 10))
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    before = [tensor.clone() for tensor in model.state_dict().values()]
    state = torch.get_rng_state()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = ByteLedger(fake, {id(child): name for name, child in model.named_modules()}, time.monotonic() + 30)
    with torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack), fake, ledger:
        assert int(y.max()) == y.max().item(), "indices in host memory keep their values"
        nn.functional.cross_entropy(model(x), y).backward()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one, two) for one, two in zip(before, model.state_dict().values(), strict=True))
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    real = saved_in([loss], [x, y, *model.parameters(), *model.buffers()])
    assert sum(each.nbytes for each in ledger.saved.values()) == real
    by_module: dict[str, int] = {}
    for each in ledger.saved.values():
        by_module[each.place.module] = by_module.get(each.place.module, 0) + each.nbytes
    assert by_module["0"] == by_module["1"]
    assert {each.place.spot.file for each in ledger.saved.values() if each.place.spot} == {__file__}


def test_the_words_of_a_card_are_read() -> None:
    said = exhaustion_of(frozenset({"OutOfMemoryError", "RuntimeError"}), CARD)
    assert said is not None
    assert (said.where, said.index, said.asked) == ("cuda", 1, int(2.5 * GiB))
    assert (said.capacity, said.free, said.allowed) == (80 * GiB, GiB, 60 * GiB)
    assert (said.allocated, said.unallocated, said.others) == (50 * GiB, int(8.5 * GiB), 20 * GiB)
    found = measure(said)
    assert (found.used, found.cache, found.outside) == (79 * GiB, int(8.5 * GiB), int(20.5 * GiB))


def test_what_is_not_about_memory_is_not_taken_for_it() -> None:
    assert exhaustion_of(frozenset({"RuntimeError"}), "mat1 and mat2 shapes cannot be multiplied") is None
    assert exhaustion_of(frozenset({"ValueError"}), "DefaultCPUAllocator: can't allocate memory") is None
    host = exhaustion_of(frozenset({"MemoryError"}), "Unable to allocate 1.50 GiB for an array with shape")
    assert host is not None
    assert (host.where, host.asked) == ("host", int(1.5 * GiB))


def test_the_longest_item_of_a_padded_batch_is_found() -> None:
    rows = torch.zeros(4, 100, dtype=torch.long)
    for row, length in enumerate((12, 9, 100, 10)):
        rows[row, :length] = 5
    found = longest_row([rows], [40, 41, 42, 43], 100)
    assert found is not None
    assert (found.item, found.length) == (42, 100)
    assert longest_row([rows[:2]], [40, 41], 100) is None


def test_nodes_of_a_replay_that_took_another_way_are_laid_beside_the_real_ones() -> None:
    """The replay made one node more in each of three layers; sizes bring the numbers together again."""
    spots = [Spot("model.py", 10 + layer, None, None, None, "forward") for layer in range(3)]
    ledger: Any = SimpleNamespace(saved={}, places={})
    entries = []
    for layer, spot in enumerate(spots):
        real, played = 100 + 4 * layer, 5 * layer
        for part, nbytes in enumerate((4096, 1 << 20)):
            memory = Memory(10 * layer + part, nbytes, torch.device("cpu"))
            entries.append(SavedHere(memory, "MulBackward0", real + part, (nbytes,)))
            ledger.saved[10 * layer + part] = Saved(nbytes, (nbytes,), played + part, Place(spot, f"{layer}"))
            ledger.places[played + part] = Place(spot, f"{layer}")
    found, method = by_line(entries, 100, ledger, Layers([]))
    assert method == "fake replay"
    assert {(line.spot.line, line.nbytes) for line in found if line.spot} == {
        (10 + n, (1 << 20) + 4096) for n in range(3)
    }
    place = Alignment(entries, 100, ledger).place_of(109)
    assert place is not None
    assert place.module == "2"
    for entry in ledger.saved:
        ledger.saved[entry] = ledger.saved[entry]._replace(nbytes=7)
    assert by_line(entries, 100, ledger, Layers([]))[1] == "live graph"


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, 2, batch_first=True)
        self.twice = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(x)  # <- the one call
        return torch.Tensor(self.twice(self.twice(states)))


def test_a_node_is_placed_by_the_weights_that_it_leads_to_where_no_replay_can() -> None:
    inner = Inner()
    model = nn.Sequential(nn.Linear(4, 4), inner)
    layers = Layers(model.modules())
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if text.rstrip().endswith("# <- the one call"))

    node = inner.rnn(torch.randn(2, 3, 4))[0].grad_fn
    while not weights_of(node):
        node = node.next_functions[0][0]
    place = layers.place(weights_of(node))
    assert place is not None
    assert place.module == "1.rnn"
    assert place.spot is not None
    assert (place.spot.file, place.spot.line) == (__file__, line)

    twice = layers.place([id(inner.twice.weight)])
    assert twice is not None
    assert (twice.module, twice.spot) == ("1.twice", None)  # called in two places: which one is not known
    assert layers.place([id(inner.twice.weight), id(inner.rnn.weight_ih_l0)]) is None
    assert layers.place([]) is None


def test_weights_are_found_behind_what_turns_and_casts_them_and_behind_gates() -> None:
    layer = nn.Linear(4, 4, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = layer(torch.randn(2, 4))
    assert weights_of(cast.grad_fn) == (id(layer.weight),)
    cell = nn.LSTMCell(4, 4)
    state, _ = cell(torch.randn(2, 4))
    gates = [node for node in walk((state.grad_fn,), set()) if node.name() == "SigmoidBackward0"]
    own = {id(weight) for weight in cell.parameters()}
    assert gates
    for gate in gates:
        assert not weights_of(gate)
        assert set(weights_before(gate)) <= own


def test_what_an_object_holds_that_a_function_was_given_outlives_the_call() -> None:
    def given(keeper: Any, tensor: torch.Tensor) -> Any:
        mine = SimpleNamespace(kept=tensor.clone())
        return sys._getframe(), mine

    frame, _ = given(SimpleNamespace(kept=torch.ones(3)), torch.ones(4))
    lent = {found.holder.path: is_lent(found.holder) for found in held_tensors([frame]) if found.holder.in_frame}
    assert lent == {"keeper.kept": True, "mine.kept": False, "tensor": False}
