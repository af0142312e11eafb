"""A loss with smoothed labels: `label_smoothing_factor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from pytorch_accelerated.huggingface.trainer_utils import warn


@dataclasses.dataclass(frozen=True)
class LabelSmoother:
    """Computes a cross-entropy with smoothed labels, as the mean over labels other than `ignore_index`.

    The share `epsilon` of each label is distributed equally over all classes.
    """

    epsilon: float = 0.1
    ignore_index: int = -100

    def __call__(
        self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss. With `shift_labels`, the logits of a position predict the label of the next one.

        Args:
            model_output: a mapping with "logits", or a tuple that begins with them; the last dimension are classes.
            labels: of the same shape without the last dimension.
            shift_labels: see above.
            num_items_in_batch: to divide the sum by, instead of the number of labels that count.
        """
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            ignore_index=self.ignore_index,
            label_smoothing=self.epsilon,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def label_smoother(epsilon: float, model: Any) -> LabelSmoother | None:
    """The smoother for `model`; with a warning, none for labels of several classes."""
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        warn(
            f"`label_smoothing_factor` is {epsilon}, but labels of multi-label classification cannot be smoothed: they "
            "stay as they are. Set it to 0, or smooth them in a `compute_loss_func`."
        )
        return None
    return LabelSmoother(epsilon)
