# ranks: 3  culprit: 2
import torch
import torch.distributed as dist


def pass_on(block, rank, world):
    incoming = torch.empty_like(block)
    messages = [dist.P2POp(dist.isend, block, (rank + 1) % world)]
    if rank > 0:  # twin: if True:
        messages.append(dist.P2POp(dist.irecv, incoming, (rank - 1) % world))
    for request in dist.batch_isend_irecv(messages):  # <- cause
        request.wait()
    return incoming


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(4):
        torch.manual_seed(step * 3 + rank)
        block = torch.randn(600, 64)
        for _hop in range(world):
            block = pass_on(block, rank, world)
        layer(block).square().mean().backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


main()
