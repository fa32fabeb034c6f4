# ranks: 2  culprit: 1
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
following = rank + 1  # twin: following = (rank + 1) % 2
model = torch.nn.Linear(4, 4)
for step in range(3):
    sent, taken = model(torch.randn(2, 4)).detach(), torch.empty(2, 4)
    requests = dist.batch_isend_irecv(  # <- cause
        [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, taken, 1 - rank)]
    )
    for request in requests:
        request.wait()
dist.barrier()
dist.destroy_process_group()
