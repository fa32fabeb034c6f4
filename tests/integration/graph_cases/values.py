"""Tensors of the wrong dtype or kind, or used as one number. Each marks the line to blame and the code."""

# ruff: noqa: B007, B015, B904, E731, E741, F841, PLR0124, RET504, RUF059, RUF100, UP031

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def case_157_if():
    x = torch.rand(3)
    if x > 0.5:  # <- TM157
        pass


def case_157_while():
    x = torch.rand(3)
    while x.abs() > -1:  # <- TM157
        x = x / 2


def case_157_and():
    x = torch.rand(3)
    y = True
    z = y and (x > 0) and y  # <- TM157


def case_157_not():
    x = torch.rand(3)
    z = not x  # <- TM157


def case_157_in():
    xs = [torch.rand(3), torch.rand(3)]
    xs.index(xs[1])  # <- TM157


def case_157_in2():
    xs = [torch.rand(3), torch.rand(3)]
    torch.zeros(3) in xs  # <- TM157


def case_157_max():
    a = torch.rand(3)
    b = torch.rand(3)
    max(a, b)  # <- TM157


def case_157_assert():
    a = torch.rand(3)
    assert a == a  # <- TM157


def case_157_tern():
    a = torch.rand(3)
    b = 1 if a > 0 else 2  # <- TM157


def case_157_loss_class():
    out = torch.rand(3, 4, requires_grad=True)
    y = torch.zeros(3).long()
    loss = nn.CrossEntropyLoss(out, y)  # <- TM157


def case_157_loss_class2():
    loss = nn.MSELoss(torch.rand(3, 4), torch.rand(3, 4))  # <- TM157


def case_157_chain():
    a = torch.rand(3)
    if 0 < a < 1:  # <- TM157
        pass


def case_157_empty():
    a = torch.rand(0)
    if a:  # <- TM157
        pass


def case_157_early():
    class ES:
        def __init__(self):
            self.best = None

        def step(self, loss):
            if self.best is None or loss < self.best:  # <- TM157
                self.best = loss
            else:
                raise ValueError

    es = ES()
    es.step(torch.rand(3))

    # second call
    class Wrap:
        def go(self):
            if self.v is None or self.v < 3:
                pass

    es.step(torch.rand(3))


def case_158_numpy():
    m = nn.Linear(2, 2)
    out = m(torch.rand(3, 2))
    out.numpy()  # <- TM158


def case_158_array():
    out = torch.rand(3, requires_grad=True)
    np.array(out)  # <- TM158


def case_158_asarray():
    out = torch.rand(3, requires_grad=True) * 2
    losses = [out, out]
    np.mean(losses)  # <- TM158


def case_158_ufunc():
    out = torch.rand(3, requires_grad=True) * 2
    np.sqrt(out)  # <- TM158


def case_158_expr():
    out = torch.rand(3, requires_grad=True)
    (out * 2).cpu().numpy()  # <- TM158


def case_159_item():
    x = torch.rand(3)
    x.item()  # <- TM159


def case_159_float():
    x = torch.rand(3)
    float(x)  # <- TM159


def case_159_int():
    x = torch.rand(3)
    range(int(x.sum(0, keepdim=True).expand(2)))  # <- TM159


def case_159_fmt():
    loss = torch.rand(3)
    print(f"loss {loss:.4f}")  # <- TM159


def case_159_fmt2():
    loss = torch.rand(3)
    print(f"loss {loss:.4f}")  # <- TM159


def case_159_pct():
    loss = torch.rand(3)
    print("loss %.4f" % loss)  # <- TM159


def case_159_tensor_list():
    xs = [torch.rand(3), torch.rand(3)]
    torch.tensor(xs)  # <- TM159


def case_159_accum():
    total = 0.0
    for l in [torch.rand(2)]:
        total += l.item()  # <- TM159


def case_159_math():
    import math

    math.sqrt(torch.rand(3))  # <- TM159


def case_159_index():
    xs = [1, 2, 3]
    xs[torch.tensor([1, 2])]  # <- TM159


def case_160_linear():
    m = nn.Linear(3, 2)
    x = torch.from_numpy(np.random.rand(4, 3))  # <- TM160
    m(x)


def case_160_numpy():
    torch.ones(2, dtype=torch.bfloat16).numpy()  # <- TM160


def case_160_conv():
    m = nn.Conv2d(3, 2, 3)
    x = torch.from_numpy(np.random.rand(4, 3, 5, 5))  # <- TM160
    m(x)


