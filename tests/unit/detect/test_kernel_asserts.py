"""Failed checks of kernels, picked out of whatever else a process writes to stderr."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from torchmedic.detect.failures.kernel_asserts import Listener, assertions, words_of
from torchmedic.runfolder import gpu

WHERE = "block: [3,0,0], thread: [31,0,0] "
ATEN = "/pytorch/aten/src/ATen/native/cuda/"

# (what the driver writes, file, line, kernel, condition, family)
LINES = {
    "label": (
        f"{ATEN}Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: {WHERE}"
        "Assertion `t >= 0 && t < n_classes` failed.",
        f"{ATEN}Loss.cu",
        245,
        "nll_loss_forward_reduce_cuda_kernel_2d",
        "t >= 0 && t < n_classes",
        "label",
    ),
    "label, on Windows": (
        rf"C:\actions-runner\pytorch\aten\src\ATen\native\cuda\NLLLoss2d.cu:106: {WHERE}"
        "Assertion `t >= 0 && t < n_classes` failed.",
        r"C:\actions-runner\pytorch\aten\src\ATen\native\cuda\NLLLoss2d.cu",
        106,
        "",
        "t >= 0 && t < n_classes",
        "label",
    ),
    "label, in old versions": (
        "/opt/conda/work/torch/lib/THCUNN/ClassNLLCriterion.cu:101: void cunn_ClassNLLCriterion_updateOutput_kernel("
        "Dtype *, long *, int) [with Dtype = float, Acctype = float]: "
        f"{WHERE}Assertion `t >= 0 && t < n_classes` failed.",
        "/opt/conda/work/torch/lib/THCUNN/ClassNLLCriterion.cu",
        101,
        "void cunn_ClassNLLCriterion_updateOutput_kernel(Dtype *, long *, int) [with Dtype = float, Acctype = float]",
        "t >= 0 && t < n_classes",
        "label",
    ),
    "margin loss": (
        rf"..\aten\src\ATen\native\cuda\MultiMarginLoss.cu:34: MultiMarginLoss_forward_kernel: {WHERE}"
        'Assertion `target_k >= 0 && target_k < dim && "target index is out of bounds"` failed.',
        r"..\aten\src\ATen\native\cuda\MultiMarginLoss.cu",
        34,
        "MultiMarginLoss_forward_kernel",
        'target_k >= 0 && target_k < dim && "target index is out of bounds"',
        "label",
    ),
    "embedding": (
        f"{ATEN}Indexing.cu:1236: indexSelectLargeIndex: {WHERE}Assertion `srcIndex < srcSelectDimSize` failed.",
        f"{ATEN}Indexing.cu",
        1236,
        "indexSelectLargeIndex",
        "srcIndex < srcSelectDimSize",
        "embedding",
    ),
    "rows": (
        f"{ATEN}IndexKernelUtils.cu:16: vectorized_gather_kernel: {WHERE}"
        'Assertion `ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"` failed.',
        f"{ATEN}IndexKernelUtils.cu",
        16,
        "vectorized_gather_kernel",
        'ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"',
        "rows",
    ),
    "index": (
        f"{ATEN}IndexKernel.cu:111: operator(): {WHERE}"
        'Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.',
        f"{ATEN}IndexKernel.cu",
        111,
        "operator()",
        '-sizes[i] <= index && index < sizes[i] && "index out of bounds"',
        "index",
    ),
    "index_add": (
        f"{ATEN}Indexing.cu:1020: void at::native::indexFuncLargeIndex(cuda::detail::TensorInfo<T, IndexType>, "
        f"const func_t &) [with T = float; int DstDim = 1; bool IndexIsMajor = true]: {WHERE}"
        "Assertion `dstIndex < dstAddDimSize` failed.",
        f"{ATEN}Indexing.cu",
        1020,
        "void at::native::indexFuncLargeIndex(cuda::detail::TensorInfo<T, IndexType>, const func_t &) "
        "[with T = float; int DstDim = 1; bool IndexIsMajor = true]",
        "dstIndex < dstAddDimSize",
        "index_add",
    ),
    "gather, scatter, one_hot": (
        f"{ATEN}ScatterGatherKernel.cu:163: operator(): {WHERE}"
        'Assertion `idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.',
        f"{ATEN}ScatterGatherKernel.cu",
        163,
        "operator()",
        'idx_dim >= 0 && idx_dim < index_size && "index out of bounds"',
        "scatter_gather",
    ),
    "scatter_add of rows": (
        f"{ATEN}IndexKernelUtils.cu:140: tma_scatter_add_kernel: {WHERE}"
        'Assertion `ind >= 0 && ind < self_dim_size && "tma scatter add index out of bounds"` failed.',
        f"{ATEN}IndexKernelUtils.cu",
        140,
        "tma_scatter_add_kernel",
        'ind >= 0 && ind < self_dim_size && "tma scatter add index out of bounds"',
        "scatter_gather",
    ),
    "embedding_bag": (
        f"{ATEN}EmbeddingBag.cu:123: EmbeddingBag_updateOutputKernel_sum_mean: {WHERE}"
        "Assertion `input_idx >= 0 && input_idx < numRows` failed.",
        f"{ATEN}EmbeddingBag.cu",
        123,
        "EmbeddingBag_updateOutputKernel_sum_mean",
        "input_idx >= 0 && input_idx < numRows",
        "embedding_bag",
    ),
    "masked_scatter": (
        f"{ATEN}IndexKernel.cu:414: masked_scatter_size_check: {WHERE}Assertion `totalElements <= srcSize` failed.",
        f"{ATEN}IndexKernel.cu",
        414,
        "masked_scatter_size_check",
        "totalElements <= srcSize",
        "masked_scatter",
    ),
    "multinomial": (
        f"{ATEN}MultinomialKernel.cu:112: binarySearchForMultinomial: {WHERE}"
        "Assertion `cumdist[size - 1] > static_cast<scalar_t>(0)` failed.",
        f"{ATEN}MultinomialKernel.cu",
        112,
        "binarySearchForMultinomial",
        "cumdist[size - 1] > static_cast<scalar_t>(0)",
        "multinomial",
    ),
    "multinomial, with quotes in it": (
        f"{ATEN}TensorCompare.cu:112: _assert_async_cuda_kernel: {WHERE}"
        "Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed.",
        f"{ATEN}TensorCompare.cu",
        112,
        "_assert_async_cuda_kernel",
        "probability tensor contains either `inf`, `nan` or element < 0",
        "multinomial",
    ),
    "the user's own": (
        f"{ATEN}TensorCompare.cu:112: _assert_async_cuda_kernel: {WHERE}Assertion `lengths are sorted` failed.",
        f"{ATEN}TensorCompare.cu",
        112,
        "_assert_async_cuda_kernel",
        "lengths are sorted",
        "assert_async",
    ),
    "bce": (
        f"{ATEN}Loss.cu:94: operator(): {WHERE}Assertion `input_val >= zero && input_val <= one` failed.",
        f"{ATEN}Loss.cu",
        94,
        "operator()",
        "input_val >= zero && input_val <= one",
        "bce",
    ),
    "bce, the target": (
        f"{ATEN}Loss.cu:95: operator(): {WHERE}Assertion `target_val >= zero && target_val <= one` failed.",
        f"{ATEN}Loss.cu",
        95,
        "operator()",
        "target_val >= zero && target_val <= one",
        "bce",
    ),
    "bernoulli": (
        f"{ATEN}DistributionTemplates.h:625: operator(): {WHERE}Assertion `0 <= p4 && p4 <= 1` failed.",
        f"{ATEN}DistributionTemplates.h",
        625,
        "operator()",
        "0 <= p4 && p4 <= 1",
        "bernoulli",
    ),
    "max_unpool": (
        f"{ATEN}MaxUnpooling.cu:47: max_unpooling2d_forward_kernel: {WHERE}"
        "Assertion `maxind >= 0 && maxind < outputImageSize` failed.",
        f"{ATEN}MaxUnpooling.cu",
        47,
        "max_unpooling2d_forward_kernel",
        "maxind >= 0 && maxind < outputImageSize",
        "unpool",
    ),
    "compiled": (
        f"/tmp/torchinductor_user/q5/cq5iuv.py:97: unknown: {WHERE}"
        "Assertion `index out of bounds: 0 <= tmp4 < 83` failed.",
        "/tmp/torchinductor_user/q5/cq5iuv.py",
        97,
        "",
        "index out of bounds: 0 <= tmp4 < 83",
        "compiled",
    ),
    "compiled, without a place": (
        f"unknown:0: unknown: {WHERE}Assertion `index out of bounds: 0 <= tmp42 < 1024` failed.",
        "",
        0,
        "",
        "index out of bounds: 0 <= tmp42 < 1024",
        "compiled",
    ),
    "a frozen module": (
        f"<frozen runpy>:198: _run_code: {WHERE}Assertion `index out of bounds: 0 <= tmp84 < 120` failed.",
        "<frozen runpy>",
        198,
        "_run_code",
        "index out of bounds: 0 <= tmp84 < 120",
        "compiled",
    ),
    "Triton's device_assert": (
        f"/home/me/my kernels/rope.py:31: rope_kernel: {WHERE}Assertion `position beyond the table` failed.",
        "kernels/rope.py",
        31,
        "rope_kernel",
        "position beyond the table",
        "other",
    ),
    "several lines": (
        f"JIT.cpp:9: allocate: {WHERE}Assertion `Out of memory.\nConsider to use less` failed.",
        "JIT.cpp",
        9,
        "allocate",
        "Out of memory.\nConsider to use less",
        "other",
    ),
}
NO_THREAD = {
    "HIP": (
        f"{ATEN}Loss.cu:245: void at::native::nll_loss(float*) [T = float]: "
        "Device-side assertion `t >= 0 && t < n_classes' failed.",
        f"{ATEN}Loss.cu",
        245,
        "void at::native::nll_loss(float*) [T = float]",
        "t >= 0 && t < n_classes",
        "label",
    ),
    "HIP gives up": (
        ":0:rocdevice.cpp            :2614: 12345678: us: 1234: [tid:0x7f] Device::callbackQueue aborting with error : "
        "HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. code: 0x1016",
        "rocdevice.cpp",
        2614,
        "",
        "aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. "
        "code: 0x1016",
        "aborted",
    ),
}


@pytest.mark.parametrize("name", [*LINES, *NO_THREAD])
def test_line(name: str) -> None:
    line, *expected = {**LINES, **NO_THREAD}[name]
    for text in (line + "\n", f"before\n{line}\nafter\n", f"{line}\n{line}\n"):
        (said,) = assertions(text)
        assert [said.file, said.line, said.kernel, said.condition, said.family] == expected
        assert said.count == text.count(line)


def test_sycl() -> None:
    (said,) = assertions(
        "/b/cmws.py:35: unknown: global id: [5,0,0], local id: [1,0,0] "
        "Assertion `index out of bounds: 0 <= tmp0 < 128` failed\n"
    )
    assert (said.line, said.family) == (35, "compiled")


def test_after_other_words_on_the_line() -> None:
    line = LINES["label"][0]
    for before in ("12:30:05: ", " 98%|####9 | 987/999 [00:22<00:00, 131.15it/s]", "rank3: W0101 12:30:05.1 x.py:3] "):
        (said,) = assertions(f"{before}{line}\n")
        assert (said.file, said.line) == (f"{ATEN}Loss.cu", 245)


def test_torn_apart_by_other_output() -> None:
    """The driver writes a line in parts, and a traceback may come between them."""
    line = LINES["rows"][0]
    torn = line.replace("Utils.cu", "Utils.cu    return forward_call(*args)\n").replace(
        " vectorized", "  ^^^^\n vectorized"
    )
    nameless = "of the line before: " + WHERE + line.partition(WHERE)[2]
    for text in (f"{line}\n{torn}\n{line}\n", f"{nameless}\n{line}\n{nameless}\n"):
        (said,) = assertions(text)
        assert (said.count, said.line, said.kernel) == (3, 16, "vectorized_gather_kernel")


@pytest.mark.parametrize("name", LINES)
def test_in_pieces(name: str) -> None:
    data = f"epoch 1 \udcff\n{LINES[name][0]}\nmore\n".encode("utf-8", "surrogateescape")
    for cut in range(len(data)):
        listener = Listener()
        listener.feed(data[:cut])
        listener.feed(data[cut:])
        assert [said.condition for said in listener.assertions()] == [LINES[name][4]]


def test_a_failed_check_of_the_host_is_not_one() -> None:
    assert assertions("python: sort.c:12: main: Assertion `n > 0' failed.\nAssertionError: `x` failed\n") == []
    assert assertions("Assertion `begun and never ended\n" * 3) == []


def test_order_and_what_differs() -> None:
    lines = [LINES[name][0] for name in ("embedding", "label", "bce")]
    found = assertions("\n".join([*lines, *lines[::-1], lines[1]]))
    assert [(said.family, said.count) for said in found] == [("embedding", 2), ("label", 3), ("bce", 2)]


def test_bounds_and_counts() -> None:
    listener = Listener()
    for thread in range(20_000):
        listener.feed(LINES["label"][0].replace("31,", f"{thread},").encode() + b"\n")
    for number in range(500):
        listener.feed(LINES["bce"][0].replace("Loss.cu:94", f"Own.cu:{number}").encode() + b"\n")
    listener.feed(b"no newline " * 100_000)
    assert len(listener.assertions()) == 64
    assert len(listener.text()) < 64 * 1024
    assert assertions(listener.text())[0].count == 20_000


def test_the_text_says_the_same(tmp_path: Path) -> None:
    listener = Listener()
    for name, times in (("label", 9), ("several lines", 2), ("multinomial, with quotes in it", 5), ("HIP gives up", 1)):
        listener.feed(({**LINES, **NO_THREAD}[name][0] + "\n").encode() * times)
    gpu.write_kernel_words(tmp_path, listener.text())
    read = words_of(tmp_path, 0)
    assert [(said.condition, said.count, said.family) for said in read] == [
        (said.condition, said.count, said.family) for said in listener.assertions()
    ]
    assert [said.count for said in read] == [9, 2, 5, 1]


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("label", "aten.nll_loss_forward.default", "aten.embedding.default"),
        ("embedding", "aten::embedding", "aten.gather.default"),
        ("rows", "aten.index.Tensor", "aten.nll_loss_forward.default"),
        ("index", "aten.index_put_.default", "aten.embedding.default"),
        ("gather, scatter, one_hot", "aten.scatter_.value", "aten.index.Tensor"),
        ("compiled", "aten.embedding.default", "aten.add.Tensor"),
        ("multinomial, with quotes in it", "aten.multinomial.default", "aten.bernoulli.default"),
    ],
)
def test_which_operation_it_can_be(name: str, yes: str, no: str) -> None:
    (said,) = assertions(LINES[name][0])
    assert said.could_be(yes) is True
    assert said.could_be(no) is False


def test_which_operation_nobody_knows() -> None:
    assert assertions(LINES["several lines"][0])[0].could_be("aten.add.Tensor") is None


def test_words_that_come_late(tmp_path: Path) -> None:
    def later() -> None:
        time.sleep(0.2)
        gpu.write_kernel_words(tmp_path, LINES["bce"][0] + "\n", 3)

    thread = threading.Thread(target=later)
    thread.start()
    assert [said.family for said in words_of(tmp_path, 20, rank=3)] == ["bce"]
    thread.join()
    assert words_of(tmp_path, 0, rank=2) == []
    gpu.write_kernel_words(tmp_path, LINES["label"][0] + "\n")
    assert [said.family for said in words_of(tmp_path, 0, rank=2)] == ["label"]  # one parent for all ranks
    assert [said.family for said in words_of(tmp_path, 0, rank=3)] == ["bce"]
