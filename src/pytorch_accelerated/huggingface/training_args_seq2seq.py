"""The arguments of a `Seq2SeqTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments

__all__ = ["Seq2SeqTrainingArguments"]


@runtime_checkable
class HasValues(Protocol):
    """A `GenerationConfig` of transformers, for one."""

    def to_dict(self) -> dict[str, Any]:
        """All values by name."""
        ...


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """`TrainingArguments`, and how an evaluation generates. `generate` of the model has the defaults."""

    predict_with_generate: bool = field(
        default=False,
        metadata={"help": "Predict the tokens that the model generates, for metrics such as ROUGE and BLEU."},
    )
    generation_max_length: int | None = field(
        default=None,
        metadata={
            "help": "The max_length of an evaluation's generate, where the call gives no max_length or max_new_tokens."
        },
    )
    generation_num_beams: int | None = field(
        default=None,
        metadata={"help": "The num_beams of an evaluation's generate, where the call gives none."},
    )
    generation_config: str | Path | dict[str, Any] | HasValues | None = field(
        default=None,
        metadata={"help": "The model's GenerationConfig: an object, a dict, a path, or a name on the hub."},
    )
