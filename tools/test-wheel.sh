#!/usr/bin/env bash
# Installs a wheel in a new virtual environment, trains with what was installed, and looks for the model.
#
#     tools/test-wheel.sh [WHEEL]        default: one of the dev profile, built now
set -euo pipefail
wheel=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."
if [ -z "$wheel" ]; then
    # With this feature, which tests have on, cargo finds the libraries that `cargo test --workspace` compiled. `linux`: the wheel
    # stays on this machine, so nobody asks which others it fits.
    PROFILE=dev tools/dist.sh target/test-wheel --compatibility linux --features evenkeel-store/faults
    wheel=$(ls target/test-wheel/*.whl)
fi

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-index "$wheel"
example=$PWD/examples/quickstart.toml
cd "$place"
venv/bin/evenkeel --version
venv/bin/evenkeel train "$example" --steps 2 --batch 2 --set eval.batches=1 --set sample.tokens=4
for file in config.json model.safetensors tokenizer.json; do
    [ -s "runs/quickstart/model/$file" ] || { echo "error: $file is not in the saved model" >&2 && exit 1; }
done
venv/bin/evenkeel generate runs/quickstart/model --prompt "12 + 7 =" --tokens 4
echo "$(basename "$wheel"): installed, trained and generated"
