"""Label smoothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class LabelSmoother:
    """Computes a cross-entropy with smoothed labels, as the mean over labels other than `ignore_index`.

    The share `epsilon` of each label is distributed equally over all classes.
    """

    epsilon: float = 0.1
    ignore_index: int = -100

    def __call__(self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False) -> torch.Tensor:
        """The loss. With `shift_labels`, the logits of a position predict the label of the next one.

        Args:
            model_output: a mapping with "logits", or a tuple that begins with them; the last dimension are classes.
            labels: of the same shape without the last dimension.
        """
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            ignore_index=self.ignore_index,
            label_smoothing=self.epsilon,
        )
