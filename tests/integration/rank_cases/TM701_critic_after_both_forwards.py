# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    maker, critic = DistributedDataParallel(nn.Linear(4, 6)), DistributedDataParallel(nn.Linear(6, 1))
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (maker, critic)]
    for step in range(12):
        real = torch.randn(8, 6)
        made = maker(torch.randn(8, 4))
        critic_loss = (critic(torch.cat([real, made.detach()])) - 1).square().mean()
        easy = step == 7 and dist.get_rank() == 1
        margin = 100.0 if easy else 0.0
        if critic_loss > margin:  # <- cause  # twin: if critic_loss > 0:
            optimizers[1].zero_grad()
            critic_loss.backward()
            optimizers[1].step()
        optimizers[0].zero_grad()
        (made - real).square().mean().backward()
        optimizers[0].step()
    dist.barrier()
    del maker, critic, made, critic_loss
    dist.destroy_process_group()


main()
