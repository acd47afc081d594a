"""Pipelines on two places of one core each: Evenkeel beside torch.distributed.pipelining, in turns. Prints a Markdown table.

    python bench/pipelines.py --binary target/release/evenkeel --python PYTHON_WITH_TORCH [--rounds 4]

Each round runs every order of both, one after the other; figures are medians over the rounds, with the least and the most.
Memory is of processes: Evenkeel's two places are one process, PyTorch's are two; "libraries" is what one of PyTorch's had resident
before there was a model. PyTorch runs with fused AdamW.
"""
import argparse
import datetime
import statistics
import sys
from pathlib import Path

from step import cpu_name, measure

PLACES, MICROS, SEQUENCE = 2, 8, 256
ORDERS = ["gpipe", "1f1b"]


def ours(options, orders, sizes, steps):
    """By order, each with the speed of one rank beside it."""
    command = [options.binary, "bench", "pipelines", "--json", "--pp", PLACES, "--threads", PLACES, "--orders", ",".join(orders),
               "--rounds", steps, *sizes]
    run = measure([str(word) for word in command], PLACES)
    one, *cases = run["cases"]
    beside = {"one_rank_tokens_per_s": one["tokens_per_s"], "process_bytes": run["peak_process_bytes"]}
    return {case["order"]: {**case, **beside} for case in cases if case["order"]}


def theirs(options, order, sizes, steps):
    command = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", PLACES,
               Path(__file__).parent / "torch_pipeline.py", "--fused", "--order", order, "--steps", steps, "--warmup", 1,
               *sizes]
    return measure([str(word) for word in command], 1)


def spread(runs, key="tokens_per_s"):
    found = [run[key] for run in runs]
    return f"{statistics.median(found):,.0f} ({min(found):,.0f}–{max(found):,.0f})"


def mib(numbers):
    return " + ".join(f"{number / 2**20:,.0f}" for number in numbers)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each run")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 4], help="of a micro-batch")
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {cpu_name()}, {MICROS} micro-batches a step, {options.rounds} rounds in turns.\n")
    print("| micro-batch | dtype | order | Evenkeel tokens/s | PyTorch tokens/s | ratio | ratios of the rounds | Evenkeel, one rank "
          "| idle (simulated) | Evenkeel tensors MiB | process MiB | PyTorch processes MiB | libraries MiB |")
    print("| --- | --- | --- |" + " ---: |" * 10)
    for sequences in options.sequences:
        for dtype in ("f32", "bf16"):
            sizes = ["--batch", MICROS * sequences, "--sequence", SEQUENCE, "--micros", MICROS, "--dtype", dtype]
            runs = {order: ([], []) for order in ORDERS}
            for _ in range(options.rounds):
                found = ours(options, ORDERS, sizes, options.steps)
                for order, (own, other) in runs.items():
                    own.append(found[order])
                    other.append(theirs(options, order, sizes, options.steps + 1))
            # A process that runs both orders needs what GPipe needs, which keeps more.
            memory = {"gpipe": found["gpipe"], **ours(options, ["1f1b"], sizes, 1)}
            for order, (own, other) in runs.items():
                speeds = [statistics.median(run["tokens_per_s"] for run in side) for side in (own, other)]
                ratios = [one["tokens_per_s"] / two["tokens_per_s"] for one, two in zip(own, other)]
                idle = [statistics.median(run[key] for run in own) for key in ("idle_share", "simulated_idle_share")]
                cells = [f"{sequences} × {SEQUENCE}", dtype, order, spread(own), spread(other), f"{speeds[0] / speeds[1]:.2f}",
                         f"{min(ratios):.2f}–{max(ratios):.2f}", spread(own, "one_rank_tokens_per_s"),
                         f"{idle[0]:.0%} ({idle[1]:.0%})", mib(own[-1]["peak_bytes"]), mib([memory[order]["process_bytes"]]),
                         mib(other[-1]["peak_process_bytes"]), mib([other[-1]["library_bytes"]])]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
