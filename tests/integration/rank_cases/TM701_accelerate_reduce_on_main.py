# ranks: 2  culprit: 0
import torch
from accelerate import Accelerator
acc = Accelerator(cpu=True)
model = torch.nn.Linear(6, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
ds = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(2, (64,)))
model, opt, dl = acc.prepare(model, opt, torch.utils.data.DataLoader(ds, batch_size=4))

def report(step, loss):
    if acc.is_main_process and step == 4:  # twin: if step == 4:
        total = acc.reduce(loss.detach(), "mean")  # <- cause
        acc.print("loss", total.item())

for step, (x, y) in enumerate(dl):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    acc.backward(loss)
    opt.step(); opt.zero_grad()
    report(step, loss)
acc.end_training()
