"""Policy gradients: roll-outs without gradients, several passes over what they gave."""

import torch
from torch import nn

torch.manual_seed(0)

policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
actor_optimizer = torch.optim.Adam(policy.parameters())
critic_optimizer = torch.optim.Adam(critic.parameters())
for episode in range(8):
    states, actions, rewards = [], [], []
    state = torch.randn(4)
    for _ in range(10):
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=policy(state)).sample()
        states.append(state)
        actions.append(action)
        rewards.append(torch.randn(()))
        state = torch.randn(4)
    states, actions, rewards = torch.stack(states), torch.stack(actions), torch.stack(rewards)
    for _ in range(3):
        values = critic(states).squeeze(1)
        critic_optimizer.zero_grad()
        (values - rewards).square().mean().backward()
        critic_optimizer.step()
        logs = torch.distributions.Categorical(logits=policy(states)).log_prob(actions)
        actor_optimizer.zero_grad()
        (-logs * (rewards - values.detach())).mean().backward()
        actor_optimizer.step()
