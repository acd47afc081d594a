#!/usr/bin/env bash
# Runs the tests of a bundle (see bundle.sh) on this machine's GPU. Arguments choose programs by name; none means all.
# LOGS names a folder for their output, LIMIT_S how long a program may take, JOBS how many run at a time.
# `run-gpu-tests.sh -- COMMAND …` runs a command with the same libraries instead.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
logs=${LOGS:-$here/logs}

# Where CUDA's libraries may be: what pip installs for PyTorch, and the toolkit's folder. Of two cuDNN, pip's is the newer one
# on machines seen so far; it is asked for as `libcudnn.so`, a name that pip's package lacks.
site=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
if [ -n "$site" ] && [ -e "$site/cudnn/lib/libcudnn.so.9" ]; then
    mkdir -p "$here/lib"
    ln -sf "$site/cudnn/lib/libcudnn.so.9" "$here/lib/libcudnn.so"
    LD_LIBRARY_PATH="$here/lib:$site/cudnn/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib ${site:+"$site"/*/lib}; do
    [ -d "$folder" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
done
export LD_LIBRARY_PATH EVENKEEL_TEST_DEVICE=cuda CARGO_MANIFEST_DIR="$here/crates/model" RUST_BACKTRACE=0

if [ "${1:-}" = -- ]; then
    shift
    exec "$@"
fi

# NCCL refuses two ranks on one card, unless they seem to be on two machines: each test rank gets a copy of the library, which is
# told so. They talk over the loopback device.
copy_nccl() {
    local library copy
    library=$(for folder in ${LD_LIBRARY_PATH//:/ }; do ls "$folder/libnccl.so.2" 2>/dev/null; done | head -1)
    [ -n "$library" ] || library=$(/sbin/ldconfig -p | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -1)
    [ -n "$library" ] || { echo "skipped: no libnccl.so.2 in LD_LIBRARY_PATH" && return 1; }
    mkdir -p "$here/nccl"
    for copy in 0 1 2 3; do [ -e "$here/nccl/libnccl.so.$copy" ] || cp "$library" "$here/nccl/libnccl.so.$copy"; done
}

mkdir -p "$logs"
failed=$(mktemp)
# A program and the name of its log.
run() {
    while [ "$(jobs -r | wc -l)" -ge "${JOBS:-1}" ]; do wait -n; done
    run_program "$@" &
}
run_program() {
    local begin code verdict
    begin=$(date +%s%N)
    (cd "$here/crates/model" && timeout "${LIMIT_S:-600}" "$1" --test-threads "${THREADS:-8}") > "$logs/$2.log" 2>&1
    code=$?
    verdict=$(grep -E '^test result|^skipped' "$logs/$2.log" | tail -1)
    printf '%-34s %6d ms  rc %d  %s\n' "$2" $((($(date +%s%N) - begin) / 1000000)) $code "$verdict"
    [ $code -eq 0 ] || echo "$2" >> "$failed"
    grep -E '^test .*FAILED' "$logs/$2.log"
}
# The name of a program with its crate, and the arguments of the script.
is_wanted() {
    local name=$1
    shift
    [ $# -eq 0 ] || printf '%s\n' "$@" | grep -qx -e "$name" -e "${name#*-}"
}
for program in "$here"/tests/*/*; do
    name=$(basename "$(dirname "$program")")-$(basename "$program")
    is_wanted "$name" "$@" || continue
    run "$program" "$name"
    # Kernels of aligned rows are others than those of rows that begin anywhere.
    case $name in device-*) EVENKEEL_TEST_ROWS=aligned run "$program" "$name-aligned" ;; esac
    # Ranks with parts of the card, equal and unequal.
    case $name in
        train-graph | *-tensor_parallel)
            EVENKEEL_TEST_PARTS=24,24,24,24 run "$program" "$name-on-equal-parts"
            EVENKEEL_TEST_PARTS=40,40,24,16 run "$program" "$name-on-unequal-parts"
            ;;
    esac
done
wait
# Ranks on one card share its hardware queues, where a kernel of NCCL that waits for another rank holds up whatever is behind it:
# as many queues as there can be, and one program at a time.
for program in "$here"/tests/*/*; do
    name=$(basename "$(dirname "$program")")-$(basename "$program")
    is_wanted "$name" "$@" || continue
    case $name in
        *-nccl | *-over_nccl | comm-collectives | comm-faults | comm-groups)
            copy_nccl && CUDA_DEVICE_MAX_CONNECTIONS=32 EVENKEEL_TEST_NCCL="$here/nccl" NCCL_SOCKET_IFNAME=lo NCCL_RAS_ENABLE=0 \
                THREADS=1 run_program "$program" "$name-over-nccl"
            ;;
    esac
done
[ ! -s "$failed" ]
