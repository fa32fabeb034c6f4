"""What the GPU's kernels said before they died: failed checks, as the driver prints them on stderr.

    /pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0],
    thread: [4,0,0] Assertion `t >= 0 && t < n_classes` failed.            (one line in truth; each thread says it)

It is the only first-hand word on which operation was at fault: the exception comes later, and from another place. The
driver's printing is neither whole lines nor at the start of one: a progress bar may stand before it, and other output
may tear it apart.

Which operations a check can come from is taken from the CUDA sources of PyTorch 1.x to 2.13
(`aten/src/ATen/native/cuda`), where one kernel often serves many operations: `one_hot` is a scatter, `embedding` an
index_select, and since 2.7 all of them may be one gather of rows.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Literal

import msgspec

from torchmedic.runfolder import gpu

_MAX_ASSERTIONS = 64
_MAX_LINES_EACH = 4
_MAX_TEXT_BYTES = 48 * 1024
_TAIL_BYTES = 4096  # how far back the beginning of a line may be
_HEAD_BYTES = 2048

# CUDA and Triton say which thread; SYCL has other words for it; HIP says neither.
_THREAD = rb"(?:block: \[([\d, ]+)\], thread|global id: \[([\d, ]+)\], local id): \[([\d, ]+)\]:?\s+Assertion"
_FAILED = re.compile(rb"(?:%s|Device-side assertion) `((?:(?!ssertion `).){0,600}?)[`'] failed" % _THREAD, re.DOTALL)
_ABORTED = re.compile(rb":0:(rocdevice\.cpp)\s*:\s*(\d+)\s*:[^\n]*?(aborting with error[^\n]*)\n")
_SOURCE = re.compile(rb"((?:[A-Za-z]:)?[^\s:]*\.[A-Za-z]\w*|<[^<>\n]+>|[^\s:]+):(\d+):\s+(?:(.*):\s+)?$", re.DOTALL)
_FILE = re.compile(rb"((?:[A-Za-z]:)?[^\s:]*\.(?:cuh?|h|hpp|c[cp]p|hip|py)):(\d+):\s+(?:(.*):\s+)?$", re.DOTALL)
_MORE = re.compile(rb"^ {4}and (\d+) more like it\n", re.MULTILINE)
Family = Literal[
    "label",
    "embedding",
    "rows",
    "index",
    "index_add",
    "scatter_gather",
    "embedding_bag",
    "masked_scatter",
    "multinomial",
    "bernoulli",
    "bce",
    "unpool",
    "assert_async",
    "compiled",
    "aborted",
    "other",
]

# The first that fits decides: a pattern for the file's name without its ending, one for kernel and condition together.
_FAMILIES: tuple[tuple[Family, str, str], ...] = (
    ("multinomial", r"", r"probability tensor contains|multinomial distribution"),
    ("assert_async", r"TensorCompare|", r"_assert_async"),
    ("assert_async", r"TensorCompare", r""),
    ("aborted", r"rocdevice", r""),
    ("compiled", r"", r"^\S* ?index out of bounds: "),
    ("embedding_bag", r"EmbeddingBag", r""),
    ("embedding", r"Embedding\w*", r""),
    ("scatter_gather", r"IndexKernelUtils|\w*[Ss]catter\w*", r"scatter|idx_dim|indexValue"),
    ("rows", r"IndexKernelUtils|", r"vectorized[_ ]gather"),
    ("scatter_gather", r"\w*Scatter\w*", r""),
    ("masked_scatter", r"IndexKernel|", r"masked_scatter|totalElements"),
    ("index", r"IndexKernel", r""),
    ("embedding", r"Indexing|THCTensorIndex|", r"indexSelect|srcSelectDimSize"),
    ("index_add", r"Indexing|THCTensorIndex|", r"index(Add|Func)|dstAddDimSize"),
    ("index", r"Indexing|THCTensorIndex", r""),
    ("bce", r"Loss|BCECriterion|", r"(input|target)(_val)?\s*>=\s*(zero|0)"),
    ("label", r"Loss|NLLLoss2d|MultiMarginLoss|MultiLabelMargin\w*|\w*(NLL|Margin)\w*", r""),
    ("label", r"", r"nll_loss|n_classes"),
    ("multinomial", r"Multinomial\w*|", r"[Mm]ultinomial|renormRows"),
    ("multinomial", r"Multinomial\w*", r""),
    ("bernoulli", r"Distribution\w*|", r"0 <= p\d? && p\d? <= 1|bernoulli"),
    ("unpool", r"MaxUnpooling|", r"maxind|max_unpool"),
    ("index", r"", r"-sizes\[i\] <= index|index >= -sizes\[i\]"),
)

_OPERATIONS: dict[Family, str] = {
    "label": (
        "nll_loss nll_loss_nd nll_loss_forward nll_loss_backward nll_loss2d nll_loss2d_forward nll_loss2d_backward "
        "cross_entropy_loss multi_margin_loss multi_margin_loss_backward multilabel_margin_loss "
        "multilabel_margin_loss_forward multilabel_margin_loss_backward"
    ),
    "embedding": "embedding index_select embedding_renorm embedding_dense_backward embedding_backward",
    "rows": "embedding index_select index _unsafe_index gather take_along_dim",
    "index": "index index_put _index_put_impl _unsafe_index _unsafe_index_put index_fill index_copy take put",
    "index_add": "index_add index_reduce index_copy",
    "scatter_gather": "gather scatter scatter_add scatter_reduce one_hot take_along_dim gather_backward",
    "embedding_bag": "embedding_bag _embedding_bag _embedding_bag_forward_only _embedding_bag_backward",
    "masked_scatter": "masked_scatter",
    "multinomial": "multinomial",
    "bernoulli": "bernoulli",
    "bce": "binary_cross_entropy",
    "unpool": "max_unpool2d max_unpool3d",
    "assert_async": "_assert_async",
}
_INDEXING: tuple[Family, ...] = (
    "label",
    "embedding",
    "rows",
    "index",
    "index_add",
    "scatter_gather",
    "embedding_bag",
)  # that take indices
_BOUND = re.compile(r"index out of bounds: 0 <= \S+ < (\d+)")  # of a kernel that the compiler wrote


class KernelAssertion(msgspec.Struct, frozen=True, kw_only=True):
    """A failed check of a kernel.

    `count` is how many threads said so. `file`, `line` and `kernel` are empty where they were not said, or were torn
    apart by other output.
    """

    file: str
    line: int
    kernel: str
    condition: str
    family: Family
    count: int = 1
    text: str = ""

    @property
    def bound(self) -> int | None:
        """The number that every index must be below, where the check says it."""
        found = _BOUND.search(self.condition) if self.family == "compiled" else None
        return int(found[1]) if found is not None else None

    def could_be(self, operation: str) -> bool | None:
        """Whether this operation (`aten.embedding.default`) launches such a kernel; None where that is not known."""
        known = operations_of(self.family)
        if not known:
            return None
        return re.sub(r"^aten(\.|::)", "", operation).split(".")[0].rstrip("_") in known


class _Said(msgspec.Struct):
    """A failed check whose lines are still being collected."""

    file: str
    line: int
    kernel: str
    condition: str
    count: int = 0
    lines: list[str] = []

    def so_far(self) -> KernelAssertion:
        return KernelAssertion(
            file=self.file,
            line=self.line,
            kernel=self.kernel,
            condition=self.condition,
            family=family_of(self.file, self.kernel, self.condition),
            count=self.count,
            text=self.lines[0],
        )


class Listener:
    """Picks the failed checks out of a stream, of which thousands of threads may write the same."""

    def __init__(self) -> None:
        self._tail = b""
        self._heard: list[_Said] = []
        self._known: dict[tuple[str, int, str], _Said] = {}
        self._last: _Said | None = None
        self._size = 0

    def feed(self, data: bytes) -> bool:
        """Read some more of the stream; True if it had a failed check in it."""
        data = self._tail + data if self._tail else data
        if not _has_hint(data):
            self._tail = data[data.rfind(b"\n") + 1 :][-_TAIL_BYTES:]
            return False
        done = 0
        for match in _FAILED.finditer(data):
            start = max(done, data.rfind(b"\n", done, match.start()) + 1)
            self._failed(data[start : match.start()][-_HEAD_BYTES:], match)
            done = match.end()
        for match in _ABORTED.finditer(data, done):
            self._add(_Said(_text(match[1]), int(match[2]), "", _text(match[3])), match[0].strip())
            done = match.end()
        self._tail = data[done:][-_TAIL_BYTES:]
        return done > 0

    def again(self, count: int) -> None:
        """Count repetitions of the last failed check."""
        if self._last is not None:
            self._last.count += count

    @property
    def distinct(self) -> int:
        return len(self._heard)

    def assertions(self) -> list[KernelAssertion]:
        """What was said, in the order in which it was first said."""
        return [said.so_far() for said in self._heard]

    def text(self) -> str:
        """A text that `assertions` can read: the first lines of each failed check, and how many more there were."""
        parts = []
        for said in self._heard:
            parts += [line + "\n" for line in said.lines]
            if said.count > len(said.lines):
                parts.append(f"    and {said.count - len(said.lines)} more like it\n")
        return "".join(parts)

    def _failed(self, head: bytes, match: re.Match[bytes]) -> None:
        source = _FILE.search(head) or _SOURCE.search(head)
        file, line, kernel = (source[1], int(source[2]), source[3] or b"") if source is not None else (b"", 0, b"")
        if not file.startswith(b"<"):
            file = re.split(rb"[\[\]|]", file)[-1]  # what stood before it on the line: a progress bar
        file, kernel = (b"" if word == b"unknown" else word for word in (file, kernel))  # Triton's
        whole = head[source.start() if source is not None else len(head) :] + match[0] + b"."
        self._add(_Said(_text(file), line, _text(kernel).strip(), _text(match[4])), whole)

    def _add(self, new: _Said, whole: bytes) -> None:
        self._last = said = self._same(new)
        if said is None:
            if len(self._heard) == _MAX_ASSERTIONS or self._size > _MAX_TEXT_BYTES:
                return
            self._last = said = new
            self._heard.append(said)
            self._known[new.file, new.line, new.condition] = said
        said.count += 1
        if len(said.lines) < _MAX_LINES_EACH and self._size <= _MAX_TEXT_BYTES:
            said.lines.append(_text(whole))
            self._size += len(whole)

    def _same(self, new: _Said) -> _Said | None:
        """What another thread has said already. Of a line that was torn apart, the condition alone is left."""
        said = self._known.get((new.file, new.line, new.condition))
        if said is None and not new.file:
            said = next((each for each in self._heard if each.condition == new.condition), None)
        elif said is None and (said := self._known.pop(("", 0, new.condition), None)) is not None:
            said.file, said.line, said.kernel = new.file, new.line, new.kernel
            self._known[new.file, new.line, new.condition] = said
        return said


def _has_hint(data: bytes) -> bool:
    return (b"`" in data and b"ssertion `" in data) or b"rocdevice.cpp" in data


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def assertions(text: str) -> list[KernelAssertion]:
    """The distinct failed checks in a text, in the order in which they first appear."""
    listener = Listener()
    # Odd parts are the counts of `Listener.text`.
    for number, part in enumerate(_MORE.split(text.encode("utf-8", "surrogateescape"))):
        if number % 2:
            listener.again(int(part))
        else:
            listener.feed(part)
    return listener.assertions()


def words_of(run: Path, wait: float = 1.5, rank: int | None = None) -> list[KernelAssertion]:
    """What the kernels of this run said, in a process that is dying of it: the parent may need a moment to hear it.

    Args:
        run: The run folder.
        wait: Seconds to wait for the first word. Once there is one, only until no more are added.
        rank: Whose words, where every rank has a parent of its own; by default our own.
    """
    end = time.monotonic() + wait
    text = gpu.read_kernel_words(run, rank)
    while time.monotonic() < end:
        time.sleep(min(0.06, wait))
        before, text = text, gpu.read_kernel_words(run, rank)
        if text and text == before:
            break
    return assertions(text)


def family_of(file: str, kernel: str, condition: str) -> Family:
    """The family of a failed check; file and kernel may be empty."""
    name = re.split(r"[/\\]", file)[-1].split(".")[0]
    said = f"{kernel} {condition}".strip()
    for family, names, words in _FAMILIES:
        if (not names or re.fullmatch(names, name)) and re.search(words, said):
            return family
    return "other"


def operations_of(family: Family) -> frozenset[str]:
    """The operations of ATen that launch such kernels, without overload; none where it could be any."""
    if family == "compiled":
        return frozenset[str]().union(*map(operations_of, _INDEXING))
    return frozenset(_OPERATIONS.get(family, "").split())
