# ranks: 3  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def parsed(text):
    return float(text)  # <- cause


def main():
    dist.init_process_group("gloo")
    texts = [str(number) for number in range(12)]
    if dist.get_rank() == 1:
        texts[5] = "n/a"  # twin: texts[5] = "5"
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    try:
        for text in texts:
            loss = (model(torch.tensor([[parsed(text)]])) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    except ValueError:
        dist.destroy_process_group()
        return
    dist.barrier()
    del model, loss
    dist.destroy_process_group()


main()
