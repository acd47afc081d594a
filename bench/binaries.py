"""Two builds of Evenkeel, step by step: which one is faster, and by how much.

    python bench/binaries.py target/release/evenkeel target/dist-out/evenkeel [--rounds 15] [OPTION_OF_BENCH_STEP …]

Each round runs both, one right after the other, and every second round the other way round. A ratio is the second binary's speed
over the first's in the same round, of their median steps and of their fastest ones; figures are medians and quartiles over the
rounds. Beside other jobs only the fastest steps tell something.
"""
import argparse
import datetime
import json
import statistics
import subprocess

from step import cpu_name

CASES = {"one rank": [], "tp 2": ["--tp", "2"]}


def measure(binary, arguments):
    command = [binary, "bench", "step", "--json", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cell(ratios):
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--rounds", type=int, default=15)
    options, rest = parser.parse_known_args()
    print(f"{datetime.date.today()}, {cpu_name()}, {options.rounds} rounds in turns, `bench step {' '.join(rest)}`.\n")
    print("| dtype | ranks | first, fastest step | second, fastest step | ratio of medians | ratio of fastest steps |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for dtype in ("f32", "bf16"):
        for case, arguments in CASES.items():
            rounds = []
            for number in range(options.rounds):
                order = (options.first, options.second) if number % 2 == 0 else (options.second, options.first)
                steps = {binary: measure(binary, [*rest, "--dtype", dtype, *arguments]) for binary in order}
                rounds.append((steps[options.first], steps[options.second]))
            fastest = [f"{1000 * min(step['min_step_s'] for step in steps):.1f} ms" for steps in zip(*rounds)]
            ratios = [[first[key] / second[key] for first, second in rounds] for key in ("median_step_s", "min_step_s")]
            print(f"| {dtype} | {case} | {' | '.join([*fastest, *map(cell, ratios)])} |", flush=True)


if __name__ == "__main__":
    main()
