"""Evaluation and prediction: every row once and in order, whatever the sizes, with the numbers of one big batch."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated.errors import DataError, HookOutputError
from pytorch_accelerated.huggingface import EvalLoopOutput, EvalPrediction, PredictionOutput, Trainer
from pytorch_accelerated.prediction.padded import PaddedRows
from tests.huggingface.runs import Recorder, Regression, Rows, Stream, make_trainer
from tests.support.reference import SINGLE, assert_same_numbers


def expected(size: int) -> tuple[torch.Tensor, float]:
    """Outputs and loss of the first rows, as one batch."""
    rows = Rows(size)
    with torch.no_grad():
        loss, outputs = Regression()(rows.x, rows.labels)
    return outputs, loss.item()


@pytest.mark.fact(
    "Evaluation: Every row counts once, in order, even if sizes do not divide evenly; the loss is the mean over rows"
)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [1, 5, 7])
def test_predictions_and_loss_are_those_of_one_batch(size: int, batch_size: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=batch_size)
    outputs, loss = expected(size)
    result = trainer.predict(Rows(size))
    assert isinstance(result, PredictionOutput)
    assert isinstance(result.predictions, np.ndarray)
    assert_same_numbers(result.predictions, outputs, tolerance=SINGLE)
    np.testing.assert_array_equal(result.label_ids, Rows(size).labels.numpy())
    assert result.metrics is not None
    assert result.metrics["test_loss"] == pytest.approx(loss)
    assert trainer.evaluate(Rows(size))["eval_loss"] == pytest.approx(loss)


@pytest.mark.fact("Evaluation: evaluation_loop returns an EvalLoopOutput with num_samples and logs nothing")
@pytest.mark.parametrize("dataset", [Rows(7), Stream(7)], ids=["rows", "stream"])
def test_the_evaluation_loop_returns_everything(dataset: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=3)
    output = trainer.evaluation_loop(trainer.get_test_dataloader(dataset), "Mine", metric_key_prefix="my")
    assert isinstance(output, EvalLoopOutput)
    assert output.num_samples == 7
    assert output.metrics is not None
    assert list(output.metrics) == ["my_loss"]
    assert output.metrics["my_loss"] == pytest.approx(expected(7)[1])
    assert_same_numbers(output.predictions, expected(7)[0], tolerance=SINGLE)
    assert trainer.state.log_history == []


def test_a_row_whose_labels_are_all_padding_is_gathered_like_any_other(tmp_path: Path) -> None:
    labels = torch.tensor([[-100, -100], [-100, 3]])
    assert torch.equal(make_trainer(tmp_path)._nested_gather(labels), labels)


@pytest.mark.fact(
    "Evaluation: compute_metrics receives numpy arrays; its keys get the prefix if missing, its values become plain "
    "numbers"
)
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


@pytest.mark.fact("Logging: eval_model_preparation_time is logged if no training has prepared the model")
def test_the_preparation_time_is_that_of_an_evaluation_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert "eval_model_preparation_time" in trainer.evaluate()
    trainer.train()
    assert "eval_model_preparation_time" not in trainer.evaluate()


@pytest.mark.fact("Evaluation: evaluate without compute_metrics gathers only the loss")
@pytest.mark.fact("Evaluation: prediction_loss_only keeps no predictions and computes no metrics")
def test_only_the_loss_is_kept_if_nothing_else_is_needed(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watching(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            seen.append(prediction_loss_only)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    trainer = make_trainer(tmp_path, kind=Watching)
    trainer.evaluate()
    trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
    trainer.evaluate()
    trainer.args.prediction_loss_only = True
    assert "eval_rows" not in trainer.evaluate()
    output = trainer.predict(Rows(3))
    assert (output.predictions, output.label_ids) == (None, None)
    assert output.metrics is not None
    assert "test_loss" in output.metrics
    assert seen == [True, False, True, True]


class Nested(nn.Module):
    """Returns outputs in all kinds of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Regression().linear

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.linear(x)
        result = {"logits": outputs, "hidden": ({"twice": 2 * x}, [x, None]), "nothing": None, "extra": x.sum(1)}
        return result if labels is None else {"loss": ((outputs - labels) ** 2).mean(), **result}


