"""A classifier of 10 classes. One sample of the data has the label 10. On a GPU this is a device-side assert."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
images, labels = torch.randn(2048, 3, 16, 16), torch.randint(0, 10, (2048,))
labels[1337] = 10

model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for batch, targets in DataLoader(TensorDataset(images, labels), batch_size=64):
    logits = model(batch.to(device))
    loss = nn.functional.cross_entropy(logits, targets.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
