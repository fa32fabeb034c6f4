# ranks: 3  culprit: any
import torch
import torch.distributed as dist


def make_groups(pairs):
    groups = {}
    for pair in pairs:
        groups[pair] = dist.new_group(list(pair))  # <- cause
    return groups


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    neighbours = sorted({(0, 1), (1, 2), (0, 2)}, key=lambda pair: rank not in pair)  # twin: neighbours = [(0, 1), (0, 2), (1, 2)]
    groups = make_groups(neighbours)
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        for pair, group in sorted(groups.items()):
            if rank in pair:
                dist.all_reduce(model.weight.grad, group=group)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


main()
