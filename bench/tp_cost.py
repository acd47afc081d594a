"""What tensor parallelism costs: memory, work and traffic of a rank for tp from 1 to 16, from dry runs; and, as far as there
are cores, the speed with one core a rank.

    python bench/tp_cost.py --binary target/release/evenkeel [--dtype bf16] [--rounds 3]
"""
import argparse
import os
import statistics

from step import cpu_name, measure

SIZES = ["--hidden", "1024", "--layers", "8", "--heads", "16", "--kv-heads", "8", "--ffn", "2816", "--sequence", "512",
         "--warmup", "1", "--steps", "4"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{cpu_name()}, {cores} cores, hidden 1024, 8 layers, 16 heads (8 for keys and values), 4 × 512 tokens, "
          f"{options.dtype}.\n")
    print("| tp | state of a rank | peak of a rank | work of a rank | exchanged | tokens/s, a core each | of one core × tp |")
    print("| ---: |" + " ---: |" * 6)
    single = None
    for tp in (1, 2, 3, 4, 6, 8, 12, 16):
        command = [options.binary, "bench", "step", *SIZES, "--dtype", options.dtype, "--tp", str(tp), "--threads", str(tp)]
        dry = measure([*command, "--dry"], 1)
        cells = [f"{dry['state_bytes'] / 2**20:,.0f} MiB", f"{dry['peak_bytes'] / 2**20:,.0f} MiB",
                 f"{dry['flops'] / 1e9:,.0f} GFLOP", f"{dry['exchanged_bytes'] / 2**20:,.0f} MiB"]
        if tp <= cores:
            runs = [measure([*command, "--json"], 1)["tokens_per_s"] for _ in range(options.rounds)]
            speed = statistics.median(runs)
            single = single or speed
            cells += [f"{speed:,.0f}", f"{speed / single / tp:.2f}"]
        else:
            cells += ["", ""]
        print(f"| {tp} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
