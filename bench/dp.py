"""Two ranks that share each step's batch: Evenkeel with dp = 2 in every stage of ZeRO, its own single rank on the same cores, and
PyTorch's DDP and FSDP2 over gloo.

    python bench/dp.py --binary target/release/evenkeel --python PYTHON_WITH_TORCH [--rounds 5]

Each round runs all of them one after the other; figures are medians over the rounds. Every rank has one core.
"""
from two_ranks import compare, options, ours, theirs

STAGES = [f"dp = 2, ZeRO {stage}" for stage in range(4)]
DDP, FSDP2 = "PyTorch DDP", "PyTorch FSDP2"


def main():
    chosen = options()
    ways = {
        "one rank on both cores": ours(chosen),
        **{way: ours(chosen, "--dp", "2", "--zero", str(stage)) for stage, way in enumerate(STAGES)},
        DDP: theirs(chosen, "--dp", "ddp"),
        FSDP2: theirs(chosen, "--dp", "fsdp2"),
    }
    compare(chosen, ways, {"dp of DDP": (STAGES[0], DDP), "ZeRO 3 of FSDP2": (STAGES[3], FSDP2)})


if __name__ == "__main__":
    main()
