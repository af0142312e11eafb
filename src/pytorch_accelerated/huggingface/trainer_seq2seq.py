"""A trainer whose evaluations may generate, for translations, summaries and the like, and its arguments.

Annotations are read when the program runs, so they aren't postponed.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.huggingface.arguments.argument import A_GENERATION_CONFIG, AT_LEAST_1, argument
from pytorch_accelerated.huggingface.evaluating import labels_in
from pytorch_accelerated.huggingface.events import is_ours
from pytorch_accelerated.huggingface.trainer import Trainer
from pytorch_accelerated.huggingface.trainer_utils import PredictionOutput
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from pytorch_accelerated.prediction.padded import PADDING
from pytorch_accelerated.ranks.sharding import has_shards
from pytorch_accelerated.ranks.wrappers import bare_model


@runtime_checkable
class HasValues(Protocol):
    """A `GenerationConfig` of transformers, for example."""

    def to_dict(self) -> dict[str, Any]:
        """All values by name."""
        ...


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """`TrainingArguments`, and how an evaluation generates. Defaults as in the model's `generate`."""

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


class Seq2SeqTrainer(Trainer):
    """A `Trainer` whose predictions are generated, if its arguments have ``predict_with_generate=True``.

    It has the parameters of `Trainer`; `args` are `Seq2SeqTrainingArguments`. Predictions are rows of tokens. Shorter
    ones are padded with the padding token of the generation config, the tokenizer or the model; rows of labels with
    -100, as usual. The loss is computed from the labels, as without generating.

    Raises:
        ConfigurationError: if the model cannot generate.
    """

    args: Seq2SeqTrainingArguments
    _gen_kwargs: Mapping[str, Any] = MappingProxyType({})  # scripts set it before they call `evaluation_loop`

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does.

        `gen_kwargs` are for the model's `generate`, for example ``max_new_tokens`` and ``num_beams``; default: as the
        arguments say.
        """
        with self._generating_with(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict as `Trainer.predict` does, with the same `gen_kwargs` as `evaluate`."""
        with self._generating_with(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, generated tokens and labels of one batch; without ``predict_with_generate``, as in `Trainer`.

        With `prediction_loss_only`, nothing is generated. `gen_kwargs` replace the evaluation's.
        """
        if prediction_loss_only or not self.args.predict_with_generate:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        loss = labels = None
        if labels_in(inputs, self.label_names) is not None:  # a decoder has no input without them
            loss, _, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        arguments = self._arguments_of_generate(gen_kwargs)
        module = _generation()
        padding = module.padding_token(self.model, self.processing_class, arguments)
        with torch.no_grad():
            tokens = module.generated_tokens(self.model, inputs, self.label_names, arguments, padding)
        return loss, tokens, labels

    @property
    def prediction_padding(self) -> int:
        """The value that shorter rows of predictions are padded with, the padding token for generated ones."""
        if not self.args.predict_with_generate:
            return PADDING
        arguments = self._arguments_of_generate({})
        return int(_generation().padding_token(self.model, self.processing_class, arguments))

    def _make_model_ready(self) -> None:
        generates = self.args.predict_with_generate and is_ours(self.prediction_step)
        if generates and not callable(getattr(self.model, "generate", None)):
            raise ConfigurationError(
                f"`predict_with_generate` is True, but {type(self.model).__name__} has no method `generate`. Set it to "
                "False, or override `prediction_step`."
            )
        if self.args.generation_config is not None:
            bare_model(self.model).generation_config = _generation().load_generation_config(self.args.generation_config)
        super()._make_model_ready()
        if has_shards(self.model):
            from torch.distributed.fsdp import register_fsdp_forward_method

            # It calls the encoder before the model, so it must gather the parameters itself.
            register_fsdp_forward_method(self.model, "generate")

    @contextlib.contextmanager
    def _generating_with(self, gen_kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Use these arguments of `generate` too. Evaluations may be nested, for multiple datasets."""
        before = self._gen_kwargs
        self._gen_kwargs = {**before, **gen_kwargs}
        try:
            yield
        finally:
            self._gen_kwargs = before

    def _arguments_of_generate(self, gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {**self._gen_kwargs, **gen_kwargs}
        defaults = {"num_beams": self.args.generation_num_beams}
        if arguments.get("max_new_tokens") is None:
            defaults["max_length"] = self.args.generation_max_length
        for name, default in defaults.items():
            value = default if arguments.get(name) is None else arguments[name]
            arguments.pop(name, None)
            if value is not None:
                arguments[name] = value
        if self.args.world_size > 1 and has_shards(self.model):
            arguments.setdefault("synced_gpus", True)  # a rank that is done must continue: the others need its shard
        return arguments


def _generation() -> Any:
    return require("pytorch_accelerated.extras.huggingface.generation", needed_by="`predict_with_generate`")
