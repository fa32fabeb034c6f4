# ranks: 3  culprit: 0
import torch
import torch.distributed as dist


def serve(rounds):
    workers = range(1, dist.get_world_size())
    for _ in range(rounds):  # <- cause
        total = torch.zeros(5)
        for worker in workers:
            part = torch.empty(5)
            dist.recv(part, worker)
            total += part
        for worker in workers:
            dist.send(total / len(workers), worker)


def work(steps):
    weights = torch.zeros(5)
    for step in range(steps):
        weights += 0.1
        if step % 2 == 1:
            dist.send(weights, 0)
            dist.recv(weights, 0)


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    serve(8)  # twin: serve(4)
else:
    work(8)
dist.barrier()
dist.destroy_process_group()
