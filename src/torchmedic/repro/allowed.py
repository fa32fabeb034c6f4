"""The functions that a recipe may call: the operators of torch, and the functions named here.

A recipe comes from a run folder, which people mail to each other. So a call must be known as harmless: it computes with
tensors and has no other effect. Operators that read or write a file are not among them.
"""

from __future__ import annotations

import functools

import torch

from torchmedic.repro import recipe
from torchmedic.repro.recipe import Many, Recipe, Slice, Special

# Functions written in Python, which have no operator of the same name.
_NAMED = {
    "torch": "as_tensor asarray broadcast_shapes lobpcg pca_lowrank svd_lowrank tensor unique unravel_index",
    "Tensor": (
        "backward bfloat16 bool byte cdouble cfloat char cpu cuda double element_size float half int long lstsq lu "
        "ndimension nelement new_tensor numpy short to_sparse_coo tolist type unique"
    ),
    "torch.nn.functional": (
        "adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices "
        "affine_grid cross_entropy dropout1d dropout2d dropout3d fold fractional_max_pool2d_with_indices "
        "fractional_max_pool3d_with_indices gaussian_nll_loss grid_sample gumbel_softmax interpolate "
        "linear_cross_entropy local_response_norm logsigmoid lp_pool1d lp_pool2d lp_pool3d max_unpool1d "
        "multi_head_attention_forward multilabel_soft_margin_loss normalize softmin softsign tanhshrink upsample "
        "upsample_bilinear upsample_nearest"
    ),
    "torch.distributions": (
        "Bernoulli Beta Binomial Categorical Cauchy Chi2 ContinuousBernoulli Dirichlet Exponential FisherSnedecor "
        "Gamma Geometric Gumbel HalfCauchy HalfNormal InverseGamma Kumaraswamy LKJCholesky Laplace LogNormal "
        "LogisticNormal LowRankMultivariateNormal Multinomial MultivariateNormal NegativeBinomial Normal "
        "OneHotCategorical OneHotCategoricalStraightThrough Pareto Poisson RelaxedBernoulli "
        "RelaxedOneHotCategorical StudentT Uniform VonMises Weibull Wishart kl_divergence"
    ),
    "torch.nn": (
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveLogSoftmaxWithLoss AdaptiveMaxPool1d "
        "AdaptiveMaxPool2d AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss "
        "BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU CTCLoss ChannelShuffle CircularPad1d CircularPad2d "
        "CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d "
        "ConvTranspose2d ConvTranspose3d CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss CrossMapLRN2d "
        "Dropout Dropout1d Dropout2d Dropout3d ELU Embedding EmbeddingBag FeatureAlphaDropout Flatten Fold "
        "FractionalMaxPool2d FractionalMaxPool3d GELU GLU GRU GRUCell GaussianNLLLoss GroupNorm Hardshrink "
        "Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss Identity InstanceNorm1d InstanceNorm2d "
        "InstanceNorm3d KLDivLoss L1Loss LPPool1d LPPool2d LPPool3d LSTM LSTMCell LayerNorm LazyBatchNorm1d "
        "LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d "
        "LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear LeakyReLU Linear "
        "LocalResponseNorm LogSigmoid LogSoftmax MSELoss MarginRankingLoss MaxPool1d MaxPool2d MaxPool3d "
        "MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss "
        "MultiheadAttention NLLLoss PReLU PairwiseDistance PixelShuffle PixelUnshuffle PoissonNLLLoss RMSNorm RNN "
        "RNNCell RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d "
        "ReplicationPad2d ReplicationPad3d SELU SiLU Sigmoid SmoothL1Loss SoftMarginLoss Softmax Softmax2d Softmin "
        "Softplus Softshrink Softsign SyncBatchNorm Tanh Tanhshrink Threshold Transformer TransformerDecoderLayer "
        "TransformerEncoderLayer TripletMarginLoss Unflatten Unfold Upsample UpsamplingBilinear2d "
        "UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d"
    ),
}
_ALLOWED = {space: frozenset(names.split()) for space, names in _NAMED.items()}

# The namespaces whose functions have an operator of the same name, and what its name begins with.
_PREFIXES = {
    "torch": "",
    "Tensor": "",
    "torch.nn.functional": "",
    "torch._C._nn": "",
    "torch.linalg": "linalg_",
    "torch.special": "special_",
    "torch.fft": "fft_",
}


def check(given: Recipe) -> None:
    """Check that a recipe calls only allowed functions, with allowed arguments.

    Raises:
        ValueError: It contains anything else.
    """
    recipe.check(given)
    for line in given.lines:
        if not is_allowed(line.target):
            raise ValueError(f"call of {line.target!r}")
        pending = [*line.args, *line.kwargs.values()]
        while pending:
            argument = pending.pop()
            if isinstance(argument, Many):
                pending += argument.items
            elif isinstance(argument, Slice):
                pending += argument.parts
            elif isinstance(argument, Special) and argument.text.startswith("torch."):
                _check_constant(argument.text.removeprefix("torch."))
    for name in (*(each.dtype for each in given.inputs), *([given.autocast] if given.autocast else ())):
        _check_constant(name)


def _check_constant(name: str) -> None:
    if not isinstance(getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format):
        raise ValueError(f"the constant `torch.{name}`")


def is_allowed(target: str) -> bool:
    """Whether a recipe may call a function. The form of the name has been checked by `recipe.check`."""
    if target in recipe.STATEMENTS or target.startswith("operator."):
        return True
    space, _, name = target.rpartition(".")
    if space.startswith("torch.ops.aten."):
        operator = space.removeprefix("torch.ops.aten.")
        return name in _overloads().get(operator, ()) and not _takes_file(operator)
    if name.startswith("__"):
        return False
    if name in _ALLOWED.get(space, ()):
        return True
    if space not in _PREFIXES:
        return False
    operator = name if name in _overloads() else _PREFIXES[space] + name
    return operator in _overloads() and not _takes_file(operator)


@functools.cache
def _overloads() -> dict[str, frozenset[str]]:
    """The overloads of torch's own operators, by name."""
    found: dict[str, set[str]] = {}
    for whole in torch._C._dispatch_get_all_op_names():
        if whole.startswith("aten::"):
            name, _, overload = whole.removeprefix("aten::").partition(".")
            found.setdefault(name, set()).add(overload or "default")
    return {name: frozenset(overloads) for name, overloads in found.items()}


def _takes_file(operator: str) -> bool:
    packet = getattr(torch.ops.aten, operator)
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
    return any("file" in argument.name for schema in schemas for argument in schema.arguments)
