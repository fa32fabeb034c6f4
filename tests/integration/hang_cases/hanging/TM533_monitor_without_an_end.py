import threading
import time

import torch
from torch import nn


class Monitor(threading.Thread):
    def __init__(self, model):
        super().__init__(name="monitor")
        self.model, self.norms = model, []

    def run(self):
        while True:
            self.norms.append(sum(weight.detach().norm().item() for weight in self.model.parameters()))
            time.sleep(0.5)  # <- cause


def main():
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Monitor(model).start()
    for _ in range(10):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
