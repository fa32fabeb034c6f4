# ranks: 2  culprit: any
import torch
import torch.distributed as dist


def sizes_of_others(counts):
    taken = torch.empty(2, dtype=torch.long)
    dist.all_to_all_single(taken, torch.tensor(counts))
    return taken.tolist()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(6):
        counts = [6, 2] if rank == 1 and step == 3 else [4, 4]
        tokens = torch.randn(8, 4)
        taken = [4, 4]  # twin: taken = sizes_of_others(counts)
        out = torch.empty(sum(taken), 4)
        dist.all_to_all_single(out, tokens, taken, counts)  # <- cause
    dist.barrier()
    dist.destroy_process_group()


main()
