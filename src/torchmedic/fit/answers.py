"""Operations that torch cannot carry out on fake tensors of CUDA on its own, or only slowly.

Values are invented: a number that is read from the device is 1, a truth is False. Where the values decide about the
shape of a result, the largest possible result is assumed, so that the memory is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchmedic.fit.cards import Card
from torchmedic.records.fit import Trace
from torchmedic.replay.fake.known_values import for_real, tensors_of
from torchmedic.replay.fake.recurrent import answer as recurrent

Answer = Callable[[Trace, Any, Any, Any], Any]
_LARGEST = "sizes that depend on values are assumed to be the largest possible: the memory is an upper bound"
_WARP = 32  # threads
_REDUCE_THREADS = 512  # in a block
_MIN_VALUES_PER_THREAD, _MAX_VALUES_PER_THREAD = 16, 256  # that one thread adds up before the work is divided further
_FOREACH = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")


def _note(trace: Trace, text: str) -> None:
    if text not in trace.notes:
        trace.notes.append(text)


def _item(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    dtype = args[0].dtype
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return complex(1.0)
    return 1.0 if dtype.is_floating_point else 1


def _truth(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return False


def _nonzero(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    _note(trace, _LARGEST)
    return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)


def _masked_select(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    _note(trace, _LARGEST)
    return args[0].new_empty(max(args[0].numel(), args[1].numel()))


def _index(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Reading by a mask: as many elements as the mask has."""
    indices: list[Any] = []
    for each in args[1]:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            _note(trace, _LARGEST)
            indices += [each.new_empty(each.numel(), dtype=torch.int64) for _ in range(each.dim())]
        else:
            indices.append(each)
    return func(args[0], indices, **kwargs)


