#!/usr/bin/env bash
# Puts the binary, the test programs that compute, the golden files and a script that runs them in one folder, and
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

packages="device comm model step train"
# In one command, so that all share the same libraries. Without examples, some of which have a test's name.
cargo test --locked --profile "$profile" -p evenkeel $(printf -- '-p evenkeel-%s ' $packages) --lib --bins --tests --no-run \
    --message-format=json |
    sed -n 's/.*"package_id":"[^"]*[#/]evenkeel\(-[a-z]*\)\?[@#][^"]*".*"executable":"\([^"]*\)".*/evenkeel\1 \2/p' | sort -u |
    while read -r package program; do
        name=$(basename "$program")
        # What never comes near a device only makes it larger.
        case $package/${name%-*} in
            *-device/cuda_sources | *-device/host | *-model/moves | *-model/bad_input) continue ;;
            *-step/simulate | *-step/verify) continue ;;
        esac
        case $package in
            evenkeel) if [ "$name" = evenkeel ]; then strip -o "$folder/bin/evenkeel" "$program"; fi ;;
            *)
                mkdir -p "$folder/tests/${package#evenkeel-}"
                strip -o "$folder/tests/${package#evenkeel-}/${name%-*}" "$program"
                ;;
        esac
    done

cp -r golden "$folder/golden"
rm -rf "$folder/golden/__pycache__" "$folder/golden/.venv"
cp run-gpu-tests.sh "$folder/"
# Programs have most of their code in common, a few megabytes apart.
tar -C "$(dirname "$folder")" -cf - "$(basename "$folder")" | xz --lzma2=preset=2,dict=64MiB > "$folder.tar.xz"
du -sh "$folder" "$folder.tar.xz"
