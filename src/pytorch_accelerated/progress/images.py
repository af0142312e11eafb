"""Small pictures of inputs, ready to be put into a page."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch.nn import functional

_MAX_SIDE = 128  # pixels: a dozen of them add some hundred kilobytes to a page
_MIN_SIDE = 4


def looks_like_image(row: torch.Tensor) -> bool:
    """Whether an input can be shown as a picture: channels (1, 3 or 4), height and width; or height and width alone."""
    is_channels_first = row.ndim == 3 and row.shape[0] in (1, 3, 4)
    return (is_channels_first or row.ndim == 2) and min(row.shape[-2:]) >= _MIN_SIDE


def as_data_uri(row: torch.Tensor) -> str:
    """A picture of an input for which `looks_like_image` holds, as the ``src`` of an HTML image.

    Args:
        row: on the CPU; channels, height and width, or height and width.
    """
    pixels = row.detach().to(torch.float32)[None] if row.ndim == 2 else row.detach().to(torch.float32)[:3]
    if max(pixels.shape[1:]) > _MAX_SIDE:
        scale = _MAX_SIDE / max(pixels.shape[1:])
        height, width = (max(1, round(side * scale)) for side in pixels.shape[1:])
        pixels = functional.adaptive_avg_pool2d(pixels, (height, width))
    return "data:image/png;base64," + base64.b64encode(as_png(pixels)).decode("ascii")


def as_png(pixels: torch.Tensor) -> bytes:
    """A PNG file of one channel (grey) or three (red, green, blue), with height and width.

    Values are stretched to the whole range from black to white, because inputs are usually normalised.
    """
    pixels = torch.nan_to_num(pixels, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = pixels.min(), pixels.max()
    return _png(((pixels - low) * (255 / (high - low).clamp(min=1e-12))).round().to(torch.uint8))


def _png(octets: torch.Tensor) -> bytes:
    """A PNG file of one channel (grey) or three (red, green, blue)."""
    channels, height, width = octets.shape
    lines = [b"\0" + line.contiguous().numpy().tobytes() for line in octets.permute(1, 2, 0)]  # 0: not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines), 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
