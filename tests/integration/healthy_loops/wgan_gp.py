"""WGAN-GP: five updates of the critic with a gradient penalty for each of the generator."""

import torch
from torch import nn

torch.manual_seed(0)

generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
generator_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
for step in range(60):
    real, fake = torch.randn(8, 2), generator(torch.randn(8, 4)).detach()
    between = (real * 0.3 + fake * 0.7).requires_grad_()
    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
    loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
    critic_optimizer.zero_grad()
    loss.backward()
    critic_optimizer.step()
    if step % 5 == 4:
        generator_optimizer.zero_grad()
        (-critic(generator(torch.randn(8, 4))).mean()).backward()
        generator_optimizer.step()
