# ranks: 2  culprit: 1
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
stage = torch.nn.Linear(4, 4)
for step in range(2):
    for micro in range(4):
        if dist.get_rank() == 0:
            hidden = stage(torch.randn(2, 4))
            dist.send(hidden.detach(), 1)
            gradient = torch.empty(2, 4)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(2, 4)
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            stage(hidden).square().mean().backward()
            if micro % 2 == 0:  # twin: if micro < 4:
                dist.send(hidden.grad, 0)  # <- cause
dist.barrier()
dist.destroy_process_group()
