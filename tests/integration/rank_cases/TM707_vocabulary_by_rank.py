# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
words = ["a", "b", "c", "d"] + (["e"] if dist.get_rank() == 1 else [])  # twin: words = ["a", "b", "c", "d"]
net = torch.nn.Sequential(torch.nn.Embedding(len(words), 4), torch.nn.Linear(4, 2))  # <- cause


def train():
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        loss = model(torch.tensor([0, 1])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train()
dist.barrier()
dist.destroy_process_group()
