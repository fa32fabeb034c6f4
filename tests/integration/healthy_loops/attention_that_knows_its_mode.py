import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, d=16, p=0.1):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.o = nn.Linear(d, d)
        self.p = p
        self.ln = nn.LayerNorm(d)

    def forward(self, x):
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        return x + F.dropout(self.o(y), self.p, self.training)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(30, 16)
        self.p = nn.Embedding(12, 16)
        self.b = nn.ModuleList(Block() for _ in range(2))
        self.h = nn.Linear(16, 30, bias=False)
        self.h.weight = self.t.weight
        nn.init.normal_(self.t.weight, std=0.02)

    def forward(self, i, y=None):
        x = self.t(i) + self.p(torch.arange(i.shape[1]))
        for b in self.b:
            x = b(x)
        l = self.h(x)
        return l, None if y is None else F.cross_entropy(l.flatten(0, 1), y.flatten())


m = GPT()
opt = torch.optim.AdamW(m.parameters(), 3e-4)


@torch.no_grad()
def estimate():
    m.eval()
    r = [m(torch.randint(0, 30, (4, 12)), torch.randint(0, 30, (4, 12)))[1].item() for _ in range(3)]
    m.train()
    return sum(r) / 3


for it in range(40):
    if it % 10 == 0:
        estimate()
    x = torch.randint(0, 30, (4, 13))
    _, l = m(x[:, :-1], x[:, 1:])
    opt.zero_grad(set_to_none=True)
    l.backward()
    opt.step()
