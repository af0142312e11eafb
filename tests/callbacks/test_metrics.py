"""Metrics over whole epochs equal those of one process that sees all samples at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from pytorch_accelerated.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accelerated.callbacks.metrics import MetricsCallback
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.trainer import Trainer
from tests.chaos.size import some
from tests.support.processes import run_on_ranks
from tests.support.resuming import SaveAndStop

CLASSES = 3


def classification_data(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points whose class can be told from them, mostly."""
    generator = torch.Generator().manual_seed(size)
    targets = torch.arange(size) % CLASSES
    return torch.randn(size, CLASSES, generator=generator) + 2 * nn.functional.one_hot(targets, CLASSES), targets


def make_trainer(*callbacks: Any, trainer_class: type[Trainer] = Trainer, lr: float = 0.1) -> Trainer:
    model = nn.Linear(CLASSES, CLASSES)
    with torch.no_grad():
        model.weight.copy_(torch.eye(CLASSES))
        model.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return trainer_class(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=2)


class Probabilities(MetricsCallback):
    """torchmetrics takes a batch of logits that happen to lie in [0, 1] for probabilities."""

    def get_predictions_and_targets(self, batch: Any, batch_output: dict[str, Any]) -> tuple[Any, Any]:
        predictions, targets = super().get_predictions_and_targets(batch, batch_output)
        return predictions.softmax(1), targets


def several_metrics() -> dict[str, torchmetrics.Metric | torchmetrics.MetricCollection]:
    """Metrics whose states are merged in different ways: sums, concatenated lists, and by themselves."""
    return {
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES),
        "recall": torchmetrics.Recall(task="multiclass", num_classes=CLASSES, average="macro"),
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
        "worst": torchmetrics.wrappers.ClasswiseWrapper(
            torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, average=None)
        ),
    }


def values_at_once(trainer: Trainer, data: tuple[torch.Tensor, torch.Tensor], prefix: str) -> dict[str, float]:
    metrics = torchmetrics.MetricCollection(several_metrics(), compute_groups=False)
    with torch.no_grad():
        metrics.update(trainer.model(data[0]).softmax(1), data[1])
    return {prefix + name: float(value) for name, value in metrics.compute().items()}


def recorded(trainer: Trainer, prefix: str) -> dict[str, float]:
    names = [name for name in trainer.run_history.get_metric_names() if name.startswith(prefix) and "loss" not in name]
    return {name: trainer.run_history.get_latest_metric(name) for name in names}


def test_evaluations_within_an_epoch_do_not_touch_the_metrics_of_the_epoch():
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def train(*callbacks: Any) -> Trainer:
        trainer = make_trainer(*callbacks, MetricsCallback({"accuracy": accuracy}))
        trainer.train(classification_data(20), 2, classification_data(9), per_device_batch_size=4)
        return trainer

    plain, interrupted = train(), train(StepBasedEvaluationCallback(2))
    for name in ("train_accuracy", "eval_accuracy"):
        assert interrupted.run_history.get_metric_values(name) == plain.run_history.get_metric_values(name)
    updates = [r.update for r in interrupted.run_history.records if r.name == "intermediate_eval_accuracy"]
    assert updates == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("metrics_first", [True, False])
