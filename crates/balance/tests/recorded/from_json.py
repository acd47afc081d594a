"""Turns what `evenkeel bench stragglers --modes off --json` prints into the lines that tests/recorded.rs reads."""

import json
import sys

print("# evenkeel bench stragglers --vit --neighbour --modes off --steps 150 --json | python from_json.py")
print("# phase, then of either rank: attention, MLP, head, stream, late; microseconds")
for step in json.load(sys.stdin)["cases"][0]["modes"][0]["steps"]:
    seconds = []
    for rank in step["observed"]:
        attention, mlp, _, head, stream = rank["compute_s"]
        seconds += [attention, mlp, head, stream, rank["late_s"]]
    print(step["phase"], *(round(1e6 * each) for each in seconds))
