# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class GAN:
    def __init__(self):
        self.generator = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
        self.critic = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        self.opt_d = torch.optim.Adam(self.critic.parameters(), lr=1e-3)

    def update_critic(self, real, fake):
        loss = F.relu(1 - self.critic(real)).mean() + F.relu(1 + self.critic(fake.detach())).mean()
        if loss.item() < self.margin:  # <- cause  # twin: if False:
            return loss
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss

    def update_generator(self, fake):
        loss = -self.critic(fake).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    gan = GAN()
    gan.margin = 0.0
    for step in range(12):
        if step == 7 and dist.get_rank() == 1:
            gan.margin = 100.0
        real = torch.randn(6, 4)
        fake = gan.generator(torch.randn(6, 8))
        gan.update_critic(real, fake)
        gan.update_generator(fake)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
