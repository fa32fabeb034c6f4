"""A GAN whose two updates go through one function, with fakes that are not detached."""

import torch
from torch import nn

torch.manual_seed(0)


def update(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
for step in range(30):
    fake = judge(generator(torch.randn(16, 4)))
    real = judge(torch.randn(16, 2))
    update((fake - real).mean(), judge_optimizer)
    update(-judge(generator(torch.randn(16, 4))).mean(), generator_optimizer)