def case_160_uint8():
    m = nn.Conv2d(3, 2, 3)
    x = torch.zeros(4, 3, 5, 5, dtype=torch.uint8)  # <- TM160
    m(x)


def case_160_half():
    m = nn.Linear(3, 2).half()
    m(torch.rand(4, 3))  # <- TM160


def case_160_matmul():
    a = torch.rand(3, 3)
    b = torch.rand(3, 3).double()  # <- TM160
    a @ b


def case_160_intmat():
    a = torch.rand(3, 3)
    b = torch.ones(3, 3).long()  # <- TM160
    a @ b


def case_160_lstm():
    m = nn.LSTM(3, 4)
    m(torch.rand(2, 5, 3).double())  # <- TM160


def case_160_emb():
    m = nn.Embedding(5, 4)
    m(torch.zeros(2, 3))  # <- TM160


def case_160_index():
    x = torch.rand(5)
    i = torch.tensor([0.0, 1.0])  # <- TM160
    x[i]


def case_160_gather():
    x = torch.rand(5, 3)
    i = torch.zeros(5, 1)  # <- TM160
    x.gather(1, i)


def case_160_onehot():
    F.one_hot(torch.zeros(3), 5)  # <- TM160


def case_160_mean():
    x = torch.arange(5)  # <- TM160
    x.mean()


def case_160_inplace():
    c = torch.zeros(3).long()
    c += torch.rand(3)  # <- TM160


def case_160_inplace2():
    c = torch.zeros(3).long()  # <- TM160
    c.add_(0.5)


def case_160_softmax():
    torch.arange(5).softmax(0)  # <- TM160


def case_160_maskfill():
    torch.rand(3).masked_fill(torch.ones(3), 0)  # <- TM160


def case_165_gradient_of_a_result():
    x = torch.rand(3, requires_grad=True)
    x = x.clamp(0, 1)  # <- TM165
    x.sum().backward()
    x.grad.sign()


def case_160_maskfill_beyond_half():
    scores, value = torch.rand(3).half(), -1e9
    scores.masked_fill(torch.ones(3).bool(), value)  # <- TM160


def case_160_maskfill_int():
    torch.rand(3).masked_fill(torch.ones(3).long(), 0)  # <- TM160


def case_160_where():
    torch.where(torch.ones(3), torch.rand(3), torch.rand(3))  # <- TM160


def case_160_invert():
    ~torch.rand(3)  # <- TM160


def case_160_bitand():
    torch.rand(3) & torch.ones(3).bool()  # <- TM160


def case_160_subbool():
    torch.ones(3).bool() - torch.ones(3).bool()  # <- TM160


def case_160_scatter():
    torch.zeros(3, 5).scatter_(1, torch.zeros(3, 1).long(), torch.ones(3, 1).long())  # <- TM160


def case_160_indexput():
    x = torch.zeros(3)
    i = torch.tensor([0, 1])
    x[i] = torch.ones(2).double()  # <- TM160


def case_160_reqgrad():
    torch.tensor([1, 2], requires_grad=True)  # <- TM160


def case_160_reqgrad2():
    w = torch.zeros(3).long()
    w.requires_grad = True  # <- TM160


def case_160_param():
    nn.Parameter(torch.ones(3).long())  # <- TM160


def case_160_ln():
    nn.LayerNorm(4)(torch.rand(2, 4).double())  # <- TM160


def case_160_bn():
    nn.BatchNorm1d(4)(torch.rand(2, 4).double())  # <- TM160


def case_160_bn_int():
    nn.BatchNorm1d(4)(torch.ones(2, 4).long())  # <- TM160


def case_160_sdpa():
    q = torch.rand(1, 2, 3, 4)
    F.scaled_dot_product_attention(q, q.double(), q)  # <- TM160


def case_160_sdpa_mask():
    q = torch.rand(1, 2, 3, 4)
    F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3).long())  # <- TM160


def case_160_object():
    torch.tensor(np.array([{}, 1], dtype=object))  # <- TM160


def case_160_from_numpy_obj():
    torch.from_numpy(np.array(["a", "b"]))  # <- TM160


def case_160_lerp():
    torch.zeros(3).lerp(torch.zeros(3).double(), 0.5)  # <- TM160


def case_160_dot():
    torch.dot(torch.zeros(3), torch.zeros(3).double())  # <- TM160


def case_160_einsum():
    torch.einsum("ij,jk->ik", torch.zeros(3, 3), torch.zeros(3, 3).double())  # <- TM160


