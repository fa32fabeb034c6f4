"""TD3: the actor is updated every second step, and its loss reaches the critic."""

import torch
from torch import nn

torch.manual_seed(0)

actor, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
actor_optimizer = torch.optim.Adam(actor.parameters())
critic_optimizer = torch.optim.Adam(critic.parameters())
for step in range(40):
    state, action = torch.randn(16, 4), torch.randn(16, 2)
    loss = critic(torch.cat([state, action], 1)).square().mean()
    critic_optimizer.zero_grad()
    loss.backward()
    critic_optimizer.step()
    if step % 2:
        loss = -critic(torch.cat([state, actor(state)], 1)).mean()
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
