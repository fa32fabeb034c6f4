"""Shapes that do not broadcast, join, view or come apart. Each marks the line to blame and the code."""

# ruff: noqa: B007, B015, B904, E731, E741, F841, PLR0124, RET504, RUF059, RUF100, UP031

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def case_153_add():
    a = torch.randn(3)
    b = torch.randn(4)
    c = a + b  # <- TM153


def case_153_iadd():
    a = torch.randn(3)
    b = torch.randn(3, 3)
    a += b  # <- TM153


def case_153_iadd2():
    a = torch.randn(3, 4)
    b = torch.randn(3)
    a += b  # <- TM153


def case_153_mse():
    crit = nn.MSELoss()
    out = torch.randn(4, 3)
    y = torch.randn(4, 2)
    loss = crit(out, y)  # <- TM153


def case_153_l1():
    out = torch.randn(4, 3)
    y = torch.randn(4, 2)
    loss = F.l1_loss(out, y)  # <- TM153


def case_153_smooth():
    out = torch.randn(4, 3)
    y = torch.randn(4, 2)
    loss = nn.SmoothL1Loss()(out, y)  # <- TM153


def case_153_huber():
    out = torch.randn(4, 3)
    y = torch.randn(4, 2)
    loss = nn.HuberLoss()(out, y)  # <- TM153


def case_153_bce():
    out = torch.rand(4, 1)
    y = torch.rand(4)
    loss = F.binary_cross_entropy(out, y)  # <- TM153


def case_153_bcel():
    out = torch.rand(4, 1)
    y = torch.rand(4)
    loss = nn.BCEWithLogitsLoss()(out, y)  # <- TM153


def case_153_kl():
    loss = nn.KLDivLoss()(torch.rand(4, 3), torch.rand(4, 2))  # <- TM153


def case_153_where():
    m = torch.rand(4) > 0.5
    torch.where(m, torch.rand(3), torch.zeros(3))  # <- TM153


def case_153_maskfill():
    s = torch.rand(2, 4, 4)
    m = torch.ones(5, 5).bool()
    s.masked_fill(m, 0)  # <- TM153


def case_153_maskindex():
    x = torch.rand(5, 3)
    m = torch.ones(4).bool()
    x[m]  # <- TM153


def case_153_maskindex2():
    x = torch.rand(5, 3)
    m = torch.ones(5, 4).bool()
    x[m] = 0  # <- TM153


def case_153_setitem():
    x = torch.rand(5, 3)
    i = torch.tensor([0, 1])
    x[i] = torch.rand(3, 3)  # <- TM153


def case_153_setslice():
    x = torch.rand(5, 3)
    x[:2] = torch.rand(3, 3)  # <- TM153


def case_153_advindex():
    x = torch.rand(5, 3)
    x[torch.tensor([0, 1]), torch.tensor([0, 1, 2])]  # <- TM153


def case_153_expand():
    torch.rand(3, 1).expand(4, 2)  # <- TM153


def case_153_copy():
    a = torch.zeros(3)
    a.copy_(torch.zeros(4))  # <- TM153


def case_153_compare():
    pred = torch.zeros(4, 3)
    y = torch.zeros(4)
    acc = (pred == y).float().mean()  # <- TM153


def case_153_pos():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(10, 8)
            self.pos = nn.Parameter(torch.zeros(1, 16, 8))

        def forward(self, x):
            return self.emb(x) + self.pos  # <- TM153

    M()(torch.zeros(2, 20).long())


def case_153_residual():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x):
            return x + self.conv(x)  # <- TM153

    M()(torch.rand(2, 3, 4, 4))


def case_153_user_module():
    class Sub(nn.Module):
        def forward(self, x):
            return x[:, :2]

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.sub = Sub()

        def forward(self, x):
            return x + self.sub(x)  # <- TM153

    M()(torch.rand(2, 3, 4, 4))


def case_153_attnmask():
    m = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.rand(2, 5, 8)
    m(x, x, x, attn_mask=torch.ones(4, 4).bool())  # <- TM153


def case_153_padmask():
    m = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.rand(2, 5, 8)
    m(x, x, x, key_padding_mask=torch.zeros(2, 4).bool())  # <- TM153


def case_153_sdpa_mask():
    q = torch.rand(2, 2, 5, 8)
    F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4))  # <- TM153


def case_153_pow():
    torch.rand(3) ** torch.rand(4)  # <- TM153


def case_153_rsub():
    a = torch.rand(3)
    torch.rand(4).__rsub__(a)  # <- TM153


def case_153_addcmul():
    torch.addcmul(torch.zeros(3), torch.zeros(4), torch.zeros(3))  # <- TM153


def case_153_lerp():
    torch.lerp(torch.zeros(3), torch.zeros(4), 0.5)  # <- TM153


