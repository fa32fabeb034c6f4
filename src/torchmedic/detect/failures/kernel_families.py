"""Which operations a failed check of a kernel can come from: by source file, kernel and condition.

Taken from the CUDA sources of PyTorch 1.x to 2.13 (`aten/src/ATen/native/cuda`), where one kernel often serves many
operations: `one_hot` is a scatter, `embedding` an index_select, and since 2.7 all of them may be one gather of rows.
"""

from __future__ import annotations

import re
from typing import Literal

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
    return frozenset(_OPERATIONS.get(family, "").split())
