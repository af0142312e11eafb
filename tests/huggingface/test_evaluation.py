"""Evaluation and prediction: every row once and in order, whatever the sizes, with the numbers of one big batch."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from pytorch_accelerated.huggingface import EvalPrediction, PredictionOutput, Trainer
from tests.huggingface.runs import Lengths, Regression, Rows, make_trainer, padded, without_speed
from tests.huggingface.test_against_transformers import run
from tests.support import batch_shapes
from tests.support.reference import SINGLE, TOLERANCE, assert_same_numbers


def expected(size: int) -> tuple[torch.Tensor, float]:
    """Outputs and loss of the first rows, as one batch."""
    rows = Rows(size)
    with torch.no_grad():
        loss, outputs = Regression()(rows.x, rows.labels)
    return outputs, loss.item()


@pytest.mark.parametrize(("size", "batch_size"), [(1, 3), (5, 5), (7, 1), (7, 3), (7, 8)])
def test_predictions_and_loss_are_those_of_one_batch(size: int, batch_size: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=batch_size)
    outputs, loss = expected(size)
    result = trainer.predict(Rows(size))
    assert isinstance(result, PredictionOutput)
    assert_same_numbers(result.predictions, outputs, tolerance=SINGLE)
    np.testing.assert_array_equal(result.label_ids, Rows(size).labels.numpy())
    assert result.metrics is not None
    assert result.metrics["test_loss"] == pytest.approx(loss)
    assert trainer.evaluate(Rows(size))["eval_loss"] == pytest.approx(loss)


class OfGraphs(nn.Module):
    """A model of batches that have the nodes of all graphs below each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = batch_shapes.OfGraphs()

    def forward(self, nodes: torch.Tensor, graph: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.inner(nodes, graph)
        return {"loss": nn.functional.mse_loss(outputs, targets), "logits": outputs}


def test_rows_are_counted_where_the_first_tensor_has_no_row_for_each(tmp_path: Path) -> None:
    arguments: Any = {"per_device_eval_batch_size": 4, "label_names": ["targets"], "remove_unused_columns": False}
    parts = {"model": OfGraphs(), "data_collator": batch_shapes.graphs}
    trainer = make_trainer(tmp_path, parts=parts, **arguments)
    output = trainer.predict(batch_shapes.Samples())
    native = batch_shapes.trainer_of("graphs")
    assert output.metrics is not None
    assert output.metrics["test_loss"] == pytest.approx(batch_shapes.mean_loss(native, "graphs"), rel=TOLERANCE)
    assert_same_numbers(output.predictions, torch.stack(batch_shapes.predictions(native, "graphs")))


def test_rows_that_the_collator_leaves_out_do_not_count(tmp_path: Path) -> None:
    def without_small(rows: list[dict[str, torch.Tensor]]) -> Any:
        return default_collate([row for row in rows if row["x"][0] > -0.5])

    rows, parts = Rows(13), {"data_collator": without_small}
    trainer = make_trainer(tmp_path, parts=parts, per_device_eval_batch_size=5)
    left = rows.x[:, 0] > -0.5
    with torch.no_grad():
        loss, _ = Regression()(rows.x[left], rows.labels[left])
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(loss.item())


def test_metrics_are_computed_from_all_rows(tmp_path: Path) -> None:
    def metrics(prediction: EvalPrediction) -> dict[str, Any]:
        outputs, labels = prediction
        assert type(outputs) is type(labels) is np.ndarray
        return {"mse": ((outputs - labels) ** 2).mean(), "eval_rows": torch.tensor(len(labels)), "list": np.arange(2)}

    trainer = make_trainer(tmp_path, parts={"compute_metrics": metrics}, per_device_eval_batch_size=2)
    result = trainer.evaluate()
    assert result["eval_mse"] == pytest.approx(result["eval_loss"]) == pytest.approx(expected(5)[1])
    assert {name: result[name] for name in ("eval_rows", "eval_list")} == {"eval_rows": 5, "eval_list": [0, 1]}
    assert type(result["eval_mse"]) is float
    assert type(result["eval_rows"]) is int
    assert {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch"} <= result.keys()


class Watching(Trainer):
    """Notes whether the loss alone is asked for, and the first number of each row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[bool] = []
        self.seen: list[float] = []

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self.asked.append(prediction_loss_only)
        self.seen += inputs["x"][:, 0].tolist()
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


def test_only_the_loss_is_kept_if_nothing_else_is_needed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=Watching)
    trainer.evaluate()
    trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
    trainer.evaluate()
    assert trainer.asked == [True, False]  # type: ignore[attr-defined]


class Nested(nn.Module):
    """Returns outputs in all kinds of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Regression().linear

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.linear(x)
        result = {"logits": outputs, "hidden": ({"twice": 2 * x}, [x, None]), "nothing": None, "extra": x.sum(1)}
        return result if labels is None else {"loss": ((outputs - labels) ** 2).mean(), **result}


@pytest.mark.parametrize("joins", [True, False])
def test_nested_outputs_keep_their_structure_without_what_is_none(joins: bool, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, parts={"model": Nested()}, per_device_eval_batch_size=2, eval_do_concat_batches=joins
    )
    logits, (twice, hidden), extra = trainer.predict(Rows(5), ignore_keys=["unknown"]).predictions
    x = Rows(5).x.numpy()
    for found, rows in ((logits, expected(5)[0].numpy()), (twice["twice"], 2 * x), (hidden[0], x), (extra, x.sum(1))):
        assert joins or [len(batch) for batch in found] == [2, 2, 1]
        assert_same_numbers(found if joins else np.concatenate(found), rows, tolerance=SINGLE)
    assert len(hidden) == 1
    assert len(trainer.predict(Rows(3), ignore_keys=["hidden", "extra"]).predictions) == (3 if joins else 2)


class Pairs(nn.Module):
    """Compares two columns, and returns the loss of that by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        left, right = self.linear(x), self.linear(y)
        return {"loss": ((left - right) ** 2).mean(), "left": left, "right": right}


class TwoLabels(Regression):
    """Rows have labels for it if they have both."""

    def forward(self, x: torch.Tensor, labels: Any = None, label_weight: Any = None) -> Any:
        outputs = self.linear(x)
        if labels is None or label_weight is None:
            return {"logits": outputs}
        return {"loss": (((outputs - labels) ** 2) * label_weight).mean(), "logits": outputs}


class NamesItsInput(Regression):
    main_input_name = "x"


def signs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Smaller than what they are made of, batch by batch."""
    assert len(logits) == len(labels) == 2
    return logits > 0


LABELLED = [Rows(6)[index] for index in range(6)]
WEIGHTED = [{**row, "label_weight": torch.ones(1) * index} for index, row in enumerate(LABELLED)]
COMPARED = [{"x": row["x"], "y": 2 * row["x"]} for row in LABELLED]
RAGGED = [{"x": torch.full((size,), 1.0 + size), "labels": torch.full((size,), 2.0)} for size in (3, 1, 2, 6, 4, 5)]
# The model, its rows, and other parts and arguments of the trainer.
SEEN: dict[str, tuple[type[nn.Module], list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "both labels": (TwoLabels, WEIGHTED, {}, {}),
    "one of two labels": (TwoLabels, LABELLED, {}, {}),
    "rows of differing length": (Lengths, RAGGED, {"data_collator": padded}, {}),
    "inputs and losses": (NamesItsInput, LABELLED, {}, {"include_for_metrics": ["inputs", "loss"]}),
    "smaller logits": (Regression, LABELLED, {"preprocess_logits_for_metrics": signs}, {}),
    "the loss alone": (Regression, LABELLED, {}, {"prediction_loss_only": True}),
    "batch by batch": (Regression, LABELLED, {}, {"batch_eval_metrics": True}),
    "without labels": (Pairs, COMPARED, {}, {}),
    "a list of batches": (Regression, LABELLED, {}, {"eval_do_concat_batches": False}),
    "without labels, batch by batch": (Pairs, COMPARED, {}, {"batch_eval_metrics": True}),
}


@pytest.mark.filterwarnings("ignore:`compute_metrics` was not called")  # where a label is missing
@pytest.mark.parametrize("name", SEEN)
def test_metrics_and_callers_get_what_they_get_from_transformers(name: str, tmp_path: Path) -> None:
    model, rows, parts, arguments = SEEN[name]

    def results(library: str) -> tuple[Any, ...]:
        seen: list[Any] = []
        kinds: list[Any] = []

        def metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
            seen.append(([*prediction], compute_result))
            kinds.append(type(prediction.label_ids))
            return {"calls": len(seen)} if compute_result else {}

        own_parts = {"model": model(), "eval_dataset": rows, "compute_metrics": metrics, **parts}
        trainer = run(
            library, tmp_path / library, parts=own_parts, trains=False, per_device_eval_batch_size=2, **arguments
        )
        evaluated = without_speed([trainer.evaluate()])
        predictions, labels, metrics_of_prediction = trainer.predict(rows)
        numbers = [predictions, labels, seen, evaluated, without_speed([metrics_of_prediction])]
        numbers.append(trainer.predict(rows, ignore_keys=["left"]).predictions)
        kept = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
        return [*numbers, kept.predictions, kept.label_ids], kinds, trainer.label_names

    (ours, *our_kinds), (theirs, *their_kinds) = results("ours"), results("theirs")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert our_kinds == their_kinds


def test_the_mode_of_the_model_tells_an_evaluation_from_training_until_the_next_step(tmp_path: Path) -> None:
    """As in transformers: subclasses tell the logs of both apart by it."""

    def watched(base: Any) -> Any:
        class Watched(base):  # type: ignore[misc]  # of either library
            modes: list[Any] = []

            def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
                self.modes.append(("loss", model.training))
                return super().compute_loss(model, *args, **kwargs)

            def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
                self.modes.append((sorted(logs)[0], self.model.training))
                super().log(logs, *args, **kwargs)

            def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
                self.modes.append(("save", self.model.training))
                super()._save_checkpoint(*args, **kwargs)

        return Watched

    import transformers

    arguments: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}
    seen = []
    for library, base in (("ours", Trainer), ("theirs", transformers.Trainer)):
        model = Regression(dropout=0.5).eval()
        trainer = run(library, tmp_path / library, kind=watched(base), parts={"model": model}, **arguments)
        assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
        trainer.train()
        seen.append([*trainer.modes, trainer.model.training])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("arguments", [{}, {"label_names": []}, {"batch_eval_metrics": True}])
def test_metrics_that_miss_their_labels_are_pointed_out_once(arguments: dict[str, Any], tmp_path: Path) -> None:
    def metrics(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        raise AssertionError("there is nothing to compute")

    rows = [{"x": row["x"], "target": row["labels"]} for row in (Rows(5)[index] for index in range(5))]
    parts = {"eval_dataset": rows, "compute_metrics": metrics}
    trainer = make_trainer(tmp_path, parts=parts, **arguments)
    trainer.predict(rows)  # without labels, as is usual
    with pytest.warns(UserWarning, match="`compute_metrics` was not called.*no predictions or no labels") as caught:
        assert not any("eval_loss" in trainer.evaluate() for _ in range(2))
    assert len(caught) == 1
    assert make_trainer(tmp_path, parts=parts, **arguments, prediction_loss_only=True).evaluate()


PERSISTENT: dict[str, Any] = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


class Constant(Rows):
    """Rows whose loss says which dataset they are of."""

    def __init__(self, label: float, size: int = 3) -> None:
        super().__init__(size)
        self.x.zero_()
        self.labels.fill_(label)


class Biased(Regression):
    """Returns its labels as its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x)[0]
        return (outputs,) if labels is None else (labels.mean() + 0 * outputs.sum(), outputs)


class RowsOfWorkers(Rows):
    """Rows that hold the process that fetched them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "x": torch.full((2,), float(os.getpid()))}


def test_the_given_dataset_is_evaluated(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"model": Biased(), "eval_dataset": Constant(0.5)}, **PERSISTENT)
    for label in range(1, 13):  # each set is gone when the next one is made, which may get its address
        assert trainer.evaluate(Constant(label))["eval_loss"] == label
    assert trainer.evaluate()["eval_loss"] == 0.5
    trainer.eval_dataset = Constant(7)
    assert trainer.evaluate()["eval_loss"] == 7
    for label in (1, 2):
        trainer.eval_dataset = {"one": Constant(label)}
        assert trainer.evaluate()["eval_one_loss"] == label


def test_the_workers_of_evaluations_stay_during_a_training(tmp_path: Path) -> None:
    pools = []
    for stays in (False, True):
        trainer = make_trainer(
            tmp_path,
            kind=Watching,
            parts={"eval_dataset": RowsOfWorkers(3)},
            **{**PERSISTENT, "dataloader_persistent_workers": stays},
            eval_strategy="epoch",
            num_train_epochs=3,
        )
        trainer.train()
        seen = trainer.seen  # type: ignore[attr-defined]
        assert len(seen) == 9
        pools.append(len(set(seen)))
        assert not {child.pid for child in multiprocessing.active_children()}.intersection(seen)
    assert pools == [3, 1]