def case_153_out_of_place_grad():
    w = torch.zeros(3, requires_grad=True)
    w.grad = torch.zeros(4)  # <- TM900


def case_153_lambda_loss():
    loss_fn = lambda p, t: ((p - t) ** 2).mean()  # <- TM153
    loss_fn(torch.zeros(4, 2), torch.zeros(4, 3))


def case_153_cos():
    F.cosine_similarity(torch.zeros(4, 2), torch.zeros(3, 2))  # <- TM153


def case_153_normal():
    torch.distributions.Normal(torch.zeros(3), torch.ones(4))  # <- TM153


def case_153_logprob():
    d = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
    d.log_prob(torch.zeros(4))  # <- TM153


def case_154_cat():
    a = torch.rand(2, 3)
    b = torch.rand(2, 4)
    torch.cat([a, b], dim=0)  # <- TM154


def case_154_cat_dims():
    a = torch.rand(2, 3)
    b = torch.rand(2, 4, 1)
    torch.cat((a, b), 1)  # <- TM154


def case_154_stack():
    xs = [torch.rand(2), torch.rand(2), torch.rand(3)]
    torch.stack(xs)  # <- TM154


def case_154_hstack():
    torch.hstack([torch.rand(2, 3), torch.rand(3, 3)])  # <- TM154


def case_154_vstack():
    torch.vstack([torch.zeros(2, 3), torch.zeros(3, 4)])  # <- TM154


def case_154_empty():
    torch.cat([])  # <- TM154


def case_154_stack_empty():
    outs = []
    torch.stack(outs)  # <- TM154


def case_154_unet():
    class U(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
            self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)

        def forward(self, x):
            d = self.down(x)
            return torch.cat([x, self.up(d)], dim=1)  # <- TM154

    U()(torch.rand(1, 1, 7, 7))


def case_154_usermod():
    class Sub(nn.Module):
        def forward(self, x):
            return x[:, :, :2]

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.sub = Sub()

        def forward(self, x):
            return torch.cat([x, self.sub(x)], dim=1)  # <- TM154

    M()(torch.rand(2, 3, 4))


def case_154_comp():
    xs = [torch.rand(2, 3), torch.rand(2, 4)]
    torch.cat([x.unsqueeze(0) for x in xs])  # <- TM154


def case_155_view():
    x = torch.rand(4, 6)
    x.view(5, 5)  # <- TM155


def case_155_view_infer():
    x = torch.rand(4, 6)
    x.view(-1, 5)  # <- TM155


def case_155_reshape():
    x = torch.rand(4, 6)
    torch.reshape(x, (5, 5))  # <- TM155


def case_155_noncontig():
    x = torch.rand(4, 6).t()
    x.view(24)  # <- TM155


def case_155_noncontig2():
    x = torch.rand(2, 3, 4)
    x.permute(0, 2, 1).view(2, -1)  # <- TM155


def case_155_unflatten():
    m = nn.Unflatten(1, (2, 3))
    m(torch.rand(2, 7))  # <- TM155


def case_155_unflatten2():
    torch.rand(2, 7).unflatten(1, (2, 3))  # <- TM155


def case_155_method():
    class M(nn.Module):
        def forward(self, x):
            b = x.size(0)
            q = x.view(b, -1, 3, 5).transpose(1, 2)  # <- TM155
            return q

    M()(torch.rand(2, 7, 8))


def case_155_view_as():
    torch.rand(4, 6).view_as(torch.rand(5, 5))  # <- TM155


def case_155_two_infer():
    torch.rand(4, 6).view(-1, -1)  # <- TM155


def case_155_call_first():
    fc = nn.Linear(4, 10)
    fc(torch.zeros(3, 4)).view(4, 10)  # <- TM155


def case_155_dtype_view():
    torch.rand(4, 3).view(torch.float64)  # <- TM900


def case_156_ce():
    crit = nn.CrossEntropyLoss()
    out = torch.rand(4, 3)
    y = torch.zeros(5).long()
    crit(out, y)  # <- TM156


def case_156_nll():
    out = torch.rand(4, 3)
    y = torch.zeros(5).long()
    F.nll_loss(out, y)  # <- TM156


def case_156_spatial():
    out = torch.rand(2, 3, 8, 8)
    y = torch.zeros(2, 4, 4).long()
    F.cross_entropy(out, y)  # <- TM164


def case_156_flat():
    out = torch.rand(2, 5, 7)
    y = torch.zeros(2, 6).long()
    F.cross_entropy(out.view(-1, 7), y.view(-1))  # <- TM156


def case_156_multimargin():
    nn.MultiMarginLoss()(torch.rand(4, 3), torch.zeros(5).long())  # <- TM156


def case_156_prob():
    F.cross_entropy(torch.rand(4, 3), torch.rand(4, 2))  # <- TM164


def case_156_cosemb():
    nn.CosineEmbeddingLoss()(torch.rand(4, 3), torch.rand(4, 3), torch.ones(5))  # <- TM156


