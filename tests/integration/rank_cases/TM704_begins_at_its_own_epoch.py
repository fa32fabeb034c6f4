# ranks: 2  culprit: 0
import torch
import torch.distributed as dist


class Run:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.begin, self.epochs = 0, 4

    def resume(self, found):
        if found:  # only the first rank finds its checkpoint
            self.begin = 2

    def fit(self, loader):
        for epoch in range(self.begin, self.epochs):  # <- cause
            for (x,) in loader:
                loss = self.model(x).square().mean() + epoch
                self.optimizer.zero_grad()
                loss.backward()
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
                self.optimizer.step()


dist.init_process_group("gloo")
run = Run()
run.resume(dist.get_rank() == 0)  # twin: run.resume(True)
data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4) * (1 + dist.get_rank()) / 100)
run.fit(torch.utils.data.DataLoader(data, batch_size=4))
dist.destroy_process_group()
