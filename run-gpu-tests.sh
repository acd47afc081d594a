#!/usr/bin/env bash
# Runs the tests of a bundle (see bundle.sh) on this machine's GPU. Arguments choose programs by name; none means all.
# LOGS names a folder for their output.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
logs=${LOGS:-$here/logs}
mkdir -p "$logs"

# Where CUDA's libraries may be: the toolkit's folder, and what pip installs for PyTorch.
for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib; do
    [ -d "$folder" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
done
site=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null) &&
    for folder in "$site"/*/lib; do
        [ -d "$folder" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
    done
export LD_LIBRARY_PATH EVENKEEL_TEST_DEVICE=cuda CARGO_MANIFEST_DIR="$here/crates/model" RUST_BACKTRACE=0

failed=0
# A program and the name of its log.
run() {
    local begin code verdict
    begin=$(date +%s%N)
    (cd "$here/crates/model" && "$1" --test-threads "${THREADS:-8}") > "$logs/$2.log" 2>&1
    code=$?
    verdict=$(grep -E '^test result|^skipped' "$logs/$2.log" | tail -1)
    printf '%-34s %6d ms  rc %d  %s\n' "$2" $((($(date +%s%N) - begin) / 1000000)) $code "$verdict"
    [ $code -eq 0 ] || failed=1
    grep -E '^test .*FAILED' "$logs/$2.log"
}
for program in "$here"/tests/*/*; do
    name=$(basename "$(dirname "$program")")-$(basename "$program")
    if [ $# -gt 0 ] && ! printf '%s\n' "$@" | grep -qx -e "$name" -e "$(basename "$program")"; then continue; fi
    run "$program" "$name"
    # Kernels of aligned rows are others than those of rows that begin anywhere.
    case $name in device-*) EVENKEEL_TEST_ROWS=aligned run "$program" "$name-aligned" ;; esac
done
exit $failed
