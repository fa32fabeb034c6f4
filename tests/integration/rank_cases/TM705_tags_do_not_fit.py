# ranks: 2  culprit: any
import torch
import torch.distributed as dist


def exchange(rank, step, weights):
    if rank == 0:
        dist.send(weights, 1, tag=step)  # <- cause
    else:
        got = torch.empty_like(weights)
        dist.recv(got, 0, tag=step + 1)  # twin: dist.recv(got, 0, tag=step)
        weights.copy_(got)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 1:
            exchange(rank, step, model.weight.data)
    dist.barrier()
    dist.destroy_process_group()


main()
