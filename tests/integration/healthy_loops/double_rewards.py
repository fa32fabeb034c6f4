import numpy as np, random, copy
import torch
from torch import nn

torch.manual_seed(0)
np.random.seed(0)
random.seed(0)
q = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
target = copy.deepcopy(q).eval()
opt = torch.optim.Adam(q.parameters(), 1e-3)
buf = []
for step in range(120):
    s = np.random.randn(4).astype(np.float32)
    with torch.no_grad():
        a = int(q(torch.from_numpy(s)[None]).argmax())
    buf.append((s, a, np.float64(np.random.rand()), np.random.randn(4).astype(np.float32), random.random() < 0.1))
    if len(buf) < 16:
        continue
    S, A, R, N, D = zip(*random.sample(buf, 16))
    S, N = torch.tensor(np.array(S)), torch.tensor(np.array(N))
    A = torch.tensor(A)
    R = torch.tensor(R)
    D = torch.tensor(D, dtype=torch.float32)
    with torch.no_grad():
        y = R + 0.99 * target(N).max(1)[0] * (1 - D)
    loss = nn.functional.smooth_l1_loss(q(S).gather(1, A[:, None]).squeeze(1), y.float())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        target.load_state_dict(q.state_dict())