def _write(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _unique(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    _note(trace, _LARGEST)
    count = args[0].numel()
    return (
        args[0].new_empty(count),
        args[0].new_empty(args[0].shape, dtype=torch.int64),
        args[0].new_empty(count, dtype=torch.int64),
    )


def _recurrent(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return recurrent(func, args, kwargs)


def _packed(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """The rows of sequences without their padding, and how many sequences are left at each time."""
    given, lengths, batch_first = args
    rows, times = given.shape[:2] if batch_first else given.shape[1::-1]
    if isinstance(lengths, FakeTensor):
        _note(trace, _LARGEST)
        known = [times] * rows
    else:
        known = for_real(torch.Tensor.tolist, (lengths,), {})
    left = [sum(length > time for length in known) for time in range(max(known, default=0))]
    return given.new_empty((sum(left), *given.shape[2:])), for_real(torch.tensor, (left,), {})


def _packed_backward(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].new_empty(args[1])


def _alike_first(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return torch.empty_like(args[0])


def _rms_norm(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, and the factor of each row, which backward needs."""
    given, shape = args[:2]
    rows = (*given.shape[: given.dim() - len(shape)], *[1] * len(shape))
    return torch.empty_like(given), given.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    given, weight, wanted = args[1], args[4], args[5]
    return (
        torch.empty_like(given) if wanted[0] else None,
        torch.empty_like(weight) if wanted[1] and weight is not None else None,
    )


def _ctc_loss(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """The losses, and a table of a value for each label of the longest target, with blanks between, at each time."""
    scores, targets = args[:2]
    times, batch = scores.shape[:2]
    longest = targets.shape[-1] if targets.dim() > 1 else -(-targets.numel() // batch)  # of targets in a row: the mean
    return scores.new_empty((batch,)), scores.new_empty((batch, times, 2 * longest + 1))


def _ctc_loss_backward(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return torch.empty_like(args[1])


_aten: Any = torch.ops.aten
ANSWERS: dict[Any, Answer] = {
    _aten._local_scalar_dense.default: _item,
    _aten.is_nonzero.default: _truth,
    _aten.equal.default: _truth,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten.index_put_.default: _write,
    _aten._index_put_impl_.default: _write,
    _aten._unique2.default: _unique,
    _aten._cudnn_rnn.default: _recurrent,
    _aten._cudnn_rnn_backward.default: _recurrent,
    _aten._pack_padded_sequence.default: _packed,
    _aten._pack_padded_sequence_backward.default: _packed_backward,
    _aten._amp_update_scale_.default: _write,
}
_CTC: dict[str, Answer] = {
    "_use_cudnn_ctc_loss": _truth,
    "_use_miopen_ctc_loss": _truth,
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _ctc_loss_backward,
}
# A card has one kernel for each of these. A build without CUDA takes them apart, unless it is told of the kernels.
WHOLE: dict[str, Answer] = {
    "silu_backward": _alike_first,
    "mish_backward": _alike_first,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
}
ANSWERS |= {
    getattr(getattr(_aten, name), overload): answer
    for name, answer in (_CTC | WHOLE).items()
    for overload in ("default", "Tensor")
    if hasattr(getattr(_aten, name, None), overload)
}


def foreach(func: Any) -> Answer | None:
    """The answer for an operation on lists of tensors, which torch would play one by one."""
    name = func._schema.name
    if not name.startswith(_FOREACH):
        return None
    if func._schema.is_mutable:
        return _nothing if name.endswith("_") else None
    return _norms if "norm" in name or name.endswith("max") else _alike


def _nothing(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return None


def _alike(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    first = next(each for each in args if isinstance(each, list | tuple) and tensors_of(each))
    return [torch.empty_like(each) for each in first]


def _norms(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return [each.new_empty(()) for each in args[0]]


def passing_bytes(name: str, args: Any, card: Card) -> int:
    """Bytes that a kernel takes beside its results and frees before it ends."""
    if name == "sum" and len(args) > 1:
        return _partial_sums(args[0], args[1], card)
    if name == "_scaled_dot_product_flash_attention_backward":
        # The gradient of the queries is summed up in float32, in rows of 128 and columns of 32.
        batch, heads, length, width = args[1].shape
        length, width = -(-length // 128) * 128, -(-width // 32) * 32
        return int(4 * batch * heads * length * (width + 1))
    if name == "_ctc_loss_backward":
        return int(args[6].nbytes)  # a second table as that of the forward pass
    if name in ("embedding_dense_backward", "sort", "unique", "_unique2"):
        count = args[1].numel() if name == "embedding_dense_backward" else args[0].numel()
        return int(4 * 8 * count)  # indices, sorted indices and what the sorting takes
    return 0


def _partial_sums(tensor: Any, dims: Any, card: Card) -> int:
    """Bytes of the partial results of a sum over rows, as for the gradient of a bias.

    Few columns are added up by many blocks of threads, each with a partial result for every thread. The division of
    the work is that of `aten/src/ATen/native/cuda/Reduce.cuh`.
    """
    leading = sorted(dim % tensor.dim() for dim in dims or range(tensor.dim()))
    if leading != list(range(len(leading))) or len(leading) == tensor.dim() or not tensor.is_contiguous():
        return 0  # the sum runs along the fastest dimension: the partial results are few
    rows = math.prod(tensor.shape[: len(leading)])
    columns = tensor.numel() // rows if rows else 0
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    groups = columns // vector
    threads = _REDUCE_THREADS // vector
    if not groups:
        return 0
    height = min(_power_of_two(min(rows, threads)), threads // min(_power_of_two(min(groups, threads)), _WARP))
    width = min(_power_of_two(min(groups, threads)), threads // height)
    if rows < height * _MIN_VALUES_PER_THREAD:
        return 0
    values = -(-rows // height)
    blocks = -(-groups // width)
    most_blocks = card.processors * (card.threads_per_processor // (width * height))
    if values < _MAX_VALUES_PER_THREAD or blocks > most_blocks:
        return 0
    wanted = min(-(-most_blocks // blocks), -(-values // _MIN_VALUES_PER_THREAD))
    split = max(wanted, -(-values // _MAX_VALUES_PER_THREAD))
    return 4 * columns * split * width * vector if split > 1 else 0


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1)
