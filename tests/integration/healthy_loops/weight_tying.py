"""An embedding and a head that share one weight, with autocast."""

import torch
from torch import nn

torch.manual_seed(0)

embedding, head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
head.weight = embedding.weight
model = nn.Sequential(embedding, nn.LayerNorm(16), head)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    tokens = torch.randint(0, 20, (4, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