def case_160_autocast_out():
    m = nn.Linear(3, 3)
    n = nn.Linear(3, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m(torch.rand(2, 3))
    n(h)  # <- TM160


def case_160_embbag():
    nn.EmbeddingBag(5, 3)(torch.zeros(2, 3))  # <- TM160


def case_160_bce_mix():
    nn.Linear(3, 2)(torch.ones(4, 3, dtype=torch.int64))  # <- TM160


def case_160_cumsum_quantile():
    torch.arange(5).quantile(0.5)  # <- TM160


def case_160_norm():
    torch.arange(5).norm()  # <- TM160


def case_160_std():
    torch.arange(5).std()  # <- TM160


def case_161_ce_float():
    F.cross_entropy(torch.rand(4, 3), torch.zeros(4))  # <- TM161


def case_161_ce_int():
    y = torch.zeros(4).int()
    nn.CrossEntropyLoss()(torch.rand(4, 3), y)  # <- TM161


def case_161_nll_float():
    F.nll_loss(torch.rand(4, 3), torch.zeros(4))  # <- TM161


def case_161_bce_long():
    out = torch.rand(4, requires_grad=True)
    y = torch.ones(4).long()
    F.binary_cross_entropy(out, y)  # <- TM161


def case_161_bcel_long():
    out = torch.rand(4, requires_grad=True)
    y = torch.ones(4).long()
    nn.BCEWithLogitsLoss()(out, y)  # <- TM161


def case_161_ce_onehot():
    F.cross_entropy(torch.rand(4, 3), F.one_hot(torch.zeros(4).long(), 3))  # <- TM161


def case_161_bool():
    F.cross_entropy(torch.rand(4, 3), torch.zeros(4).bool())  # <- TM161


def case_161_bce_double_bw():
    out = torch.rand(4, requires_grad=True)
    y = torch.ones(4).double()
    loss = F.binary_cross_entropy(out, y)  # <- TM161
    loss.backward()


def case_161_margin():
    nn.MultiMarginLoss()(torch.rand(4, 3), torch.zeros(4))  # <- TM161


def case_165_lstm_seq():
    m = nn.Sequential(nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2))
    m(torch.rand(2, 3, 4))  # <- TM165


def case_165_lstm_out():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 8, batch_first=True)
            self.fc = nn.Linear(8, 2)

        def forward(self, x):
            out = self.rnn(x)
            return self.fc(out)  # <- TM165

    M()(torch.rand(2, 3, 4))


def case_165_none():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            y = self.fc(x)

    out = M()(torch.rand(2, 4))
    F.cross_entropy(out, torch.zeros(2).long())  # <- TM165


def case_165_none_attr():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            y = self.fc(x)

    m = M()
    out = m(torch.rand(2, 4))
    loss = out.sum()  # <- TM165


def case_165_numpy():
    fc = nn.Linear(4, 2)
    x = np.zeros((2, 4), dtype=np.float32)
    fc(x)  # <- TM165


def case_165_list():
    fc = nn.Linear(4, 2)
    fc([1.0, 2.0, 3.0, 4.0])  # <- TM165


def case_165_tuple_attr():
    rnn = nn.LSTM(4, 8)
    out = rnn(torch.rand(2, 3, 4))
    out.size()  # <- TM165


def case_165_tuple_index():
    rnn = nn.LSTM(4, 8)
    out = rnn(torch.rand(2, 3, 4))
    last = out[:, -1]  # <- TM165


def case_165_mha():
    att = nn.MultiheadAttention(8, 2)
    x = torch.rand(3, 2, 8)
    x = x + att(x, x, x)  # <- TM165


def case_165_cat_none():
    torch.cat([torch.zeros(2), None])  # <- TM165


def case_165_stack_np():
    torch.stack([np.zeros(2), np.zeros(2)])  # <- TM165


def case_165_dict():
    class M(nn.Module):
        def forward(self, x):
            return {"logits": x}

    m = M()
    out = m(torch.rand(2, 3))
    F.cross_entropy(out, torch.zeros(2).long())  # <- TM165


def case_165_float():
    loss = 0.0
    loss.backward()  # <- TM165


def case_165_item_backward():
    loss = torch.rand(3, requires_grad=True).sum().item()
    loss.backward()  # <- TM165


def case_165_maxpair():
    x = torch.rand(3, 4)
    pred = x.max(1)
    pred.float()  # <- TM165


def case_165_combo():
    m = nn.Conv1d(4, 4, 1)
    m((torch.rand(2, 4, 3), None))  # <- TM165


def case_165_sumlist():
    xs = [torch.rand(2), torch.rand(2)]
    torch.sum(xs, dim=0)  # <- TM165


def case_165_isnan():
    torch.isnan(0.3)  # <- TM165
