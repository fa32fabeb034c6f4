# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


class Net(torch.nn.Module):
    def __init__(self, width=8, depth=3):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 1)

    def forward(self, x, coins):
        for block, coin in zip(self.blocks, coins):
            if coin < 0.7:  # <- cause
                x = x + block(x).relu()
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = Net()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seed = dist.get_rank()  # twin: seed = 0
    generator = torch.Generator().manual_seed(seed)
    for _ in range(8):
        coins = torch.rand(3, generator=generator).tolist()
        loss = model(torch.randn(4, 8), coins).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


main()