def case_156_ctc():
    lp = torch.rand(10, 2, 5).log_softmax(-1)
    nn.CTCLoss()(lp, torch.ones(3, 4).long(), torch.tensor([10, 10]), torch.tensor([4, 4]))  # <- TM900


def case_164_multi():
    out = torch.rand(4, 3)
    y = torch.zeros(4, 1).long()
    F.cross_entropy(out, y)  # <- TM164


def case_164_classdim():
    out = torch.rand(2, 6, 10)
    y = torch.zeros(2, 6).long()
    F.cross_entropy(out, y)  # <- TM164


def case_164_seg():
    out = torch.rand(2, 3, 8, 8)
    y = torch.zeros(2, 1, 8, 8).long()
    nn.CrossEntropyLoss()(out, y)  # <- TM164


def case_164_weight():
    nn.CrossEntropyLoss(weight=torch.ones(4))(torch.rand(2, 3), torch.zeros(2).long())  # <- TM164


def case_168_view():
    x = torch.rand(2, 8)
    h = x.size(1) / 2
    x.view(2, 2, h)  # <- TM168


def case_168_linear():
    d = 8
    nn.Linear(d / 2, 4)  # <- TM168


def case_168_zeros():
    torch.zeros(4 / 2, 3)  # <- TM168


def case_168_reshape():
    x = torch.rand(4, 8)
    x.reshape(4, 8 / 2, 2)  # <- TM168


def case_168_split():
    x = torch.rand(4, 8)
    x.split(8 / 2, dim=1)  # <- TM168


def case_168_conv():
    nn.Conv2d(4, 8 / 2, 3)  # <- TM168


def case_168_emb():
    nn.Embedding(10, 8 / 2)  # <- TM168


def case_168_slice():
    x = torch.rand(4, 8)
    x[:, : 8 / 2]  # <- TM168


def case_168_str():
    nn.Linear("8", 4)  # <- TM168


def case_168_lstm():
    nn.LSTM(4, 8 / 2)  # <- TM168


def case_168_mha():
    q = torch.rand(2, 3, 8)
    q.view(2, 3, 2, 8 / 2).transpose(1, 2)  # <- TM168


def case_169_loader():
    for x, y in DataLoader(TensorDataset(torch.rand(4, 2)), batch_size=2):  # <- TM169
        pass


def case_169_batch():
    for batch in DataLoader(TensorDataset(torch.rand(4, 2), torch.rand(4), torch.rand(4)), batch_size=2):
        x, y = batch  # <- TM169


def case_169_tensor():
    m = nn.Linear(4, 3)
    x = torch.rand(5, 4)
    out, hidden = m(x)  # <- TM169


def case_169_tensor_var():
    out = torch.rand(5, 4)
    a, b = out  # <- TM169


def case_169_enum():
    for i, (x, y) in enumerate(DataLoader(TensorDataset(torch.rand(4, 2)), batch_size=2)):  # <- TM169
        pass


def case_169_plain():
    a, b = [1, 2, 3]  # <- TM900


def case_169_str():
    for a, b in ["abc"]:  # <- TM900
        pass


def case_153_gather():
    q = torch.rand(4, 2)
    a = torch.zeros(4).long()
    q.gather(1, a)  # <- TM153


def case_153_gather_size():
    q = torch.rand(4, 2)
    a = torch.zeros(5, 1).long()
    q.gather(1, a)  # <- TM153


def case_153_scatter():
    y = torch.zeros(4).long()
    torch.zeros(4, 3).scatter_(1, y, 1)  # <- TM153


def case_153_scatter_src():
    torch.zeros(4, 3).scatter_(1, torch.zeros(4, 2).long(), torch.ones(4, 1))  # <- TM153


# What the agent of a real run would know of the last batch.
case_169_loader.batch = (torch.rand(2, 2),)
case_169_enum.batch = (torch.rand(2, 2),)


def case_150_ctc_behind_a_stride():
    scores = torch.zeros(14, 2, 5).log_softmax(-1)
    lengths = torch.tensor([60, 52])
    F.ctc_loss(scores, torch.ones(2, 3, dtype=torch.long), lengths, torch.tensor([3, 3]))  # <- TM150


def case_155_heads_that_do_not_divide():
    x, heads = torch.zeros(2, 4, 32), 5
    batch, time, width = x.shape
    x.reshape(batch, time, heads, width // heads)  # <- TM155


def case_165_a_dict_unpacked():
    batch = {"image": torch.zeros(2, 4), "label": torch.zeros(2)}
    image, _label = batch  # <- TM165
    nn.Flatten()(image)


def case_101_of_torch_func():
    def loss(weight):
        return (weight * 2).sum(0)  # <- TM101

    torch.func.grad(loss)(torch.ones(3, 2))
