"""The arguments of a `Seq2SeqTrainer`. Annotations are read when the program runs, so they aren't postponed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pytorch_accelerated.huggingface.arguments.argument import A_GENERATION_CONFIG, AT_LEAST_1, argument
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments

__all__ = ["Seq2SeqTrainingArguments"]


@runtime_checkable
class HasValues(Protocol):
    """A `GenerationConfig` of transformers, for example."""

    def to_dict(self) -> dict[str, Any]:
        """All values by name."""
        ...


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """`TrainingArguments`, and how an evaluation generates. The defaults are those of the model's `generate`."""

    predict_with_generate: bool = argument(
        False, "Predict the tokens that the model generates, for metrics such as ROUGE and BLEU."
    )
    generation_max_length: int | None = argument(
        None,
        "The max_length of an evaluation's generate, where the call gives no max_length or max_new_tokens.",
        limit=AT_LEAST_1,
    )
    generation_num_beams: int | None = argument(
        None, "The num_beams of an evaluation's generate, where the call gives none.", limit=AT_LEAST_1
    )
    generation_config: str | Path | dict[str, Any] | HasValues | None = argument(
        None, "The model's GenerationConfig: an object, a dict, a path, or a name on the hub.", kind=A_GENERATION_CONFIG
    )
