# ranks: 2  culprit: 1
import torch
import torch.distributed as dist


def first(batch, micro_batches):
    layer = torch.nn.Linear(4, 4)
    outputs = []
    for part in batch.chunk(micro_batches):
        outputs.append(layer(part))
        dist.send(outputs[-1].detach(), 1)
    for output in outputs:
        gradient = torch.empty_like(output)
        dist.recv(gradient, 1)
        output.backward(gradient)


def second(micro_batches):
    layer = torch.nn.Linear(4, 2)
    inputs = []
    for _ in range(micro_batches):  # <- cause
        hidden = torch.empty(2, 4)
        dist.recv(hidden, 0)
        inputs.append(hidden.requires_grad_())
    for hidden in inputs:
        layer(hidden).square().mean().backward()
        dist.send(hidden.grad, 0)


dist.init_process_group("gloo")
for step in range(3):
    if dist.get_rank() == 0:
        first(torch.randn(8, 4), 4)
    else:
        second(5)  # twin: second(4)
dist.barrier()
dist.destroy_process_group()
