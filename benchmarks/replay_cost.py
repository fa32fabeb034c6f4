"""The cost of a replay: a GPT with 124M parameters whose loss becomes NaN, on the CPU.

    python benchmarks/replay_cost.py [--layers 12] [--tokens 64] [--output benchmarks/results/replay_cost.md]

Prints the time of a plain step, the time from the failing step to its diagnosis (first pass, second pass, trials of
cures), and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from measured_run import run_under_torchmedic

SCRIPT = """
import sys, time, json
import torch
from torch import nn

LAYERS, TOKENS, WIDTH, VOCABULARY = {layers}, {tokens}, 768, 50257
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 12, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, spoil):
        h = self.ln1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        if spoil:
            x = x / (x - x).sum(-1, keepdim=True)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, spoil):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, spoil and number == LAYERS // 2)
        return self.head(x)


model = GPT()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
times = []
for step in range(6):
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS))
    started = time.perf_counter()
    logits = model(tokens, step == 5)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - started)
print(json.dumps({{"parameters": sum(p.numel() for p in model.parameters()), "times": times}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done, diagnoses = run_under_torchmedic(Path(folder), SCRIPT.format(layers=args.layers, tokens=args.tokens))
        done.check_returncode()
        result = json.loads(done.stdout)
    plain = statistics.median(result["times"][1:5])
    bad = result["times"][5]
    lines = [
        f"# Cost of a replay: {result['parameters'] / 1e6:.0f}M parameters, 2 x {args.tokens} tokens, CPU",
        "",
        f"`python benchmarks/replay_cost.py {' '.join(sys.argv[1:])}`",
        "",
        f"- plain step: {plain:.2f} s",
        f"- step that failed, diagnosis included: {bad:.2f} s",
        f"- replay, second pass and trials: {(bad - plain) / plain:.1f} plain steps",
        f"- diagnosis: {diagnoses[0]['code']} at line {diagnoses[0]['locations'][0]['line']}, "
        f"{sum(each['proven'] for each in diagnoses[0]['treatments'])} cure proven",
    ]
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