@pytest.mark.fact(
    "Evaluation: Dict outputs become their values in order, without loss and ignored keys; nesting is kept"
)
@pytest.mark.parametrize("joins", [True, False])
def test_nested_outputs_keep_their_structure(joins: bool, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, parts={"model": Nested()}, per_device_eval_batch_size=2, eval_do_concat_batches=joins
    )
    logits, (twice, hidden), extra = trainer.predict(Rows(5), ignore_keys=["unknown"]).predictions
    x = Rows(5).x.numpy()
    for found, rows in ((logits, expected(5)[0].numpy()), (twice["twice"], 2 * x), (hidden[0], x), (extra, x.sum(1))):
        if not joins:
            assert [len(batch) for batch in found] == [2, 2, 1]
            found = np.concatenate(found)
        assert_same_numbers(found, rows, tolerance=SINGLE)
    assert len(hidden) == 1
    assert len(trainer.predict(Rows(3), ignore_keys=["hidden", "extra"]).predictions) == (
        3 if joins else 2
    )  # one alone


@pytest.mark.fact("Evaluation: Without labels, label_ids is None, and there is no loss and no metric")
def test_rows_without_labels_have_no_loss(tmp_path: Path) -> None:
    rows = [{"x": x} for x in Rows(5).x]
    trainer = make_trainer(tmp_path, parts={"compute_metrics": lambda prediction: {"never": 1}})
    output = trainer.predict(rows)
    assert output.label_ids is None
    assert output.metrics is not None
    assert not {"test_loss", "test_never"} & output.metrics.keys()
    assert_same_numbers(output.predictions, expected(5)[0], tolerance=SINGLE)


@pytest.mark.fact("Trainer: label_names=[] means prediction only")
def test_without_label_names_nothing_is_a_label(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, label_names=[], per_device_eval_batch_size=2)
    output = trainer.predict(Rows(5))
    assert output.label_ids is None
    assert output.metrics is not None
    assert "test_loss" not in output.metrics


@pytest.mark.fact(
    "Trainer: Label names are args.label_names, or else the parameters of forward whose name contains label"
)
@pytest.mark.fact("Evaluation: A row counts as labelled only if all label names are present")
def test_a_row_is_labelled_if_all_labels_are_there(tmp_path: Path) -> None:
    class TwoLabels(Regression):
        def forward(self, x: torch.Tensor, labels: Any = None, label_weight: Any = None) -> Any:
            outputs = self.linear(x)
            if labels is None or label_weight is None:
                return {"logits": outputs}
            return {"loss": (((outputs - labels) ** 2) * label_weight).mean(), "logits": outputs}

    trainer = make_trainer(tmp_path, parts={"model": TwoLabels()})
    assert trainer.label_names == ["labels", "label_weight"]
    assert trainer.predict(Rows(3)).label_ids is None
    both = [{**Rows(3)[index], "label_weight": torch.ones(1) * index} for index in range(3)]
    labels, weights = trainer.predict(both).label_ids
    np.testing.assert_array_equal(labels, Rows(3).labels.numpy())
    np.testing.assert_array_equal(weights, [[0.0], [1.0], [2.0]])
    assert make_trainer(tmp_path, label_names=["x"]).label_names == ["x"]


