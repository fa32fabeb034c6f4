# ranks: 3  culprit: 2
import torch
import torch.distributed as dist


def train(items):
    dist.init_process_group("gloo")
    mine = items[2 * dist.get_rank() :][:2]
    if not mine:  # <- cause
        return
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in mine * 4:
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


train(list(range(4)))  # twin: train(list(range(6)))
