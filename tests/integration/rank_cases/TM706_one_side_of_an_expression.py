# ranks: 2  culprit: any  cured
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(8, 16)
        self.text = torch.nn.Linear(16, 4)
        self.image = torch.nn.Linear(16, 4)

    def forward(self, x, kind):
        h = torch.relu(self.stem(x))
        return self.text(h) if kind == "text" else self.image(h)  # <- cause


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(TwoHeads())  # twin: model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(6):
    out = model(torch.randn(16, 8), "text" if step % 2 else "image")
    loss = torch.nn.functional.cross_entropy(out, torch.randint(0, 4, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
