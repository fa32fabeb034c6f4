"""A GAN: two optimizers, and the loss of the generator reaches the discriminator, whose gradients are thrown away."""

import torch
from torch import nn

torch.manual_seed(0)

generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
for step in range(30):
    real, fake = torch.randn(16, 2), generator(torch.randn(16, 4))
    judge_optimizer.zero_grad()
    criterion(judge(real), torch.ones(16, 1)).backward()
    criterion(judge(fake.detach()), torch.zeros(16, 1)).backward()
    judge_optimizer.step()
    generator_optimizer.zero_grad()
    criterion(judge(fake), torch.ones(16, 1)).backward()
    generator_optimizer.step()
