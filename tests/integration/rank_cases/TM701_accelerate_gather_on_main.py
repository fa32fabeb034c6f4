# ranks: 2  culprit: 0
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(6):
    loss = model(torch.randn(3, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 2 and accelerator.is_main_process:  # twin: if step % 3 == 2:
        print(accelerator.gather(loss.detach()).mean())  # <- cause
accelerator.wait_for_everyone()
accelerator.end_training()
