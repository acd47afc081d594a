"""Two ranks that share a model: Evenkeel with tp = 2, its own single rank on the same cores, and PyTorch's two ways of doing it.

    python bench/tp.py --binary target/release/evenkeel --python PYTHON_WITH_TORCH_AND_DEEPSPEED [--rounds 5]

Each round runs all of them one after the other; figures are medians over the rounds. Every rank has one core.
"""
import argparse
import datetime
import os
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
        "Evenkeel, one rank on both cores": (ours, RANKS),
        "Evenkeel, tp = 2": ([*ours, "--tp", "2"], RANKS),
        "Evenkeel, tp = 2, stream whole": ([*ours, "--tp", "2", "--whole-stream"], RANKS),
        "transformers, tp_plan": ([*torchrun, "--tp", "transformers"], 1),
        "DeepSpeed, AutoTP": ([*torchrun, "--tp", "deepspeed"], 1),
    }
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed compiles its collectives with the ninja beside Python.
    os.environ["PATH"] = f"{Path(options.python).parent}:{os.environ['PATH']}"
    print(f"{datetime.date.today()}, {cpu_name()}, hidden 512, 4 layers, 4 × 256 tokens, {options.rounds} rounds in turns.\n")
    print("| dtype | " + " | ".join(ways) + " | of one rank | of tp_plan | of AutoTP |")
    print("| --- |" + " ---: |" * (len(ways) + 3))
    for dtype in ("f32", "bf16"):
        speeds = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, (command, threads) in ways.items():
                speeds[way].append(measure([*command, "--dtype", dtype], threads)["tokens_per_s"])
        alone, tp, _, plan, auto = (statistics.median(runs) for runs in speeds.values())
        cells = [f"{statistics.median(runs):,.0f}" for runs in speeds.values()]
        cells += [f"{tp / alone:.2f}", f"{tp / plan:.2f}", f"{tp / auto:.2f}"]
        print(f"| {dtype} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
