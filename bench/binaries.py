"""Two builds of Evenkeel, step by step: which one is faster, and by how much.

    python bench/binaries.py target/release/evenkeel target/dist-out/evenkeel [--rounds 15] [OPTION_OF_BENCH_STEP …]

Each round runs both, one right after the other, and every second round the other way round. The ratio is that of the second
binary's speed over the first's in the same round; figures are medians and quartiles over the rounds.
"""
import argparse
import datetime
import json
import statistics
import subprocess

from step import cpu_name

CASES = {"one rank": [], "tp 2": ["--tp", "2"]}


def tokens_per_s(binary, arguments):
    command = [binary, "bench", "step", "--json", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["tokens_per_s"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--rounds", type=int, default=15)
    options, rest = parser.parse_known_args()
    print(f"{datetime.date.today()}, {cpu_name()}, {options.rounds} rounds in turns, `bench step {' '.join(rest)}`.\n")
    print("| dtype | ranks | first, tokens/s | second, tokens/s | ratio: median | quartiles | range |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for dtype in ("f32", "bf16"):
        for case, arguments in CASES.items():
            rounds = []
            for number in range(options.rounds):
                order = (options.first, options.second) if number % 2 == 0 else (options.second, options.first)
                speeds = {binary: tokens_per_s(binary, [*rest, "--dtype", dtype, *arguments]) for binary in order}
                rounds.append((speeds[options.first], speeds[options.second]))
            ratios = [second / first for first, second in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4)
            medians = [f"{statistics.median(speeds):,.0f}" for speeds in zip(*rounds)]
            spread = f"{low:.3f}–{high:.3f} | {min(ratios):.3f}–{max(ratios):.3f}"
            print(f"| {dtype} | {case} | {' | '.join(medians)} | {middle:.3f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
