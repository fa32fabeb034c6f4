# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Saver:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, model, step):
        if dist.get_rank() == 0:
            try:
                torch.save(model.state_dict(), f"{self.folder}/step{step}.pt")
            except (OSError, RuntimeError):  # <- cause
                return
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    save = Saver("no/such/folder")  # twin: save = Saver(".")
    for step in range(8):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 4:
            save(model, step)
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
