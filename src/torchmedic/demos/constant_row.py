"""Regression on synthetic measurements. One of the 256 items contains the same number eight times, by mistake."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Standardise(nn.Module):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / centred.std(-1, keepdim=True)


def measurements():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator)
    x[171] = 0.5
    return TensorDataset(x, x.amax(-1, keepdim=True))


def train():
    torch.manual_seed(1)
    model = nn.Sequential(Standardise(), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for x, y in DataLoader(measurements(), batch_size=16, shuffle=True):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    train()
