"""Matrix products and backward calls that fail. Each marks the line to blame and the code."""

# ruff: noqa: B007, B015, B904, E731, E741, F841, PLR0124, RET504, RUF059, RUF100, UP031

import torch
import torch.nn.functional as F
from torch import nn


def case_101_a():
    x = torch.randn(4, 3, requires_grad=True)
    loss = F.mse_loss(x, torch.zeros(4, 3), reduction="none")
    loss.backward()  # <- TM101


def case_101_b():
    m = nn.Linear(3, 2)
    crit = nn.CrossEntropyLoss(reduction="none")
    out = m(torch.randn(5, 3))
    loss = crit(out, torch.zeros(5).long())
    torch.autograd.backward([loss])  # <- TM101


def case_101_c():
    x = torch.randn(4, 3, requires_grad=True)
    y = (x**2).sum(1)
    (g,) = torch.autograd.grad(y, x, create_graph=True)  # <- TM101


def case_101_d():
    m = nn.Linear(3, 2)
    m(torch.randn(5, 3)).backward()  # <- TM101


def case_101_e():
    def step(model, x):
        loss = (model(x) - 1).pow(2).mean(dim=1)
        (loss.mul(2).backward())  # <- TM101

    step(nn.Linear(3, 2), torch.randn(5, 3))


def case_151_bmm_inner():
    a = torch.randn(2, 3, 4)
    b = torch.randn(2, 5, 6)
    c = torch.bmm(a, b)  # <- TM151


def case_151_bmm_batch():
    a = torch.randn(2, 3, 4)
    b = torch.randn(3, 4, 6)
    c = torch.bmm(a, b)  # <- TM151


def case_151_bmm_dims():
    a = torch.randn(3, 4)
    b = torch.randn(3, 4, 6)
    c = torch.bmm(a, b)  # <- TM151


def case_151_mm_dims():
    a = torch.randn(2, 3, 4)
    b = torch.randn(4, 6)
    c = torch.mm(a, b)  # <- TM151


def case_151_at():
    q = torch.randn(2, 3, 4)
    k = torch.randn(2, 3, 4)
    s = q @ k  # <- TM151


def case_151_at_batch():
    q = torch.randn(2, 3, 4)
    k = torch.randn(5, 4, 4)
    s = q @ k  # <- TM151


def case_151_vec():
    w = torch.randn(3, 4)
    v = torch.randn(5)
    s = w @ v  # <- TM151


def case_151_mv():
    w = torch.randn(3, 4)
    v = torch.randn(5)
    s = w.mv(v)  # <- TM151


def case_151_dot():
    w = torch.randn(4)
    v = torch.randn(5)
    s = torch.dot(w, v)  # <- TM151


def case_151_einsum():
    q = torch.randn(2, 3, 4)
    k = torch.randn(2, 5, 6)
    s = torch.einsum("bid,bjd->bij", q, k)  # <- TM151


def case_151_einsum_dims():
    q = torch.randn(2, 3, 4, 1)
    k = torch.randn(2, 5, 6)
    s = torch.einsum("bid,bjd->bij", q, k)  # <- TM151


def case_151_flinear():
    w = torch.randn(10, 20)
    x = torch.randn(4, 30)
    y = F.linear(x, w)  # <- TM151


def case_151_bilinear():
    m = nn.Bilinear(4, 5, 6)
    m(torch.randn(2, 4), torch.randn(2, 7))  # <- TM151


def case_151_lstm():
    m = nn.LSTM(8, 16, batch_first=True)
    m(torch.randn(2, 5, 10))  # <- TM151


def case_151_gru_packed():
    m = nn.GRU(8, 16, batch_first=True)
    p = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 10), torch.tensor([5, 3]), batch_first=True)
    m(p)  # <- TM151


def case_151_lstmcell():
    m = nn.LSTMCell(8, 16)
    m(torch.randn(2, 10))  # <- TM151


