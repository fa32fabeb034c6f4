# ranks: 2  culprit: any
import torch
import torch.distributed as dist


def share_vocabulary(size):
    box = [size]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def average(value):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


dist.init_process_group("gloo")
rank = dist.get_rank()
lengths = torch.randint(1, 10, (20,)).float()
if rank == 0:  # twin: if rank < 99:
    size = share_vocabulary(1000)  # <- cause
    mean = average(lengths.mean())
else:
    mean = average(lengths.mean())
    size = share_vocabulary(None)
embedding = torch.nn.Embedding(size, 4)
optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
for _ in range(4):
    loss = embedding(torch.randint(0, size, (8,))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(embedding.weight.grad)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
