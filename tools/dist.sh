#!/usr/bin/env bash
# Builds what is given to people: a wheel, and the binary that is in it.
#
#     tools/dist.sh [FOLDER [MATURIN_OPTION …]]        default: target/dist-out
#
# PROFILE=dev builds faster; the default is the profile `dist` of Cargo.toml. Needs Rust, and Python with venv; maturin is
# installed from PyPI into target/maturin-venv.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/dist-out}
shift $(($# > 0))

tools=target/maturin-venv
if ! [ -x "$tools/bin/maturin" ]; then
    if ! python3 -m venv --clear "$tools"; then
        echo "error: python3 cannot make a virtual environment" >&2
        echo "  hint: apt-get install python3-venv, or the package of your system that has Python's venv and ensurepip" >&2
        exit 1
    fi
    "$tools/bin/pip" install --quiet 'maturin>=1.9.4,<2'
fi

mkdir -p "$folder"
rm -f "$folder"/evenkeel "$folder"/evenkeel-*.whl
"$tools/bin/maturin" build --locked --profile "${PROFILE:-dist}" --out "$folder" "$@"
# pip sets the permission when it installs a wheel; a ZIP file's reader does not.
"$tools/bin/python" - "$folder" <<'PYTHON'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
[wheel] = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    [name] = [name for name in archive.namelist() if name.endswith(".data/scripts/evenkeel")]
    folder.joinpath("evenkeel").write_bytes(archive.read(name))
PYTHON
chmod +x "$folder/evenkeel"
ls -l "$folder"
