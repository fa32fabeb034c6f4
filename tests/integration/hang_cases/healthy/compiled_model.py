"""A small function is compiled at its first call, which takes a C++ compiler as many seconds as it takes."""

import torch
from torch import nn

torch._inductor.config.fx_graph_cache = False
torch._inductor.config.cpp.simdlen = 1  # do not try out first which vectors the compiler can do
torch._inductor.config.cpp_cache_precompile_headers = False
prepare = torch.compile(lambda x: torch.tanh(x) + 1)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(prepare(torch.randn(4, 8))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
