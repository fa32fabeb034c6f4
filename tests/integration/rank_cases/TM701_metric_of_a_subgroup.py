# ranks: 4  culprit: any
import torch
import torch.distributed as dist


class Parallel:
    def __init__(self):
        rank = dist.get_rank()
        self.left = dist.new_group([0, 1])
        self.right = dist.new_group([2, 3])
        self.group = self.left if rank < 2 else self.right
        self.is_lead = rank % 2 == 0

    def average(self, tensor):
        dist.all_reduce(tensor, group=self.group)
        return tensor / 2

    def log_norm(self, model):
        norm = torch.stack([p.norm() for p in model.parameters()]).norm()
        if self.is_lead:  # twin: if True:
            norm = self.average(norm.detach())  # <- cause
        return norm


def main():
    dist.init_process_group("gloo")
    parallel = Parallel()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.copy_(parallel.average(p.grad))
        optimizer.step()
        if step == 3:
            parallel.log_norm(model)
    dist.barrier()
    dist.destroy_process_group()


main()
