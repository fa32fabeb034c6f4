# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    x[12, 1] = float("nan")  # <- cause  # twin: x[12, 1] = 0.5
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in loader:
        output = model(inputs)
        loss = (output - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    fine = all(bool(each.isfinite().all()) for each in model.parameters())
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(0 if fine else 1)


main()
