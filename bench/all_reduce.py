"""All-reduces of f32 in place: Evenkeel's ranks beside gloo and OpenMPI on the same cores, in turns. Prints a Markdown table.

    python bench/all_reduce.py --binary target/release/evenkeel --gloo PYTHON_WITH_TORCH --mpi PYTHON_WITH_MPI4PY

Each round runs all of them, one after the other; the figures are medians over the rounds' medians, as bytes of the
tensor by the time from the call to the end on the slowest rank. A peer whose Python is not given is left out.
"""
import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def cpu_name():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure(command):
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--gloo", help="a Python that has torch")
    parser.add_argument("--mpi", help="a Python that has mpi4py and numpy")
    parser.add_argument("--mpirun", default="mpirun --bind-to core")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()

    sizes = ["--mib", options.mib, "--turns", str(options.turns)]
    ranks = ["--ranks", str(options.ranks)]
    script = str(HERE / "peer_all_reduce.py")
    commands = {"Evenkeel": [options.binary, "bench", "all-reduce", "--json", *ranks, *sizes]}
    if options.gloo:
        commands["gloo"] = [options.gloo, script, "gloo", *ranks, *sizes]
    if options.mpi:
        commands["OpenMPI"] = [*options.mpirun.split(), "-n", str(options.ranks), options.mpi, script, "mpi", *sizes]

    runs = {name: [] for name in commands}
    for round in range(options.rounds):
        for name, command in commands.items():
            runs[name].append(measure(command))
        print(f"round {round + 1} of {options.rounds}", file=sys.stderr, flush=True)

    peers = [name for name in commands if name != "Evenkeel"]
    versions = ", ".join(runs[name][0]["peer"] for name in peers)
    print(f"{datetime.date.today()}, {cpu_name()}, {options.ranks} ranks, {options.rounds} rounds of {4 * options.turns}; "
          f"{versions}.\n")
    print("| size | " + " | ".join(f"{name} GB/s" for name in commands) + " | best round "
          + "".join(f"| ratio to {name} " for name in peers) + "|")
    print("| ---: " * (2 + len(commands) + len(peers)) + "|")
    for i, mib in enumerate(options.mib.split(",")):
        speed = {name: statistics.median(run["sizes"][i]["bytes_per_s"] for run in runs[name]) for name in commands}
        best = " / ".join(f"{max(run['sizes'][i]['bytes_per_s'] for run in runs[name]) / 1e9:.1f}" for name in commands)
        ratios = [f"{speed['Evenkeel'] / speed[peer]:.2f}" for peer in peers]
        print(f"| {mib} MiB | " + " | ".join([*(f"{speed[name] / 1e9:.1f}" for name in commands), best, *ratios]) + " |")


if __name__ == "__main__":
    main()
