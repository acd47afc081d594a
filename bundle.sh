#!/usr/bin/env bash
# Puts the binary, the test programs of device and model, the golden files and a script that runs them in one folder, and
# packs it: what a machine with a GPU and no Rust needs to try this tree.
#
#     ./bundle.sh [FOLDER]        default: target/bundle; FOLDER.tar.xz is made beside it
#
# There, `tar -xJf bundle.tar.xz && bundle/run-gpu-tests.sh` runs everything. PROFILE=dev builds faster and runs slower.
set -euo pipefail
cd "$(dirname "$0")"
folder=${1:-target/bundle}
profile=${PROFILE:-release}
rm -rf "$folder" "$folder.tar.xz"
mkdir -p "$folder/crates/model" "$folder/bin"

for package in device model; do
    mkdir -p "$folder/tests/$package"
    # Without examples, some of which have a test's name.
    cargo test --locked --profile "$profile" -p "evenkeel-$package" --lib --tests --no-run --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | sort -u |
        while read -r program; do
            name=$(basename "$program")
            strip -o "$folder/tests/$package/${name%-*}" "$program"
        done
done
cargo build --locked --profile "$profile" -p evenkeel --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\/evenkeel\)".*/\1/p' | sort -u |
    while read -r program; do strip -o "$folder/bin/evenkeel" "$program"; done

cp -r golden "$folder/golden"
rm -rf "$folder/golden/__pycache__" "$folder/golden/.venv"
cp run-gpu-tests.sh "$folder/"
tar -C "$(dirname "$folder")" -cf - "$(basename "$folder")" | xz -T0 -6 > "$folder.tar.xz"
du -sh "$folder" "$folder.tar.xz"
