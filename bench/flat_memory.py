"""Whether memory stays flat over a large file: trains on a JSONL file of the given size and prints the process's memory.

    python bench/flat_memory.py --binary target/release/evenkeel [--gigabytes 2]

The model is tiny and of each record only the beginning is trained on, so the run goes through the whole file in minutes.
"""
import argparse
import json
import subprocess
import tempfile
from pathlib import Path

CONFIG = """
[model]
hidden = 16
layers = 1
heads = 1
ffn = 16
tied = true
[data]
source = "jsonl"
paths = ["{data}"]
sequence = 128
packing = false
workers = 2
[train]
epochs = 1
batch = 512
lr = 1e-3
[output]
folder = "{folder}/run"
checkpoint_every = 0
save_model = false
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--gigabytes", type=float, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        line = json.dumps({"text": "The keel stays even while the wind turns. " * 100}) + "\n"
        with data.open("w") as file:
            for _ in range(int(options.gigabytes * 1e9 / len(line))):
                file.write(line)
        config = Path(folder) / "run.toml"
        config.write_text(CONFIG.format(data=data, folder=folder))
        subprocess.run([options.binary, "train", str(config)], check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        for at in (9, len(steps) // 4, len(steps) // 2, 3 * len(steps) // 4, len(steps) - 1):
            step = steps[at]
            print(f"step {step['step']:6}  {step['tokens'] / 1e6:8.0f} M tokens  {step['memory_bytes'] / 2**20:7.1f} MiB")


if __name__ == "__main__":
    main()