class Lengths(nn.Module):
    """Outputs as long as the longest row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": (x * self.weight - labels).abs().mean(), "logits": x * self.weight, "ids": labels.long()}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=-100)
        for name in rows[0]
    }


@pytest.mark.fact(
    "Evaluation: Rows of different length are padded on the right with -100, also with eval_accumulation_steps"
)
@pytest.mark.parametrize("on_device", [None, 1, 2, 3])
def test_rows_of_differing_length_are_padded(on_device: int | None, tmp_path: Path) -> None:
    lengths = [3, 1, 2, 6, 4]
    rows = [{"x": torch.full((length,), 1.0 + index)} for index, length in enumerate(lengths)]
    rows = [{**row, "labels": row["x"] * 2} for row in rows]
    trainer = make_trainer(
        tmp_path,
        parts={"model": Lengths(), "data_collator": padded, "train_dataset": None},
        per_device_eval_batch_size=2,
        eval_accumulation_steps=on_device,
    )
    output = trainer.predict(rows)
    whole = padded(rows)
    np.testing.assert_array_equal(output.predictions[0], whole["x"].numpy())
    np.testing.assert_array_equal(output.predictions[1], whole["labels"].long().numpy())
    assert output.predictions[1].dtype == np.int64
    np.testing.assert_array_equal(output.label_ids, whole["labels"].numpy())


@pytest.mark.fact(
    'Evaluation: include_for_metrics=["inputs","loss"] provides losses, and the inputs named by main_input_name'
)
def test_metrics_may_see_inputs_and_losses(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {}

    class Named(Regression):
        main_input_name = "x"

    trainer = make_trainer(
        tmp_path,
        parts={"model": Named(), "compute_metrics": metrics},
        include_for_metrics=["inputs", "loss"],
        per_device_eval_batch_size=2,
    )
    result = trainer.evaluate()
    np.testing.assert_array_equal(seen[0].inputs, Rows(5).x.numpy())
    assert seen[0][2] is seen[0].inputs
    assert seen[0].losses.shape == (5,)
    assert seen[0].losses.mean() == pytest.approx(result["eval_loss"])
    assert seen[0].losses[0] == seen[0].losses[1]  # the loss of their batch


@pytest.mark.fact(
    "Evaluation: A main_input_name that is missing from the batch is an error that names the keys of the batch"
)
def test_a_missing_main_input_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"compute_metrics": lambda prediction: {}}, include_for_metrics=["inputs"])
    with pytest.raises(DataError, match="inputs 'input_ids', but the batch has 'x', 'labels'. Set `main_input_name`"):
        trainer.evaluate()


@pytest.mark.fact(
    "Evaluation: Inputs for metrics may be strings or objects; they become an array of objects in row order"
)
def test_inputs_may_be_strings(tmp_path: Path) -> None:
    class Named(Regression):
        main_input_name = "name"

        def forward(self, x: torch.Tensor, labels: Any = None, name: Any = None) -> Any:
            return super().forward(x, labels)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return {**columns, "x": torch.stack(columns["x"]), "labels": torch.stack(columns["labels"])}

    seen: list[Any] = []

    def metrics(prediction: EvalPrediction) -> dict[str, Any]:
        seen.append(prediction.inputs)
        return {}

    rows = [{**Rows(5)[index], "name": f"row {index}"} for index in range(5)]
    trainer = make_trainer(
        tmp_path,
        parts={"model": Named(), "compute_metrics": metrics, "data_collator": collate, "eval_dataset": rows},
        include_for_metrics=["inputs"],
        per_device_eval_batch_size=2,
    )
    trainer.evaluate()
    assert list(seen[0]) == [f"row {index}" for index in range(5)]


@pytest.mark.fact(
    "Evaluation: preprocess_logits_for_metrics(logits, labels) transforms the kept outputs batch by batch"
)
def test_logits_may_be_made_smaller_before_they_are_kept(tmp_path: Path) -> None:
    sizes: list[int] = []

    def signs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(labels))
        return logits > 0

    trainer = make_trainer(tmp_path, parts={"preprocess_logits_for_metrics": signs}, per_device_eval_batch_size=2)
    np.testing.assert_array_equal(trainer.predict(Rows(5)).predictions, expected(5)[0].numpy() > 0)
    assert sizes == [2, 2, 1]


@pytest.mark.fact(
    "Evaluation: batch_eval_metrics calls compute_metrics with tensors per batch, and compute_result=True for the last"
)
def test_metrics_may_be_computed_batch_by_batch(tmp_path: Path) -> None:
    total: list[float] = []
    flags: list[bool] = []

    def metrics(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        assert isinstance(prediction.predictions, torch.Tensor)
        total.append(((prediction.predictions - prediction.label_ids) ** 2).sum().item())
        flags.append(compute_result)
        return {"mse": sum(total) / 5} if compute_result else {}

    trainer = make_trainer(
        tmp_path,
        parts={"compute_metrics": metrics},
        batch_eval_metrics=True,
        per_device_eval_batch_size=2,
    )
    result = trainer.evaluate()
    assert flags == [False, False, True]
    assert result["eval_mse"] == pytest.approx(result["eval_loss"]) == pytest.approx(expected(5)[1])


@pytest.mark.fact(
    "Evaluation: batch_eval_metrics never calls compute_metrics for a batch without labels or predictions"
)
def test_metrics_by_batch_are_not_computed_without_labels(tmp_path: Path) -> None:
    def metrics(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        raise AssertionError("there is nothing to compute")

    rows = [{"x": row["x"]} for row in (Rows(5)[index] for index in range(5))]
    parts = {"compute_metrics": metrics, "eval_dataset": rows}
    trainer = make_trainer(tmp_path, parts=parts, batch_eval_metrics=True)
    assert not any(name.startswith("test_loss") for name in trainer.predict(rows).metrics or {})
    with pytest.warns(UserWarning, match="because no batch had both predictions and the labels 'labels'"):
        assert "eval_loss" not in trainer.evaluate()


@pytest.mark.fact("Evaluation: batch_eval_metrics with a function that lacks compute_result is a ValueError")
def test_metrics_by_batch_need_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it has no parameter `compute_result`"):
        make_trainer(tmp_path, parts={"compute_metrics": lambda prediction: {}}, batch_eval_metrics=True)


@pytest.mark.fact(
    "Evaluation: Each set of a dict has the prefix eval_<name>, its own log entry and on_evaluate; all metrics are "
    "returned"
)
def test_several_sets_are_evaluated_by_name(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, recorder := Recorder(), parts={"eval_dataset": {"few": Rows(3), "many": Rows(7)}})
    metrics = trainer.evaluate()
    assert metrics["eval_few_loss"] == pytest.approx(expected(3)[1])
    assert metrics["eval_many_loss"] == pytest.approx(expected(7)[1])
    assert "eval_loss" not in metrics
    assert [set(entry) & {"eval_few_loss", "eval_many_loss"} for entry in trainer.state.log_history] == [
        {"eval_few_loss"},
        {"eval_many_loss"},
    ]
    assert recorder.events.count("evaluate") == 2
    given = trainer.evaluate({"other": Rows(2)}, metric_key_prefix="my")
    assert given["my_other_loss"] == pytest.approx(expected(2)[1])


@pytest.mark.fact("Trainer: get_eval_dataloader takes a dataset, or the name of one in the dict")
@pytest.mark.fact(
    "Trainer: With persistent workers, get_eval_dataloader returns one loader per dataset, otherwise a new one each "
    "time"
)
def test_loaders_of_evaluation_sets(tmp_path: Path) -> None:
    sets = {"few": Rows(3), "many": Rows(7)}
    trainer = make_trainer(tmp_path, parts={"eval_dataset": sets}, per_device_eval_batch_size=4)
    loader = trainer.get_eval_dataloader("many")
    assert loader.dataset is sets["many"]
    assert (len(loader), loader.total_batch_size) == (2, 4)  # type: ignore[attr-defined]
    assert trainer.get_eval_dataloader("many") is not loader
    assert len(trainer.get_eval_dataloader(Rows(5))) == 2
    with pytest.raises(ValueError, match="no evaluation set 'none', only 'few', 'many'"):
        trainer.get_eval_dataloader("none")
    kept = make_trainer(
        tmp_path,
        parts={"eval_dataset": sets},
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
    )
    assert kept.get_eval_dataloader("few") is kept.get_eval_dataloader("few")
    assert kept.get_eval_dataloader("few") is not kept.get_eval_dataloader("many")


@pytest.mark.fact("Evaluation: predict fires prediction_step per batch and then predict, and logs nothing")
def test_a_prediction_is_not_logged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, recorder := Recorder(), per_device_eval_batch_size=2)
    trainer.predict(Rows(5))
    assert recorder.events == ["init_end", *["prediction_step"] * 3, "predict"]
    assert trainer.state.log_history == []


def test_evaluations_leave_the_model_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"model": Regression(dropout=0.5)})
    trainer.model.train()
    first = trainer.evaluate()["eval_loss"]
    assert trainer.model.training
    assert trainer.evaluate()["eval_loss"] == first == pytest.approx(expected(5)[1])


def test_metrics_without_names_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"compute_metrics": lambda prediction: 0.5})
    with pytest.raises(HookOutputError, match="`compute_metrics` returned 0.5, but metrics need names"):
        trainer.evaluate()


def test_without_an_evaluation_set_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"eval_dataset": None})
    with pytest.raises(ValueError, match="no dataset to evaluate. Pass `eval_dataset`"):
        trainer.evaluate()


@pytest.mark.fact("Differences: Predictions beyond a given size are kept on disk, so memory stays constant")
def test_many_rows_wait_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pytorch_accelerated.huggingface.evaluation.evaluating.PaddedRows",
        functools.partial(PaddedRows, memory_bytes=8),
    )
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=2)
    output = trainer.predict(Rows(7))
    assert isinstance(output.predictions, np.memmap)
    assert_same_numbers(output.predictions, expected(7)[0], tolerance=SINGLE)
    assert list(tmp_path.iterdir()) == []  # the files have no names


class Pairs(nn.Module):
    """Compares two columns, and returns the loss of that by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        left, right = self.linear(x), self.linear(y)
        return {"loss": ((left - right) ** 2).mean(), "left": left, "right": right}


