"""What a batch looks like: shapes, types, ranges, and pictures where it has some."""

from __future__ import annotations

import base64
import html
import io
import math
from typing import Any, NamedTuple

import torch

from pytorch_accelerated.errors import MissingDependencyError
from pytorch_accelerated.optional import require
from pytorch_accelerated.tracking.loss import widest_float
from pytorch_accelerated.trees import leaves_by_path, tensors_in

_LONGEST_TEXT = 40  # characters of an entry that is not a tensor
_PICTURES = 8
_SMALLEST_PICTURE, _LARGEST_PICTURE = 8, 512  # pixels of a side


class EntryFacts(NamedTuple):
    """One tensor or other value of a batch.

    Attributes:
        name: its place in the batch, such as ``[0]`` or ``['labels']``; empty if the batch is a single tensor.
        shape: the shape of a tensor, else None.
        kind: the dtype of a tensor, else the name of the class.
        value: the range of a tensor, or the value, as text.
        missing: the share of a tensor's entries that are NaN.
    """

    name: str
    shape: tuple[int, ...] | None
    kind: str
    value: str
    missing: float

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, type, shape, and values with the share of NaN, as texts."""
        missing = f" ({self.missing:.1%} NaN)" if self.missing else ""
        return self.name or "batch", self.kind, "" if self.shape is None else _shape(self.shape), self.value + missing


class BatchFacts(NamedTuple):
    """What the first batch of this rank looks like.

    Attributes:
        entries: its tensors and other values.
        picture: the first images of the batch side by side, as a PNG; None if there are none.
    """

    entries: tuple[EntryFacts, ...]
    picture: bytes | None = None

    def __str__(self) -> str:
        columns = list(zip(*(entry.cells for entry in self.entries), strict=True))
        widths = [max(map(len, column)) for column in columns]
        rows = zip(*columns, strict=True)
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def _repr_html_(self) -> str:
        heads = "".join(f"<th style='text-align:left'>{head}</th>" for head in ("entry", "type", "shape", "values"))
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in entry.cells)}</tr>" for entry in self.entries
        )
        image = ""
        if self.picture is not None:
            data = base64.b64encode(self.picture).decode()
            image = f"<img alt='images of the first batch' src='data:image/png;base64,{data}'>"
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{image}"


def facts_of(batch: Any) -> BatchFacts:
    """The facts of a batch. Waits for the device."""
    pictures = map(_picture, tensors_in(batch))
    entries = tuple(_facts(path, leaf) for path, leaf in leaves_by_path(batch).items())
    return BatchFacts(entries, next(filter(None, pictures), None))


def _facts(name: str, value: Any) -> EntryFacts:
    if not isinstance(value, torch.Tensor):
        text = repr(value)
        return EntryFacts(name, None, type(value).__name__, text[:_LONGEST_TEXT] + "…" * (len(text) > _LONGEST_TEXT), 0)
    kind = str(value.dtype).removeprefix("torch.")
    shape = tuple(value.shape)
    if value.numel() == 0 or value.is_complex():
        return EntryFacts(name, shape, kind, "", 0)
    wide = widest_float(value.device) if value.is_floating_point() else torch.int64
    numbers = value.detach().to(wide)
    is_missing = torch.isnan(numbers)
    known = numbers[~is_missing]
    return EntryFacts(name, shape, kind, _range(known), is_missing.float().mean().item())


def _range(numbers: torch.Tensor) -> str:
    if numbers.numel() == 0:
        return ""
    if not numbers.is_floating_point():
        return f"{numbers.min().item()} to {numbers.max().item()}"
    text = f"{numbers.min().item():.4g} to {numbers.max().item():.4g}"
    mean = numbers.mean().item()
    return f"{text}, mean {mean:.4g}" if math.isfinite(mean) else text


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _picture(images: torch.Tensor) -> bytes | None:
    """The first of `images` in a row, if they are images (N x C x H x W, or N x H x W x C) and matplotlib is there."""
    pixels = _pixels(images)
    if pixels is None:
        return None
    try:
        image = require("matplotlib.image", extra="plot", needed_by="The picture of a batch")
    except MissingDependencyError:
        return None
    separated = torch.nn.functional.pad(pixels, (0, 0, 0, 2), value=1.0)  # two white columns behind each
    row = torch.cat(list(separated), dim=1)[:, :-2]
    if row.shape[2] == 1:
        row = row.expand(-1, -1, 3)
    scale = max(1, 64 // row.shape[0])
    enlarged = row.repeat_interleave(scale, dim=0).repeat_interleave(scale, dim=1)
    file = io.BytesIO()
    image.imsave(file, enlarged.numpy(), format="png")
    return file.getvalue()


def _pixels(images: torch.Tensor) -> torch.Tensor | None:
    """The first images as N x H x W x C between 0 and 1; None if `images` are not images."""
    if images.ndim != 4 or not (images.is_floating_point() or images.dtype == torch.uint8) or not len(images):
        return None
    if images.shape[1] in (1, 3):
        images = images.permute(0, 2, 3, 1)
    elif images.shape[3] not in (1, 3):
        return None
    if any(not _SMALLEST_PICTURE <= side <= _LARGEST_PICTURE for side in images.shape[1:3]):
        return None
    pixels = images[:_PICTURES].detach().float().cpu().nan_to_num()
    least, most = pixels.min(), pixels.max()
    return (pixels - least) / (most - least).clamp(min=torch.finfo(torch.float32).tiny)
