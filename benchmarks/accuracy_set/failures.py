"""Ways for a step to fail, each with a healthy twin. The guilty line ends in `# <- cause`.

`codes` are the diagnoses that are right; the line must be right as well.
"""

from __future__ import annotations

from typing import NamedTuple


class Failure(NamedTuple):
    codes: tuple[str, ...]
    fails: str
    passes: str
    not_in: tuple[str, ...] = ()  # shapes in which nothing fails, because another loss keeps a graph


_PLAIN_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

"""
_NO_SPOIL = """
def spoil(x, y):
    pass

"""
_ZERO_ROW = """
def spoil(x, y):
    x[29] = 0

"""
_CE = """
def criterion(out, y):
    return F.cross_entropy(out, y)

"""


def _net(body: str, init: str = "") -> str:
    lines = "\n".join("        " + line for line in body.strip().splitlines())
    extra = "\n".join("        " + line for line in init.strip().splitlines())
    return f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 4)
{extra}

    def forward(self, x):
{lines}

"""


FAILURES = {
    "norm-of-zero-row": Failure(
        ("TM201",),
        _ZERO_ROW
        + _net("x = x / x.norm(dim=-1, keepdim=True)  # <- cause\nreturn self.b(torch.relu(self.a(x)))")
        + _CE,
        _ZERO_ROW + _net("x = x / (x.norm(dim=-1, keepdim=True) + 1e-6)\nreturn self.b(torch.relu(self.a(x)))") + _CE,
    ),
    "log-of-probability": Failure(
        ("TM202",),
        "\ndef spoil(x, y):\n    x[29] = 300.0\n\n"
        + _net("return self.b(self.a(x) * 50)")
        + "\ndef criterion(out, y):\n    p = torch.softmax(out, dim=-1)\n"
        "    return -torch.log(p).gather(1, y[:, None]).mean()  # <- cause\n\n",
        "\ndef spoil(x, y):\n    x[29] = 300.0\n\n"
        + _net("return self.b(self.a(x) * 50)")
        + "\ndef criterion(out, y):\n    return -torch.log_softmax(out, dim=-1).gather(1, y[:, None]).mean()\n\n",
    ),
    "sqrt-gradient": Failure(
        ("TM203",),
        _ZERO_ROW
        + _net(
            "h = torch.relu(self.a(x * 0) if False else self.a(x)) * (x.sum(-1, keepdim=True) != 0)\nreturn self.b(h)"
        )
        + "\ndef criterion(out, y):\n    d = (out - out.detach()).square().sum(-1)\n"
        "    return torch.sqrt(d).mean() + F.cross_entropy(out, y)  # <- cause\n\n",
        _ZERO_ROW
        + _net("return self.b(torch.relu(self.a(x)))")
        + "\ndef criterion(out, y):\n    d = (out - out.detach()).square().sum(-1)\n"
        "    return torch.sqrt(d + 1e-8).mean() + F.cross_entropy(out, y)\n\n",
    ),
    "softmax-by-hand": Failure(
        ("TM204",),
        "\ndef spoil(x, y):\n    x[29] = 500.0\n\n"
        + _net("return self.b(self.a(x))")
        + "\ndef criterion(out, y):\n    e = torch.exp(out * 10)  # <- cause\n"
        "    p = e / e.sum(-1, keepdim=True)\n    return (p * y[:, None]).sum() / 100\n\n",
        "\ndef spoil(x, y):\n    x[29] = 500.0\n\n"
        + _net("return self.b(self.a(x))")
        + "\ndef criterion(out, y):\n    p = torch.softmax(out * 10, -1)\n    return (p * y[:, None]).sum() / 100\n\n",
    ),
    "acos-out-of-domain": Failure(
        ("TM207",),
        _NO_SPOIL
        + _net("return self.b(torch.tanh(self.a(x)))")
        + "\ndef criterion(out, y):\n    c = F.cosine_similarity(out, out) * 1.001\n"
        "    return torch.acos(c).mean() + F.cross_entropy(out, y)  # <- cause\n\n",
        _NO_SPOIL
        + _net("return self.b(torch.tanh(self.a(x)))")
        + "\ndef criterion(out, y):\n    c = F.cosine_similarity(out, out).clamp(-0.99, 0.99)\n"
        "    return torch.acos(c).mean() + F.cross_entropy(out, y)\n\n",
    ),
    "fully-masked-row": Failure(
        ("TM208",),
        _ZERO_ROW
        + _net(
            'scores = self.a(x)\nscores = scores.masked_fill(x[:, :1] == 0, float("-inf"))\n'
            "weights = torch.softmax(scores, dim=-1)  # <- cause\nreturn self.b(weights)"
        )
        + _CE,
        _ZERO_ROW
        + _net(
            "scores = self.a(x)\nmask = torch.zeros_like(scores, dtype=torch.bool)\nmask[:, 3:] = True\n"
            'weights = torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)\nreturn self.b(weights)'
        )
        + _CE,
    ),
    "mean-of-nothing": Failure(
        ("TM211",),
        "\ndef spoil(x, y):\n    y[24:32] = -100\n    y[:24:3] = -100\n\n"
        + _PLAIN_NET
        + "\ndef criterion(out, y):\n    keep = (y >= 0) & (y != 7)\n"
        "    picked = out[keep]\n    return picked.square().mean() if len(y) > 8 else "
        "picked.square().mean()  # <- cause\n\n",
        "\ndef spoil(x, y):\n    y[:24:3] = -100\n\n"
        + _PLAIN_NET
        + "\ndef criterion(out, y):\n    picked = out[y >= 0]\n"
        "    return picked.square().sum() / max(1, picked.numel())\n\n",
        not_in=("lbfgs-closure",),
    ),
    "nan-in-data": Failure(
        ("TM220",),
        "\ndef spoil(x, y):\n    x[29, 3] = float('nan')  # <- cause\n\n"
        + _net("return self.b(torch.tanh(self.a(x)))")
        + _CE,
        "\ndef spoil(x, y):\n    x[29, 3] = float('nan')\n\n"
        + _net("x = torch.nan_to_num(x)\nreturn self.b(torch.tanh(self.a(x)))")
        + _CE,
    ),
    "where-hides-nan": Failure(
        ("TM223",),
        _NO_SPOIL + _PLAIN_NET + "\ndef criterion(out, y):\n    p = out.sigmoid() * (y[:, None] > 1)\n"
        "    safe = torch.where(p > 0, torch.log(p), torch.zeros_like(p))  # <- cause\n    return safe.mean()\n\n",
        _NO_SPOIL + _PLAIN_NET + "\ndef criterion(out, y):\n    p = out.sigmoid() * (y[:, None] > 1)\n"
        "    inner = torch.where(p > 0, p, torch.ones_like(p))\n"
        "    return torch.where(p > 0, torch.log(inner), torch.zeros_like(p)).mean()\n\n",
    ),
    "augmented-assignment": Failure(
        ("TM102",),
        _NO_SPOIL + _net("h = torch.sigmoid(self.a(x))\nh += 0.5  # <- cause\nreturn self.b(h)") + _CE,
        _NO_SPOIL + _net("h = self.a(x)\nh += 0.5\nreturn self.b(torch.sigmoid(h))") + _CE,
    ),
    "write-through-view": Failure(
        ("TM102",),
        _NO_SPOIL
        + _net("h = torch.tanh(self.a(x))\nleft = h[:, :4]\nout = self.b(h)\nleft.mul_(0.5)  # <- cause\nreturn out")
        + _CE,
        _NO_SPOIL
        + _net("h = torch.tanh(self.a(x))\nleft = h[:, :4].clone()\nout = self.b(h)\nleft.mul_(0.5)\nreturn out")
        + _CE,
    ),
    "index-assignment": Failure(
        ("TM102",),
        _NO_SPOIL
        + _net("h = torch.exp(self.a(x) * 0.01)\nscore = self.b(h)\nh[0] = 0.0  # <- cause\nreturn score + h.mean()")
        + _CE,
        _NO_SPOIL + _net("h = torch.exp(self.a(x) * 0.01).clone()\nh[0] = 0.0\nreturn self.b(h) + h.mean()") + _CE,
    ),
    "detached-output": Failure(
        ("TM103",),
        _NO_SPOIL + _PLAIN_NET + "\ndef criterion(out, y):\n    probabilities = out.detach().softmax(-1)  # <- cause\n"
        "    return -probabilities.gather(1, y[:, None]).mean()\n\n",
        _NO_SPOIL + _PLAIN_NET + "\ndef criterion(out, y):\n    target = out.detach().softmax(-1)\n"
        "    return F.cross_entropy(out, y) + F.mse_loss(out.softmax(-1), target)\n\n",
        not_in=("two-optimizers",),
    ),
    "argmax-in-loss": Failure(
        ("TM103",),
        _NO_SPOIL + _PLAIN_NET + "\ndef criterion(out, y):\n    predicted = out.argmax(-1)  # <- cause\n"
        "    return (predicted != y).float().mean()\n\n",
        _NO_SPOIL + _PLAIN_NET + "\ndef criterion(out, y):\n    accuracy = (out.argmax(-1) == y).float().mean()\n"
        "    return F.cross_entropy(out, y) * (1 + 0 * accuracy)\n\n",
        not_in=("two-optimizers",),
    ),
    "no-grad-forward": Failure(
        ("TM103",),
        _NO_SPOIL + _net("with torch.no_grad():  # <- cause\n    h = self.a(x)\n    out = self.b(h)\nreturn out") + _CE,
        _NO_SPOIL
        + _net("with torch.no_grad():\n    scale = self.a(x).std()\nreturn self.b(self.a(x) / (1 + scale))")
        + _CE,
        not_in=("two-optimizers",),
    ),
    "plain-number-loss": Failure(
        ("TM103",),
        _NO_SPOIL + _PLAIN_NET + "\ndef criterion(out, y):\n    value = F.cross_entropy(out, y).item()  # <- cause\n"
        "    return torch.tensor(value)\n\n",
        _NO_SPOIL + _PLAIN_NET + "\ndef criterion(out, y):\n    weight = float(out.abs().mean()) * 0 + 1\n"
        "    return F.cross_entropy(out, y) * weight\n\n",
        not_in=("two-optimizers",),
    ),
    "custom-function-count": Failure(
        ("TM110",),
        _NO_SPOIL + "\nclass Scale(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, k):\n"
        "        ctx.k = k\n        return x * k\n\n    @staticmethod\n    def backward(ctx, g):\n"
        "        return g * ctx.k  # <- cause\n\n" + _net("return self.b(Scale.apply(self.a(x), 2.0))") + _CE,
        _NO_SPOIL + "\nclass Scale(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, k):\n"
        "        ctx.k = k\n        return x * k\n\n    @staticmethod\n    def backward(ctx, g):\n"
        "        return g * ctx.k, None\n\n" + _net("return self.b(Scale.apply(self.a(x), 2.0))") + _CE,
    ),
    "second-backward-inside": Failure(
        ("TM104",),
        _NO_SPOIL
        + _PLAIN_NET
        + "\ndef criterion(out, y):\n    penalty = out.square().mean()\n    penalty.backward()  # <- cause\n"
        "    return F.cross_entropy(out, y)\n\n",
        _NO_SPOIL
        + _PLAIN_NET
        + "\ndef criterion(out, y):\n    penalty = out.square().mean()\n    penalty.backward(retain_graph=True)\n"
        "    return F.cross_entropy(out, y)\n\n",
    ),
}