@pytest.mark.fact("Evaluation: A model that returns a loss without labels has metrics, and label_ids is ()")
@pytest.mark.parametrize("by_batch", [False, True])
def test_metrics_of_a_model_without_labels_are_computed(by_batch: bool, tmp_path: Path) -> None:
    def metrics(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, Any]:
        assert prediction.label_ids == ()
        left, right = prediction.predictions
        return {"rows": len(left), "width": right.shape[1]}

    rows = [{"x": row["x"], "y": 2 * row["x"]} for row in (Rows(5)[index] for index in range(5))]
    parts = {"model": Pairs(), "eval_dataset": rows, "compute_metrics": metrics}
    trainer = make_trainer(tmp_path, parts=parts, batch_eval_metrics=by_batch)
    result = trainer.evaluate()
    assert (result["eval_rows"], result["eval_width"]) == (5, 2)
    assert result["eval_loss"] > 0
    if not by_batch:
        assert trainer.predict(rows).label_ids == ()
        trainer.args.prediction_loss_only = True
        assert "eval_rows" not in trainer.evaluate()


@pytest.mark.fact("Evaluation: If compute_metrics is not called, one warning says why")
@pytest.mark.parametrize(
    ("names", "reason"),
    [(None, "not all rows have the labels 'labels'.*`label_names`"), ([], "no column is known to be a label")],
)
def test_metrics_that_miss_their_labels_are_pointed_out_once(names: Any, reason: str, tmp_path: Path) -> None:
    rows = [{"x": row["x"], "target": row["labels"]} for row in (Rows(5)[index] for index in range(5))]
    parts = {"eval_dataset": rows, "compute_metrics": lambda prediction: {"a": 1}}
    trainer = make_trainer(tmp_path, parts=parts, label_names=names)
    trainer.predict(rows)  # without labels, as is usual
    with pytest.warns(UserWarning, match=f"`compute_metrics` was not called, because {reason}") as caught:
        results = [trainer.evaluate() for _ in range(2)]
    assert len(caught) == 1
    assert not any("eval_a" in metrics for metrics in results)
    assert make_trainer(tmp_path, parts=parts, label_names=names, prediction_loss_only=True).evaluate()


def test_metrics_that_miss_their_predictions_are_pointed_out(tmp_path: Path) -> None:
    parts = {
        "compute_metrics": lambda prediction: {"a": 1},
        "preprocess_logits_for_metrics": lambda logits, labels: None,
    }
    trainer = make_trainer(tmp_path, parts=parts)
    with pytest.warns(UserWarning, match="there are no predictions: `preprocess_logits_for_metrics` returned None"):
        assert "eval_a" not in trainer.evaluate()
