"""Two ranks that share a model: Evenkeel with tp = 2, its own single rank on the same cores, and PyTorch's two ways of doing it.

    python bench/tp.py --binary target/release/evenkeel --python PYTHON_WITH_TORCH_AND_DEEPSPEED [--rounds 5]

Each round runs all of them one after the other; figures are medians over the rounds. Every rank has one core.
"""
import os
from pathlib import Path

from two_ranks import compare, options, ours, theirs

ALONE, SPLIT, PLAN, AUTO = "Evenkeel, one rank on both cores", "Evenkeel, tp = 2", "transformers, tp_plan", "DeepSpeed, AutoTP"


def main():
    chosen = options()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed compiles its collectives with the ninja beside Python.
    os.environ["PATH"] = f"{Path(chosen.python).parent}:{os.environ['PATH']}"
    ways = {
        ALONE: ours(chosen),
        SPLIT: ours(chosen, "--tp", "2"),
        "Evenkeel, tp = 2, stream whole": ours(chosen, "--tp", "2", "--whole-stream"),
        PLAN: theirs(chosen, "--tp", "transformers"),
        AUTO: theirs(chosen, "--tp", "deepspeed"),
    }
    compare(chosen, ways, {"of one rank": (SPLIT, ALONE), "of tp_plan": (SPLIT, PLAN), "of AutoTP": (SPLIT, AUTO)})


if __name__ == "__main__":
    main()
