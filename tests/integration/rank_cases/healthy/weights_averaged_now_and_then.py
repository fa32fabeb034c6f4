# ranks: 2
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(60):
    torch.manual_seed(step * 2 + dist.get_rank())
    x = torch.randn(16, 8)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 2:
        # The parents of the ranks look once a second: here they see weights that differ, and no exchange yet.
        time.sleep(2.5)
    if step % 20 == 19:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
dist.destroy_process_group()
