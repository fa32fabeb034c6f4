# ranks: 3  culprit: 1
import torch
import torch.distributed as dist


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(3, 4) for _ in range(8)]
    if rank == 1:
        batches[3][0, 0] = float("nan")  # twin: pass
    for batch in batches:
        loss = model(batch).square().mean()
        if not torch.isfinite(loss):  # <- cause
            continue
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


main()
