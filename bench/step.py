"""Whole training steps, Evenkeel beside PyTorch on the same cores, in turns. Prints a Markdown table.

    python bench/step.py --binary target/release/evenkeel --python PYTHON_WITH_TORCH [--threads 2] [--rounds 5]

Each round runs all three, one after the other; the figures are medians over the rounds' medians. PyTorch runs with its
default AdamW and with the fused one. The large model is measured in a third of the rounds.
"""
import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MODELS = {
    "hidden 512, 4 layers, 4 × 256 tokens": [],
    "hidden 1024, 8 layers, 4 × 1024 tokens": [
        "--hidden", "1024", "--layers", "8", "--heads", "16", "--kv-heads", "8", "--ffn", "2816", "--sequence", "1024",
        "--warmup", "1",
    ],
}


def cpu_name():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure(command, threads):
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def median(runs, key):
    return statistics.median(run[key] for run in runs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    rows, torch_version = [], None
    for model, sizes in MODELS.items():
        steps = max(3, options.steps // (4 if sizes else 1))
        rounds = max(1, options.rounds // (3 if sizes else 1))
        for dtype in ("f32", "bf16"):
            shared = [*sizes, "--dtype", dtype, "--steps", str(steps)]
            ours, theirs, fused = [], [], []
            for _ in range(rounds):
                ours.append(measure([options.binary, "bench", "step", "--json", "--threads", str(options.threads), *shared],
                                    options.threads))
                torch_step = [options.python, str(HERE / "torch_step.py"), *shared]
                theirs.append(measure(torch_step, options.threads))
                fused.append(measure([*torch_step, "--fused"], options.threads))
            torch_version = theirs[0]["torch"]
            speed, default, best = (median(runs, "tokens_per_s") for runs in (ours, theirs, fused))
            ratio = speed / default
            rows.append([model, dtype, str(rounds), f"{speed:,.0f}", f"{default:,.0f}", f"{best:,.0f}", f"{ratio:.2f}",
                         f"{speed / best:.2f}", f'{median(ours, "peak_process_bytes") / 2**20:,.0f}',
                         f'{median(theirs, "peak_process_bytes") / 2**20:,.0f}'])
            print(f"{model} {dtype}: {ratio:.2f}×", file=sys.stderr, flush=True)

    print(f"{datetime.date.today()}, {cpu_name()}, {options.threads} cores, PyTorch {torch_version}, "
          "medians over the rounds.\n")
    print("| model | dtype | rounds | Evenkeel tokens/s | PyTorch tokens/s | PyTorch fused | ratio | ratio to fused "
          "| Evenkeel peak MiB | PyTorch peak MiB |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