def test_the_metrics_of_another_model_are_measured_by_themselves(metrics_first):
    class EvaluateZeros(TrainerCallback):
        """Evaluates a model that always says class 0, as averaged weights are evaluated."""

        def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
            model = nn.Linear(CLASSES, CLASSES)
            with torch.no_grad():
                model.weight.zero_()
                model.bias.copy_(torch.tensor([1.0, 0, 0]))
            trainer.run_context.control.evaluation_sets.evaluate_other_model(
                model, metric_name_prefix="ema_model_", callbacks=[metrics]
            )

    metrics = MetricsCallback({"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)})
    callbacks = [metrics, EvaluateZeros()]
    trainer = make_trainer(*(callbacks if metrics_first else callbacks[::-1]))
    data = classification_data(9)
    trainer.train(data, 2, data, per_device_batch_size=2)
    expected = (trainer.model(data[0]).argmax(1) == data[1]).float().mean().item()
    assert trainer.run_history.get_latest_metric("eval_accuracy") == pytest.approx(expected)
    assert trainer.run_history.get_metric_values("ema_model_eval_accuracy") == pytest.approx([1 / 3, 1 / 3])
    assert len(trainer.run_history.get_metric_values("eval_accuracy")) == 2


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (torchmetrics.MeanSquaredError(), ["eval_MeanSquaredError"]),
        ([torchmetrics.MeanSquaredError(), torchmetrics.R2Score()], ["eval_MeanSquaredError", "eval_R2Score"]),
        (
            torchmetrics.MetricCollection({"mse": torchmetrics.MeanSquaredError()}, prefix="my_", postfix="_here"),
            ["eval_my_mse_here"],
        ),
        ({"a": torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()])}, ["eval_a_MeanSquaredError"]),
    ],
    ids=["metric", "sequence", "collection", "collection by name"],
)
def test_metrics_can_be_given_in_every_form_that_torchmetrics_has(metrics, names):
    model = nn.Linear(3, 1)
    callback = MetricsCallback(metrics)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[callback])
    trainer.evaluate((torch.randn(8, 3), torch.randn(8, 1)))
    assert list(recorded(trainer, "eval_")) == names


def test_metrics_are_not_mistaken_for_equal_because_their_first_batch_was():
    trainer = make_trainer(
        MetricsCallback(
            {
                "top_1": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, average="micro"),
                "top_3": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, average="micro", top_k=CLASSES),
            }
        )
    )
    inputs = torch.eye(CLASSES).repeat(2, 1) * 10
    targets = torch.tensor([0, 1, 2, 2, 2, 2])  # the first batch is all right
    trainer.evaluate((inputs, targets), per_device_batch_size=3)
    assert recorded(trainer, "eval_") == pytest.approx({"eval_top_1": 4 / 6, "eval_top_3": 1.0})


def test_metrics_that_keep_predictions_do_not_keep_the_graph():
    class Graphs(TrainerCallback):
        kept: tuple[bool, ...] = ()

        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            self.kept += tuple(
                kept.requires_grad
                for kept in metrics._passes["train_"].collection["auroc"].metric_state["preds"]  # type: ignore[index]
            )

    metrics, graphs = Probabilities(several_metrics()), Graphs()
    make_trainer(graphs, metrics).train(classification_data(8), 1, per_device_batch_size=4)
    assert graphs.kept == (False, False)


# Saved states


def check_that_a_resumed_epoch_has_the_metrics_of_the_uninterrupted_one(resume_after: int, folder: Path) -> None:
    def train(*callbacks: Any, **kwargs: Any) -> Trainer:
        trainer = make_trainer(Probabilities(several_metrics()), *callbacks)
        trainer.train(classification_data(20), 2, classification_data(9), per_device_batch_size=4, **kwargs)
        return trainer

    whole = train()
    train(SaveAndStop(folder, resume_after))
    resumed = train(resume_from=folder)
    assert resumed.run_history.records == whole.run_history.records


@pytest.mark.parametrize("resume_after", [1, 3, 5, 6])
def test_a_resumed_epoch_has_the_metrics_of_the_uninterrupted_one(resume_after, tmp_path):
    check_that_a_resumed_epoch_has_the_metrics_of_the_uninterrupted_one(resume_after, tmp_path / "state")


def test_a_state_that_was_loaded_and_not_yet_used_is_saved_again():
    callback = Probabilities(several_metrics())
    state = {"train_": [{"accuracy": {"updates": 1, "values": {}}}]}
    callback.load_state_dict(state)
    assert callback.state_dict() == state


class Correlation(MetricsCallback):
    """Of the first output with the second input; torchmetrics merges its states when it computes the value."""

    def __init__(self) -> None:
        super().__init__({"correlation": torchmetrics.PearsonCorrCoef()})

    def get_predictions_and_targets(self, batch: Any, batch_output: dict[str, Any]) -> tuple[Any, Any]:
        return batch_output["model_outputs"][:, 0], batch[0][:, 1]


