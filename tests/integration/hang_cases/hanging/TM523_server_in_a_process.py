import os
import signal
import socket

import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_step():
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


signal.alarm(60)
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    signal.alarm(60)  # it is not inherited
    connection, _ = server.accept()
    signal.pause()
PORT = server.getsockname()[1]
server.close()


def labels():
    connection = socket.create_connection(("127.0.0.1", PORT))
    return connection.recv(1)  # <- cause


train_step()
labels()
