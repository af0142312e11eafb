"""What scripts call when a run is over: tables and files of metrics, the state, a model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytorch_accelerated.huggingface.checkpoints.model_card import CARD_NAME, model_card
from pytorch_accelerated.huggingface.checkpoints.saving import TRAINER_STATE_NAME, write_whole
from pytorch_accelerated.huggingface.engine.flow import TrainerFlow
from pytorch_accelerated.huggingface.evaluation.results import as_table, formatted, save_results


class TrainerResults(TrainerFlow):
    """The part of the trainer that shows and writes what has come of a run."""

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics below each other, as `metrics_format` makes them, on the first process of all.

        Args:
            split: what they are of, for the heading.
            metrics: by name.
        """
        if self.is_world_process_zero():
            self._engine.print(as_table(split, metrics))

    @staticmethod
    def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics as people read them: durations, megabytes and gigaflops as strings, else four decimals."""
        return formatted(metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to ``<split>_results.json`` in ``args.output_dir``; the first process of all writes.

        Args:
            split: what they are of.
            metrics: plain values by name.
            combined: whether to add them to ``all_results.json`` too.

        Raises:
            ArgumentTypeError: if JSON cannot hold a metric.
            CheckpointError: if the disk refuses, or ``all_results.json`` is damaged.
        """
        if self.is_world_process_zero():
            save_results(self._output_dir, split, metrics, combined=combined)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write ``README.md`` in ``args.output_dir``, in the place of one that is there; the first process writes.

        It has the model's class, the arguments that differ from the defaults, the last logged values and the versions,
        and at its top, for the hub, what is given here.

        Args:
            language: of the data, as a code.
            license: as an identifier, "mit" for example.
            tags: to find it by.
            model_name: default: the last part of ``args.output_dir``.
            finetuned_from: the model that it began with.
            tasks: what it is for. With these and a dataset, the metrics of the last evaluation become results.
            dataset_tags: names on the hub of what it was trained on.
            dataset: the same in words.
            dataset_args: its configurations.

        Raises:
            CheckpointError: if the disk refuses.
        """
        if not self.is_world_process_zero():
            return
        card = model_card(
            self.model,
            self.args,
            self.state.log_history,
            name=model_name,
            tasks=tasks,
            datasets=dataset,
            dataset_tags=dataset_tags,
            dataset_args=dataset_args,
            language=language,
            license=license,
            tags=[tags] if isinstance(tags, str) else tags,
            base_model=finetuned_from,
        )
        write_whole(self._output_dir / CARD_NAME, [card.encode()])

    def save_state(self) -> None:
        """Write `state` to ``trainer_state.json`` in ``args.output_dir``; the first process of all writes."""
        if self.is_world_process_zero():
            write_whole(self._output_dir / TRAINER_STATE_NAME, [self.state.to_json().encode()])