def test_states_that_cannot_be_merged_are_refused_on_fewer_ranks():
    callback = Correlation()
    trainer = make_trainer(callback)
    callback.on_train_epoch_start(trainer)
    inputs = torch.randn(5, CLASSES)
    callback.on_train_step_end(trainer, (inputs, None), {"model_outputs": inputs})
    (state,) = callback.state_dict()["train_"]
    trainer.run_state.updates_in_epoch = 1
    callback.load_state_dict({"train_": [state, {}]})  # the other rank had not had a batch
    callback.on_train_epoch_start(trainer)
    callback.load_state_dict({"train_": [state, state]})
    with pytest.raises(ConfigurationError, match=r"'correlation' \(PearsonCorrCoef\).* Resume on as many"):
        callback.on_train_epoch_start(trainer)


# Several ranks


def check_metrics_against_all_samples_at_once() -> None:
    """Every size around the number of ranks: also with ranks that have no batch."""
    for size in some((1, 5), (1, 2, 3, 5, 7)):
        data = classification_data(size)
        for batch_size in (1, 2):
            trainer = make_trainer(Probabilities(several_metrics()), lr=0)
            trainer.train(data, 2, data, per_device_batch_size=batch_size)
            assert recorded(trainer, "train_") == pytest.approx(values_at_once(trainer, data, "train_"))
            assert recorded(trainer, "eval_") == pytest.approx(values_at_once(trainer, data, "eval_"))
            trainer.evaluate(data, per_device_batch_size=batch_size)
            assert recorded(trainer, "eval_") == pytest.approx(values_at_once(trainer, data, "eval_"))


def check_a_metric_that_merges_its_states_itself() -> None:
    trainer = make_trainer(Correlation())
    inputs, targets = classification_data(11)
    metrics = trainer.evaluate((inputs, targets), per_device_batch_size=3)
    with torch.no_grad():
        expected = torch.corrcoef(torch.stack([trainer.model(inputs)[:, 0], inputs[:, 1]]))[0, 1].item()
    assert metrics["eval_correlation"] == pytest.approx(expected, rel=1e-4)


def check_that_an_unfinished_epoch_is_shared_out_over_any_number_of_ranks() -> None:
    class StateAfterTwoUpdates(TrainerCallback):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_state.updates == 2:
                self.by_rank = metrics.state_dict()["train_"]

    data = classification_data(24)
    state, metrics = StateAfterTwoUpdates(), Probabilities(several_metrics())
    make_trainer(metrics, state, lr=0).train(data, 1, per_device_batch_size=2)
    trainer = make_trainer(Probabilities(several_metrics()), lr=0)
    trainer.train(data, None, max_num_train_steps=2, per_device_batch_size=2)
    expected = recorded(trainer, "train_")

    def values_of(states: list[dict[str, Any]]) -> dict[str, float]:
        callback = Probabilities(several_metrics())
        callback.load_state_dict({"train_": states})
        trainer.run_state.updates_in_epoch = 2
        callback.on_train_epoch_start(trainer)
        callback.on_train_epoch_end(trainer)
        return recorded(trainer, "train_")

    assert len(state.by_rank) == trainer.run_config.num_processes
    assert values_of(state.by_rank) == expected
    assert values_of([*state.by_rank, {}]) == expected  # of one rank more, which had not had a batch
    assert values_of(state.by_rank * 2) == pytest.approx(expected)  # of twice as many, which had seen the same


CHECKS = [
    check_metrics_against_all_samples_at_once,
    check_a_metric_that_merges_its_states_itself,
    check_that_an_unfinished_epoch_is_shared_out_over_any_number_of_ranks,
]


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets:UserWarning")  # of AUROC, on three rows
@pytest.mark.parametrize("check", CHECKS)
def test_metrics_on_one_rank(check):
    check()


ON_RANKS = """
import os
import sklearn.datasets
import sys
from pathlib import Path
import torch
import torchmetrics
from tests.callbacks import test_metric_functions, test_metrics

os.chdir(sys.argv[1])
for check in (*test_metrics.CHECKS, *test_metric_functions.CHECKS):
    check()
test_metrics.check_that_a_resumed_epoch_has_the_metrics_of_the_uninterrupted_one(1, Path("state"))
assert torch.distributed.get_world_size() == int(sys.argv[2])
torch.distributed.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.parametrize("ranks", some((2,), (2, 3)))
def test_metrics_and_functions_on_several_ranks(ranks, tmp_path):
    run_on_ranks(ON_RANKS, ranks, tmp_path, ranks)
