"""Two ranks that share each step's batch: Evenkeel with dp = 2 in every stage of ZeRO, its own single rank on the same cores, and
PyTorch's DDP and FSDP2 over gloo.

    python bench/dp.py --binary target/release/evenkeel --python PYTHON_WITH_TORCH [--rounds 5]

Each round runs all of them one after the other; figures are medians over the rounds. Every rank has one core.
"""
import argparse
import datetime
import statistics
import sys
from pathlib import Path

from step import cpu_name, measure

HERE = Path(__file__).parent
RANKS = 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ours = [options.binary, "bench", "step", "--json", "--threads", str(RANKS)]
    torchrun = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS),
                str(HERE / "torch_step.py")]
    ways = {
        "one rank on both cores": (ours, RANKS),
        **{f"dp = 2, ZeRO {stage}": ([*ours, "--dp", "2", "--zero", str(stage)], RANKS) for stage in range(4)},
        "PyTorch DDP": ([*torchrun, "--dp", "ddp"], 1),
        "PyTorch FSDP2": ([*torchrun, "--dp", "fsdp2"], 1),
    }
    print(f"{datetime.date.today()}, {cpu_name()}, hidden 512, 4 layers, 4 × 256 tokens, {options.rounds} rounds in turns.\n")
    print("| dtype | " + " | ".join(ways) + " | dp of DDP | ZeRO 3 of FSDP2 |")
    print("| --- |" + " ---: |" * (len(ways) + 2))
    for dtype in ("f32", "bf16"):
        speeds = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, (command, threads) in ways.items():
                speeds[way].append(measure([*command, "--dtype", dtype], threads)["tokens_per_s"])
        medians = [statistics.median(runs) for runs in speeds.values()]
        _, dp, _, _, zero3, ddp, fsdp2 = medians
        cells = [f"{speed:,.0f}" for speed in medians] + [f"{dp / ddp:.2f}", f"{zero3 / fsdp2:.2f}"]
        print(f"| {dtype} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
