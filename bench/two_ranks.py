"""What bench/tp.py and bench/dp.py share: several ways to train on two ranks, run in turns, as a Markdown table of medians."""
import argparse
import datetime
import statistics
import sys
from pathlib import Path

from step import cpu_name, measure

RANKS = 2


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def ours(options, *arguments):
    """Evenkeel on both cores, however many ranks have them."""
    return [options.binary, "bench", "step", "--json", "--threads", str(RANKS), *arguments], RANKS


def theirs(options, *arguments):
    """PyTorch with one core for each rank."""
    launcher = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    return [*launcher, str(Path(__file__).parent / "torch_step.py"), *arguments], 1


def compare(options, ways, ratios):
    """Prints tokens per second of each way, and `ratios`: by heading, which way's speed is divided by which."""
    print(f"{datetime.date.today()}, {cpu_name()}, hidden 512, 4 layers, 4 × 256 tokens, {options.rounds} rounds in turns.\n")
    print("| dtype | " + " | ".join([*ways, *ratios]) + " |")
    print("| --- |" + " ---: |" * (len(ways) + len(ratios)))
    for dtype in ("f32", "bf16"):
        speeds = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, (command, threads) in ways.items():
                speeds[way].append(measure([*command, "--dtype", dtype], threads)["tokens_per_s"])
        medians = {way: statistics.median(runs) for way, runs in speeds.items()}
        cells = [f"{speed:,.0f}" for speed in medians.values()]
        cells += [f"{medians[one] / medians[other]:.2f}" for one, other in ratios.values()]
        print(f"| {dtype} | " + " | ".join(cells) + " |", flush=True)