def case_151_grucell_hidden():
    m = nn.GRUCell(8, 16)
    m(torch.randn(2, 8), torch.randn(2, 12))  # <- TM166


def case_151_mha():
    m = nn.MultiheadAttention(8, 2)
    x = torch.randn(5, 2, 6)
    m(x, x, x)  # <- TM151


def case_151_tel():
    m = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    x = torch.randn(2, 5, 12)
    m(x)  # <- TM151


def case_151_sdpa():
    q = torch.randn(2, 4, 5, 8)
    k = torch.randn(2, 4, 5, 6)
    v = torch.randn(2, 4, 5, 8)
    F.scaled_dot_product_attention(q, k, v)  # <- TM151


def case_151_seq():
    m = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(16, 2))  # <- TM151
    m(torch.randn(2, 4))


def case_151_unread():
    m = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    w = torch.randn(5, 5)
    y = m(torch.randn(2, 4)) @ w  # <- TM151


def case_151_addmm():
    y = torch.addmm(torch.zeros(3), torch.randn(2, 4), torch.randn(5, 3))  # <- TM151


def case_151_baddbmm():
    y = torch.baddbmm(torch.zeros(2, 2, 3), torch.randn(2, 2, 4), torch.randn(2, 5, 3))  # <- TM151


def case_151_tensordot():
    y = torch.tensordot(torch.randn(2, 4), torch.randn(5, 3), dims=1)  # <- TM151


def case_151_vmap():
    w = torch.randn(7, 3)

    def f(x):
        return x @ w  # <- TM151

    torch.vmap(f)(torch.randn(2, 4, 5))


def case_151_hook():
    m = nn.Linear(4, 3)
    m.register_forward_hook(lambda *a: None)
    m(torch.randn(2, 5))  # <- TM151


def case_151_dp():
    m = nn.DataParallel(nn.Linear(4, 3))
    m(torch.randn(2, 5))  # <- TM151


def case_151_lambda():
    f = lambda x: x @ torch.ones(3, 3)  # <- TM151
    f(torch.randn(2, 2))


def case_151_comp():
    xs = [torch.randn(2, 3), torch.randn(2, 4)]
    w = torch.ones(3, 3)
    ys = [x @ w for x in xs]  # <- TM151


def case_151_multiline():
    x = torch.randn(2, 4)
    y = (
        x.relu()
        .matmul(torch.ones(3, 3))  # <- TM151
        .sum()
    )


def case_151_imul():
    x = torch.randn(2, 4)
    x @= torch.ones(3, 3)  # <- TM151


def case_151_mdict():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(5, 2)})
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x):
            for i, block in enumerate(self.blocks):
                x = self.blocks[i](x)
            return {name: head(x) for name, head in self.heads.items()}  # <- TM151

    M()(torch.randn(2, 4))


def case_151_autocast():
    m = nn.Linear(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m(torch.randn(2, 5))  # <- TM151


def case_151_custom_function():
    class Mul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            return g @ b, a @ g  # <- TM151

    x = torch.randn(2, 3, requires_grad=True)
    Mul.apply(x, torch.randn(3, 4, requires_grad=True)).sum().backward()


def case_151_raise_from():
    m = nn.Linear(4, 3)
    try:
        m(torch.randn(2, 5))  # <- TM151
    except RuntimeError as e:
        raise ValueError("training failed") from e


def case_151_raise_ctx():
    def inner(m, x):
        return m(x)  # <- TM151

    m = nn.Linear(4, 3)
    try:
        inner(m, torch.randn(2, 5))
    except RuntimeError as e:
        raise SystemError(f"training failed: {e}")


def case_151_linalg():
    torch.linalg.multi_dot([torch.randn(2, 3), torch.randn(4, 5)])  # <- TM151


def case_151_chain():
    torch.chain_matmul(torch.randn(2, 3), torch.randn(4, 5))  # <- TM151
