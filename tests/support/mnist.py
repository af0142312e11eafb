"""Real handwritten digits in MNIST's file format, without a download."""

import struct
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

NUM_TRAINING_IMAGES = 1500  # of 1797


def write_mnist(root: Path) -> Path:
    """Write scikit-learn's 8x8 digits, enlarged to 24x24 with a border of 2, where torchvision looks for MNIST.

    Returns `root`, ready for ``torchvision.datasets.MNIST(root, download=False)``.
    """
    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    images = np.pad(pixels.repeat(3, axis=1).repeat(3, axis=2), [(0, 0), (2, 2), (2, 2)])
    labels = digits.target.astype(np.uint8)

    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for prefix, part in [("train", slice(NUM_TRAINING_IMAGES)), ("t10k", slice(NUM_TRAINING_IMAGES, None))]:
        _write_idx(folder / f"{prefix}-images-idx3-ubyte", images[part])
        _write_idx(folder / f"{prefix}-labels-idx1-ubyte", labels[part])
    return root


def _write_idx(path: Path, array: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> None:
    unsigned_bytes = 8  # the format's code for the element type
    header = struct.pack(f">HBB{array.ndim}I", 0, unsigned_bytes, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())
