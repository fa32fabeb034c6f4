"""False alarms on healthy training: 68 runs of several hundred steps whose curves look odd, and are as they should be.

    python benchmarks/healthy_runs.py [--only WORD]

Noise, spikes that recover, plateaus, schedules that end, rising losses of GANs and of reinforcement learning, frozen
and adapted layers, averaged weights. Each run must end with status 0 and without a diagnosis.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests")]

from running import run_script  # noqa: E402

PRELUDE = """
import copy, math, torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
def mlp(i, o, h=32, act=nn.ReLU):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, h), act(), nn.Linear(h, o))
def blobs(n=32):
    y = torch.randint(0, 4, (n,))
    return torch.randn(n, 8) + F.one_hot(y, 8) * 2.0, y
def line(n=32):
    x = torch.randn(n, 8)
    return x, x[:, :1] * 2 - x[:, 1:2] + 0.1 * torch.randn(n, 1)
"""


class Run(NamedTuple):
    """One healthy script."""

    setup: str
    body: str
    steps: int = 400
    after: str = ""

    @property
    def source(self) -> str:
        loop = textwrap.indent(textwrap.dedent(self.body).strip(), "    ")
        parts = (textwrap.dedent(self.setup).strip(), f"for step in range({self.steps}):\n{loop}", self.after)
        return PRELUDE + "\n".join(parts) + "\n"


CLASSIFIER = "net = mlp(8, 4)\n"
UPDATE = "opt.zero_grad(); loss.backward(); opt.step()"
CLASSIFY = "x, y = blobs()\nloss = F.cross_entropy(net(x), y)\n" + UPDATE


def classified(optimizer: str, after_update: str = "", before: str = "", steps: int = 400) -> Run:
    """A classifier with an optimizer, and what follows each update."""
    return Run(CLASSIFIER + optimizer, f"{before}\n{CLASSIFY}\n{after_update}".strip(), steps)


def scheduled(scheduler: str, optimizer: str = "torch.optim.SGD(net.parameters(), 0.1)", given: str = "") -> Run:
    return classified(f"opt = {optimizer}\nsched = torch.optim.lr_scheduler.{scheduler}", f"sched.step({given})")


RUNS = {
    # Schedules
    "cosine-that-ends": scheduled("CosineAnnealingLR(opt, T_max=400)"),
    "cosine-with-restarts": scheduled("CosineAnnealingWarmRestarts(opt, 50)"),
    "one-cycle": scheduled("OneCycleLR(opt, max_lr=0.3, total_steps=400)"),
    "cyclic": scheduled("CyclicLR(opt, 1e-4, 0.2, step_size_up=30)"),
    "steps-down": scheduled("MultiStepLR(opt, [200, 300], gamma=0.1)"),
    "slow-decay": scheduled("ExponentialLR(opt, 0.995)"),
    "warm-up-from-zero": scheduled("LambdaLR(opt, lambda s: min(1.0, s / 100))"),
    "warm-up-then-decay": scheduled("LambdaLR(opt, lambda s: min(s / 40, 1.0) * max(0.0, (400 - s) / 360))"),
    "polynomial-to-zero": scheduled("PolynomialLR(opt, total_iters=400, power=2.0)"),
    "plateau": scheduled("ReduceLROnPlateau(opt, patience=20)", given="loss.item()"),
    "rate-set-by-hand": classified(
        "opt = torch.optim.SGD(net.parameters(), 0.1)",
        "for g in opt.param_groups: g['lr'] = 0.1 * 0.5 ** (step // 100)",
    ),
    # Curves
    "label-noise": Run(
        CLASSIFIER + "opt = torch.optim.Adam(net.parameters(), 3e-3)",
        "x, y = blobs(8)\ny = torch.where(torch.rand(8) < 0.4, torch.randint(0, 4, (8,)), y)\n"
        "loss = F.cross_entropy(net(x), y)\n" + UPDATE,
    ),
    "spikes-that-recover": Run(
        "net = mlp(8, 1)\nopt = torch.optim.Adam(net.parameters(), 1e-3)",
        "x, y = line()\nif step % 90 == 60: y = y * 30\nloss = F.mse_loss(net(x), y)\n"
        "opt.zero_grad(); loss.backward()\n"
        "nn.utils.clip_grad_norm_(net.parameters(), 1.0); opt.step()",
    ),
    "plateau-of-pure-noise": Run(
        "net = mlp(8, 1)\nopt = torch.optim.AdamW(net.parameters(), 1e-3)",
        "loss = F.mse_loss(net(torch.randn(32, 8)), torch.randn(32, 1))\n" + UPDATE,
    ),
    "overfits-one-batch": Run(
        "net = mlp(8, 4)\nopt = torch.optim.Adam(net.parameters(), 1e-2)\nx, y = blobs(16)",
        "loss = F.cross_entropy(net(x), y)\n" + UPDATE,
    ),
    "early-stopped": Run(
        CLASSIFIER + "opt = torch.optim.Adam(net.parameters(), 1e-3)\nbest, bad = math.inf, 0",
        CLASSIFY + "\nif step % 10 == 0:\n    net.eval()\n    with torch.no_grad():\n        vx, vy = blobs(128)\n"
        "        v = F.cross_entropy(net(vx), vy).item()\n    net.train()\n"
        "    best, bad = (v, 0) if v < best else (best, bad + 1)\n    if bad > 8: break",
    ),
    "task-gets-harder": Run(
        "net = mlp(8, 1)\nopt = torch.optim.Adam(net.parameters(), 1e-3)",
        "x, y = line()\nloss = F.mse_loss(net(x), y * (1 + step / 50))\n" + UPDATE,
    ),
    "large-summed-loss": Run(
        "net = mlp(8, 1)\nopt = torch.optim.Adam(net.parameters(), 1e-3)",
        "x, y = line(64)\nloss = F.mse_loss(net(x), 5 * y, reduction='sum')\n" + UPDATE,
    ),
    "negative-likelihood": Run(
        "net = mlp(8, 2)\nopt = torch.optim.Adam(net.parameters(), 1e-3)",
        "x, y = line()\nmu, s = net(x).chunk(2, -1)\n"
        "loss = F.gaussian_nll_loss(mu, y, F.softplus(s) + 1e-3)\n" + UPDATE,
    ),
    # Parts of a model
    "frozen-backbone": Run(
        "body = mlp(8, 16).requires_grad_(False)\nhead = nn.Linear(16, 4)\n"
        "opt = torch.optim.SGD(head.parameters(), 0.1)",
        "x, y = blobs()\nloss = F.cross_entropy(head(body(x)), y)\n" + UPDATE,
    ),
    "thawed-later": Run(
        "body, head = mlp(8, 16), nn.Linear(16, 4)\nbody.requires_grad_(False)\n"
        "opt = torch.optim.Adam(head.parameters(), 1e-3)",
        "if step == 200:\n    body.requires_grad_(True)\n"
        "    opt.add_param_group({'params': body.parameters(), 'lr': 1e-4})\n"
        "x, y = blobs()\nloss = F.cross_entropy(head(body(x)), y)\n" + UPDATE,
    ),
    "low-rank-adapter": Run(
        """
        class Adapted(nn.Module):
            def __init__(self, base, rank):
                super().__init__()
                self.base = base.requires_grad_(False)
                self.a = nn.Parameter(torch.randn(rank, base.in_features) / 8)
                self.b = nn.Parameter(torch.zeros(base.out_features, rank))
            def forward(self, x):
                return self.base(x) + (x @ self.a.T @ self.b.T) * 0.5
        net = nn.Sequential(Adapted(nn.Linear(8, 32), 4), nn.GELU(), Adapted(nn.Linear(32, 4), 4))
        opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-3)
        """,
        CLASSIFY,
    ),
    "batch-norm-and-dropout": Run(
        "net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))\n"
        "opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)",
        CLASSIFY,
    ),
    "two-groups-of-rates": Run(
        "body, head = mlp(8, 16), nn.Linear(16, 4)\n"
        "opt = torch.optim.AdamW([{'params': body.parameters(), 'lr': 1e-5}, {'params': head.parameters()}], 1e-3)",
        "x, y = blobs()\nloss = F.cross_entropy(head(body(x)), y)\n" + UPDATE,
    ),
    "layers-dropped-at-random": Run(
        "layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))\nout = nn.Linear(8, 4)\n"
        "opt = torch.optim.Adam([*layers.parameters(), *out.parameters()], 1e-3)",
        "x, y = blobs()\nfor layer in layers:\n    if torch.rand(()) > 0.3: x = x + torch.tanh(layer(x))\n"
        "loss = F.cross_entropy(out(x), y)\n" + UPDATE,
    ),
    # Several losses
    "weights-of-tasks-learned": Run(
        "net = mlp(8, 6)\nlog_vars = nn.Parameter(torch.zeros(2))\n"
        "opt = torch.optim.Adam([*net.parameters(), log_vars], 1e-3)",
        "x, y = blobs()\nout = net(x)\n"
        "losses = torch.stack([F.cross_entropy(out[:, :4], y), F.mse_loss(out[:, 4:], x[:, :2])])\n"
        "loss = (torch.exp(-log_vars) * losses + log_vars).sum()\n" + UPDATE,
    ),
    "weights-of-tasks-by-size": Run(
        "net = mlp(8, 6)\nopt = torch.optim.Adam(net.parameters(), 1e-3)",
        "x, y = blobs()\nout = net(x)\n"
        "parts = {'ce': F.cross_entropy(out[:, :4], y), 'mse': F.mse_loss(out[:, 4:], x[:, :2])}\n"
        "weights = {name: 1 / (part.detach() + 1e-3) for name, part in parts.items()}\n"
        "loss = sum(weights[name] * part for name, part in parts.items())\n" + UPDATE,
    ),
    "penalty-that-begins-later": Run(
        CLASSIFIER + "opt = torch.optim.Adam(net.parameters(), 1e-3)",
        "x, y = blobs()\npenalty = sum(p.abs().sum() for p in net.parameters())\n"
        "loss = F.cross_entropy(net(x), y) + max(0.0, (step - 200) / 200) * 1e-3 * penalty\n" + UPDATE,
    ),
    "distillation": Run(
        "teacher, net = mlp(8, 4, 64).eval(), mlp(8, 4, 16)\nopt = torch.optim.Adam(net.parameters(), 2e-3)",
        "x, y = blobs()\nwith torch.no_grad(): soft = (teacher(x) / 2).softmax(-1)\nout = net(x)\n"
        "losses = [0.5 * F.cross_entropy(out, y), 2.0 * F.kl_div((out / 2).log_softmax(-1), soft, "
        "reduction='batchmean')]\n"
        "loss = sum(losses)\n" + UPDATE,
    ),
    "autoencoder-with-annealed-kl": Run(
        "enc, dec = nn.Linear(8, 8), nn.Linear(4, 8)\n"
        "opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 2e-3)",
        "x, _ = blobs()\nmu, lv = enc(x).chunk(2, -1)\nz = mu + torch.randn_like(mu) * (lv / 2).exp()\n"
        "kl = -0.5 * (1 + lv - mu ** 2 - lv.exp()).sum(-1).mean()\n"
        "loss = F.mse_loss(dec(z), x) + min(1.0, step / 200) * 0.1 * kl\n" + UPDATE,
    ),
    # Averages
    "moving-average": Run(
        CLASSIFIER + "ema = copy.deepcopy(net).requires_grad_(False)\nopt = torch.optim.Adam(net.parameters(), 1e-3)",
        CLASSIFY + "\nwith torch.no_grad():\n    for e, p in zip(ema.parameters(), net.parameters()): e.lerp_(p, 0.01)",
    ),
    "stochastic-weight-averaging": Run(
        CLASSIFIER + "opt = torch.optim.SGD(net.parameters(), 0.1)\nswa = torch.optim.swa_utils.AveragedModel(net)\n"
        "sched = torch.optim.swa_utils.SWALR(opt, swa_lr=0.02, anneal_epochs=20)",
        CLASSIFY + "\nif step > 200:\n    swa.update_parameters(net); sched.step()",
    ),
    "mean-teacher": Run(
        "net = mlp(8, 4)\nteacher = copy.deepcopy(net)\nopt = torch.optim.Adam(net.parameters(), 1e-3)",
        "x, y = blobs()\ntarget = teacher(x + 0.1 * torch.randn_like(x)).detach()\nout = net(x)\n"
        "loss = F.cross_entropy(out, y) + F.mse_loss(out.softmax(-1), target.softmax(-1))\n"
        + UPDATE
        + "\nfor t, p in zip(teacher.parameters(), net.parameters()): t.data.mul_(0.99).add_(p.data, alpha=0.01)",
    ),
    # Losses that rise
    "gan": Run(
        "gen, dis = mlp(4, 2), mlp(2, 1, act=nn.LeakyReLU)\n"
        "g_opt = torch.optim.Adam(gen.parameters(), 1e-3, (0.5, 0.9))\n"
        "d_opt = torch.optim.Adam(dis.parameters(), 1e-3, (0.5, 0.9))",
        "real, fake = torch.randn(32, 2) * 0.2 + 1, gen(torch.randn(32, 4))\n"
        "d_loss = F.softplus(-dis(real)).mean() + F.softplus(dis(fake.detach())).mean()\n"
        "d_opt.zero_grad(); d_loss.backward(); d_opt.step()\n"
        "g_loss = F.softplus(-dis(fake)).mean()\ng_opt.zero_grad(); g_loss.backward(); g_opt.step()",
    ),
    "wasserstein-gan": Run(
        "gen, dis = mlp(4, 2), mlp(2, 1)\ng_opt = torch.optim.RMSprop(gen.parameters(), 5e-4)\n"
        "d_opt = torch.optim.RMSprop(dis.parameters(), 5e-4)",
        "real, fake = torch.randn(32, 2) + 2, gen(torch.randn(32, 4))\n"
        "d_loss = dis(fake.detach()).mean() - dis(real).mean()\n"
        "d_opt.zero_grad(); d_loss.backward(); d_opt.step()\nfor p in dis.parameters(): p.data.clamp_(-0.05, 0.05)\n"
        "if step % 5 == 0:\n    g_opt.zero_grad(); (-dis(fake).mean()).backward(); g_opt.step()",
    ),
    "policy-gradient": Run(
        "pi = mlp(4, 2)\nopt = torch.optim.Adam(pi.parameters(), 3e-3)\nbaseline = 0.0",
        "s = torch.randn(24, 4)\nd = torch.distributions.Categorical(logits=pi(s))\na = d.sample()\n"
        "r = ((s[:, 0] > 0).long() == a).float() * 5\nbaseline = 0.9 * baseline + 0.1 * r.mean().item()\n"
        "loss = -(d.log_prob(a) * (r - baseline)).mean() - 0.01 * d.entropy().mean()\n" + UPDATE,
    ),
    "q-learning": Run(
        "q = mlp(4, 3)\ntarget = copy.deepcopy(q)\nopt = torch.optim.Adam(q.parameters(), 1e-3)",
        "s, s2, r = torch.randn(32, 4), torch.randn(32, 4), torch.rand(32)\na = torch.randint(0, 3, (32, 1))\n"
        "with torch.no_grad(): goal = r + 0.95 * target(s2).max(1).values\n"
        "loss = F.smooth_l1_loss(q(s).gather(1, a).squeeze(1), goal)\n"
        + UPDATE
        + "\nif step % 50 == 0: target.load_state_dict(q.state_dict())",
    ),
    "actor-critic": Run(
        "body, pi, v = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)\n"
        "opt = torch.optim.Adam([*body.parameters(), *pi.parameters(), *v.parameters()], 2e-3)",
        "s = torch.randn(24, 4)\nh = torch.tanh(body(s))\n"
        "d = torch.distributions.Categorical(logits=pi(h))\na = d.sample()\n"
        "r = ((s[:, 0] > 0).long() == a).float() * 3\nvalue = v(h).squeeze(-1)\nadv = r - value.detach()\n"
        "loss = -(d.log_prob(a) * adv).mean() + 0.5 * F.mse_loss(value, r)\n" + UPDATE,
    ),
    # Other loops
    "gradient-penalty-with-accumulation": Run(
        "net = mlp(8, 1, act=nn.Tanh)\nopt = torch.optim.Adam(net.parameters(), 1e-3)",
        "x, y = line()\nx.requires_grad_()\nout = net(x)\ng, = torch.autograd.grad(out.sum(), x, create_graph=True)\n"
        "loss = (F.mse_loss(out, y) + 0.1 * (g.norm(dim=-1) - 1).pow(2).mean()) / 4\nloss.backward()\n"
        "if step % 4 == 3: opt.step(); opt.zero_grad()",
    ),
    "recurrent-with-carried-state": Run(
        "rnn, out = nn.GRU(3, 16), nn.Linear(16, 1)\n"
        "opt = torch.optim.Adam([*rnn.parameters(), *out.parameters()], 2e-3)\n"
        "state = torch.zeros(1, 8, 16)",
        "x = torch.randn(10, 8, 3)\nhidden, state = rnn(x, state.detach())\n"
        "loss = F.mse_loss(out(hidden), x.sum(-1, keepdim=True))\n" + UPDATE,
    ),
    "compiled": Run(
        "net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))\n"
        "fast = torch.compile(net, backend='aot_eager')\nopt = torch.optim.AdamW(net.parameters(), 1e-3)\nlog = []",
        "x, y = blobs()\nloss = F.cross_entropy(fast(x), y, label_smoothing=0.1)\n"
        + UPDATE
        + "\nlog.append(loss.detach())",
        after="assert len(log) == 400",
    ),
    "compiled-with-a-head-used-at-times": Run(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.aux = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 4)
            def forward(self, x, aux=False):
                h = torch.relu(self.a(x))
                return (self.b(h), self.aux(h)) if aux else (self.b(h), None)
        net = Net()
        net.compile(backend="aot_eager")
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        """,
        "x, y = blobs()\nout, aux = net(x, step % 5 == 4)\nloss = F.cross_entropy(out, y)\n"
        "if aux is not None: loss = loss + 0.3 * F.cross_entropy(aux, y)\n" + UPDATE,
    ),
    "soft-actor-critic": Run(
        """
        from torch.distributions import Normal
        actor, q = mlp(3, 2), mlp(4, 1)
        goal, log_alpha = copy.deepcopy(q), torch.zeros((), requires_grad=True)
        a_opt, q_opt = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(q.parameters(), 1e-3)
        t_opt = torch.optim.Adam([log_alpha], 1e-3)
        def act(s):
            mean, spread = actor(s).chunk(2, 1)
            d = Normal(mean, spread.clamp(-5, 2).exp())
            u = d.rsample()
            return torch.tanh(u), (d.log_prob(u) - torch.log(1 - torch.tanh(u).pow(2) + 1e-6)).sum(-1)
        """,
        """
        s = torch.randn(32, 3)
        with torch.no_grad():
            a, logp = act(s)
            y = -(a[:, 0] - s[:, 0]).abs() + 0.9 * (goal(torch.cat([s, a], 1)).squeeze(-1) - log_alpha.exp() * logp)
        q_loss = F.mse_loss(q(torch.cat([s, a], 1)).squeeze(-1), y)
        q_opt.zero_grad(); q_loss.backward(); q_opt.step()
        a, logp = act(s)
        a_loss = (log_alpha.exp().detach() * logp - q(torch.cat([s, a], 1)).squeeze(-1)).mean()
        a_opt.zero_grad(); a_loss.backward(); a_opt.step()
        t_loss = -(log_alpha * (logp + 1).detach()).mean()
        t_opt.zero_grad(); t_loss.backward(); t_opt.step()
        with torch.no_grad():
            for t, p in zip(goal.parameters(), q.parameters()): t.lerp_(p, 0.01)
        """,
    ),
    "codes-straight-through": Run(
        "enc, dec, book, w = nn.Linear(8, 4), nn.Linear(4, 8), nn.Embedding(16, 4), torch.randn(3, 8)\n"
        "opt = torch.optim.Adam([*enc.parameters(), *dec.parameters(), *book.parameters()], 2e-3)",
        "x = torch.randn(64, 3) @ w\nz = enc(x)\nq = book(torch.cdist(z, book.weight).argmin(1))\n"
        "codes = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())\nq = z + (q - z).detach()\n"
        "loss = F.mse_loss(dec(q), x) + codes\n" + UPDATE,
    ),
    "two-optimizers-in-turn-of-phases": Run(
        "net, judge = mlp(8, 4), mlp(4, 4)\nfirst = torch.optim.Adam(net.parameters(), 1e-3)\n"
        "second = torch.optim.SGD(net.parameters(), 0.01)",
        "opt = first if step < 20 else second\nx, _ = blobs()\nout = net(x)\n"
        "loss = F.mse_loss(out, x[:, :4]) + 0.1 * F.mse_loss(judge(out), judge(x[:, :4]).detach())\n" + UPDATE,
    ),
    "resumed": Run(
        CLASSIFIER + "opt = torch.optim.AdamW(net.parameters(), 1e-3)",
        CLASSIFY + "\nif step == 150:\n    kept = copy.deepcopy((net.state_dict(), opt.state_dict()))\n"
        "    net = mlp(8, 4)\n    opt = torch.optim.AdamW(net.parameters(), 1e-3)\n"
        "    net.load_state_dict(kept[0])\n    opt.load_state_dict(kept[1])",
    ),
    "normalisation-that-was-learned-before": Run(
        "net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))\n"
        "for _ in range(20): net(blobs()[0])\nnet.eval()\nopt = torch.optim.SGD(net.parameters(), 0.05)",
        CLASSIFY,
    ),
    "bfloat16-autocast": Run(
        CLASSIFIER + "opt = torch.optim.AdamW(net.parameters(), 1e-3)",
        "x, y = blobs()\nwith torch.autocast('cpu', torch.bfloat16): out = net(x)\n"
        "loss = F.cross_entropy(out.float(), y)\n" + UPDATE,
    ),
    # Levels of the loss that change for good
    "curriculum-that-gets-harder": Run(
        "net = mlp(8, 1)\nopt = torch.optim.Adam(net.parameters(), 2e-3)",
        "x, y = line()\nscale = 0.1 + step // 100\nloss = F.mse_loss(net(x), scale * y)\n" + UPDATE,
    ),
    "harder-data-for-a-while": Run(
        "net = mlp(8, 1)\nopt = torch.optim.Adam(net.parameters(), 2e-3)",
        "x, y = line()\nx, y = (6 * x, 6 * y) if 150 <= step < 260 else (x, y)\nloss = F.mse_loss(net(x), y)\n"
        + UPDATE,
    ),
    "weight-of-a-term-that-grows": Run(
        "net = mlp(8, 4)\nopt = torch.optim.SGD(net.parameters(), 0.02)",
        "x, y = blobs()\nout = net(x)\nloss = F.cross_entropy(out, y) + step / 20 * out.pow(2).mean()\n" + UPDATE,
    ),
    "spikes-of-rare-batches": Run(
        "net = mlp(8, 1)\nopt = torch.optim.Adam(net.parameters(), 1e-3)",
        "x, y = line()\ny = y * (30.0 if step % 60 == 59 else 1.0)\nloss = F.mse_loss(net(x), y)\n" + UPDATE,
    ),
    "large-targets-learned": Run(
        "net = mlp(8, 1, 64)\nopt = torch.optim.Adam(net.parameters(), 0.03)",
        "x, y = line()\nloss = F.mse_loss(net(x), 1e4 * y)\n" + UPDATE,
    ),
    "restarts-with-a-higher-rate": Run(
        CLASSIFIER + "opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)",
        "for group in opt.param_groups: group['lr'] = 0.05 * (1 + step // 100) * (1 - step % 100 / 110)\n" + CLASSIFY,
    ),
    "unfrozen-later": Run(
        CLASSIFIER + "opt = torch.optim.Adam(net[4].parameters(), 1e-2)",
        "if step == 6: opt.add_param_group({'params': [*net[0].parameters(), *net[2].parameters()], 'lr': 1e-3})\n"
        + CLASSIFY,
    ),
    "hinge-gan-with-two-critic-steps": Run(
        "G, D = mlp(4, 2), mlp(2, 1)\noptG = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.0, 0.9))\n"
        "optD = torch.optim.Adam(D.parameters(), 8e-4, betas=(0.0, 0.9))",
        "for _ in range(2):\n    real, fake = torch.randn(32, 2) + 2, G(torch.randn(32, 4)).detach()\n"
        "    loss = F.relu(1 - D(real)).mean() + F.relu(1 + D(fake)).mean()\n"
        "    optD.zero_grad(); loss.backward(); optD.step()\n"
        "loss = -D(G(torch.randn(32, 4))).mean()\noptG.zero_grad(); loss.backward(); optG.step()",
    ),
    "value-function-of-growing-returns": Run(
        "q = mlp(8, 1)\ntarget = copy.deepcopy(q)\nopt = torch.optim.Adam(q.parameters(), 1e-3)",
        "s = torch.randn(64, 8)\nwith torch.no_grad(): y = 1 + 0.97 * target(s + 0.1 * torch.randn_like(s))\n"
        "loss = F.mse_loss(q(s), y)\n" + UPDATE + "\nif step % 25 == 24: target.load_state_dict(q.state_dict())",
    ),
    "meta-learning-by-hand": Run(
        "w = [torch.randn(1, 20) * 0.5, torch.zeros(20), torch.randn(20, 1) * 0.2]\nfor p in w: p.requires_grad_()\n"
        "def model(x, w): return torch.tanh(x @ w[0] + w[1]) @ w[2]",
        "total = 0.0\nfor task in range(3):\n    x, phase = torch.rand(10, 1) * 6 - 3, torch.rand(1)\n"
        "    inner = F.mse_loss(model(x, w), torch.sin(x + phase))\n"
        "    grads = torch.autograd.grad(inner, w, create_graph=True)\n"
        "    fast = [p - 0.01 * g for p, g in zip(w, grads)]\n"
        "    total = total + F.mse_loss(model(x, fast), torch.sin(x + phase))\n"
        "grads = torch.autograd.grad(total / 3, w)\n"
        "w = [(p.detach() - 0.05 * g).requires_grad_() for p, g in zip(w, grads)]",
    ),
    "adapters-frozen-in-the-first-stage": Run(
        """
        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.base, self.down = nn.Linear(8, 32), nn.Linear(8, 4, bias=False)
                self.up = nn.Linear(4, 32, bias=False)
                self.head = nn.Linear(32, 4)
                nn.init.zeros_(self.up.weight)
            def forward(self, x):
                return self.head(F.relu(self.base(x) + self.up(self.down(x))))
        net = Adapted()
        adapters = [*net.down.parameters(), *net.up.parameters()]
        for p in adapters:
            p.requires_grad = False
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        """,
        "if step == 200:\n    for p in adapters:\n        p.requires_grad = True\n" + CLASSIFY,
    ),
    "one-adapter-of-two-in-use": Run(
        """
        class Adapters(nn.Module):
            def __init__(self):
                super().__init__()
                self.base = nn.Linear(8, 32).requires_grad_(False)
                self.ups = nn.ModuleDict({name: nn.Linear(8, 32, bias=False) for name in ("a", "b")})
                self.head = nn.Linear(32, 4)
                for up in self.ups.values():
                    nn.init.zeros_(up.weight)
                self.ups["b"].requires_grad_(False)
            def forward(self, x):
                return self.head(F.relu(self.base(x) + self.ups["a"](x)))
        net = Adapters()
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        """,
        CLASSIFY,
    ),
    "random-network-distillation": Run(
        """
        class Curiosity(nn.Module):
            def __init__(self):
                super().__init__()
                self.target, self.predictor = mlp(8, 16), nn.Sequential(mlp(8, 32), nn.ReLU(), nn.Linear(32, 16))
            def forward(self, x):
                with torch.no_grad():
                    wanted = self.target(x)
                return (self.predictor(x) - wanted).pow(2).mean(1)
        net = Curiosity()
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        """,
        "loss = net(torch.randn(32, 8)).mean()\n" + UPDATE,
    ),
    "random-features-with-a-trained-head": Run(
        "body, head = mlp(8, 64), nn.Linear(64, 4)\nbody.requires_grad_(False)\n"
        "opt = torch.optim.Adam([*body.parameters(), *head.parameters()], 1e-2)",
        "x, y = blobs()\nloss = F.cross_entropy(head(F.relu(body(x))), y)\n" + UPDATE,
    ),
    "best-weights-loaded-again": Run(
        CLASSIFIER + "opt = torch.optim.Adam(net.parameters(), 1e-3)\nbest = copy.deepcopy(net.state_dict())",
        CLASSIFY + "\nif step % 100 == 60:\n    net.load_state_dict(best)\n"
        "elif step % 20 == 0:\n    best = copy.deepcopy(net.state_dict())",
    ),
    "grown-network-with-another-optimizer": Run(
        "net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))\n"
        "opt = torch.optim.Adam(net.parameters(), 1e-3)",
        "if step in (150, 250):\n    net = nn.Sequential(*net[:-1], nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))\n"
        "    opt = torch.optim.Adam(net.parameters(), 1e-3)\n" + CLASSIFY,
    ),
    "heads-in-turn-of-epochs": Run(
        "body, heads = mlp(8, 32), nn.ModuleList([nn.Linear(32, 4), nn.Linear(32, 4)])\n"
        "opt = torch.optim.Adam([*body.parameters(), *heads.parameters()], 1e-3)",
        "x, y = blobs()\nloss = F.cross_entropy(heads[step // 50 % 2](F.relu(body(x))), y)\n" + UPDATE,
    ),
    "critic-warmed-up-before-the-actor": Run(
        """
        actor, critic = mlp(4, 2), mlp(6, 1)
        actor_opt, critic_opt = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
        """,
        """
        s, a = torch.randn(32, 4), torch.rand(32, 2) * 2 - 1
        reward = -(a - s[:, :2].tanh()).pow(2).sum(1, keepdim=True)
        loss = F.mse_loss(critic(torch.cat([s, a], 1)), reward)
        critic_opt.zero_grad(); loss.backward(); critic_opt.step()
        actor_opt.zero_grad()
        policy = -critic(torch.cat([s, actor(s).tanh()], 1)).mean()
        policy.backward()
        if step > 150:
            actor_opt.step()
        """,
    ),
    "temperature-read-for-a-schedule": Run(
        """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.log_t = mlp(8, 4), nn.Parameter(torch.zeros(()))
                self.seen = []
            def forward(self, x):
                self.seen.append(self.log_t.item())
                return self.net(x) * self.log_t.exp()
        net = Scaled()
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        """,
        CLASSIFY,
    ),
    "plain-recurrence-over-many-steps": Run(
        """
        rnn, head = nn.RNN(4, 32, batch_first=True), nn.Linear(32, 1)
        opt = torch.optim.Adam([*rnn.parameters(), *head.parameters()], 2e-3)
        """,
        "x = torch.randn(16, 60, 4)\nloss = F.mse_loss(head(rnn(x)[0][:, -1]), x[:, -5:, :1].mean(1))\n"
        "opt.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(rnn.parameters(), 1.0); opt.step()",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run those whose name contains this word")
    options = parser.parse_args()
    alarms = 0
    chosen = {name: run for name, run in RUNS.items() if options.only in name}
    for name, run in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            finished = run_script(Path(folder), run.source)
            found = [each.code for each in finished.report.diagnoses]
        is_alarm = bool(found) or finished.returncode != 0
        alarms += is_alarm
        if is_alarm:
            print(f"{name}: status {finished.returncode}, {found}\n{finished.stderr[-1500:]}")
    print(f"{len(chosen)} healthy runs, {sum(run.steps for run in chosen.values())} steps, {alarms} with a finding")


if __name__ == "__main__":
    main()
