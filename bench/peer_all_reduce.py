"""All-reduces between processes, by gloo or by MPI, into buffers that are there already. Prints one JSON object.

    python bench/peer_all_reduce.py gloo --ranks 2 --mib 4,64
    mpirun -n 2 python bench/peer_all_reduce.py mpi --mib 4,64

gloo needs torch, MPI needs mpi4py and numpy. A sum takes as long as the slowest rank says; the sizes take turns.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time

MIB = 1 << 20
SUMS_OF_A_TURN = 5  # the first is not timed, as in `evenkeel bench all-reduce`


def time_sums(options, barrier, sums):
    """The seconds of every sum, by size. `sums` has a function for each size."""
    seconds = [[] for _ in sums]
    for _ in range(options.turns):
        for add, times in zip(sums, seconds):
            for i in range(SUMS_OF_A_TURN):
                barrier()
                start = time.perf_counter()
                add()
                if i > 0:
                    times.append(time.perf_counter() - start)
    return seconds


def report(options, ranks, seconds, peer):
    sizes = []
    for mib, times in zip(options.mib, seconds):
        median = statistics.median(times)
        sizes.append({"bytes": mib * MIB, "median_s": median, "min_s": min(times), "bytes_per_s": mib * MIB / median})
    print(json.dumps({"peer": peer, "ranks": ranks, "dtype": "f32", "turns": options.turns, "sizes": sizes}), flush=True)


def run_gloo(rank, options, store):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    buffers = [torch.zeros(mib * MIB // 4) for mib in options.mib]
    seconds = torch.tensor(time_sums(options, dist.barrier, [lambda x=x: dist.all_reduce(x) for x in buffers]),
                           dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if rank == 0:
        report(options, options.ranks, seconds.tolist(), f"gloo of PyTorch {torch.__version__}")
    dist.destroy_process_group()


def run_mpi(options):
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    buffers = [numpy.zeros(mib * MIB // 4, numpy.float32) for mib in options.mib]
    sums = [lambda x=x: world.Allreduce(MPI.IN_PLACE, [x, MPI.FLOAT], MPI.SUM) for x in buffers]
    seconds = numpy.array(time_sums(options, world.Barrier, sums))
    world.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    if world.rank == 0:
        library = MPI.Get_library_version().split(",")[0]
        report(options, world.size, seconds.tolist(), library)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=["gloo", "mpi"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=lambda text: [int(part) for part in text.split(",")], default=[4, 64])
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    if options.peer == "mpi":
        return run_mpi(options)
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(run_gloo, (options, os.path.join(folder, "store")), options.ranks)


if __name__ == "__main__":
    sys.exit(main())
