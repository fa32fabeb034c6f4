# ranks: 4  culprit: 2
import torch
import torch.distributed as dist


class Ring:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.left, self.right = (self.rank - 1) % self.world, (self.rank + 1) % self.world

    def shift(self, block):
        incoming = torch.empty_like(block)
        if self.rank % 2 == 0:
            dist.send(block, self.right)
            dist.recv(incoming, self.left)
        else:
            dist.recv(incoming, self.left)
            dist.send(block, self.right)
        return incoming


def attend(ring, q, kv):
    out = torch.zeros_like(q)
    hops = ring.world if ring.rank != 2 else ring.world - 1  # twin: hops = ring.world
    for _ in range(hops):  # <- cause
        out = out + q * kv
        kv = ring.shift(kv)
    return out


def main():
    dist.init_process_group("gloo")
    ring = Ring()
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(3):
        q = layer(torch.randn(2, 4))
        loss = attend(ring, q, torch.randn(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in layer.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


main()
