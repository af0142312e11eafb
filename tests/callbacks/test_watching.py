"""Watched names that cannot come to be are an error before the first update; those that may are not."""

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.defaults import DEFAULT_CALLBACKS
from pytorch_accelerated.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accelerated.callbacks.loggers import LearningRateMonitorCallback
from pytorch_accelerated.callbacks.metrics import MetricsCallback
from pytorch_accelerated.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accelerated.callbacks.stopping import EarlyStoppingCallback
from pytorch_accelerated.callbacks.weights import ModelEmaCallback
from pytorch_accelerated.errors import UnknownMetricError
from pytorch_accelerated.trainer import Trainer

DATA = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 2
SETS = {"clean": DATA, "noisy": (DATA[0] + 1, DATA[1])}


@pytest.fixture(autouse=True)
def _scratch_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_trainer(*callbacks: Any, trainer_class: type[Trainer] = Trainer) -> Trainer:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trainer_class(model, nn.CrossEntropyLoss(), optimizer, [*callbacks, *DEFAULT_CALLBACKS], seed=1)


def accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return float((predictions == targets).float().mean())


def several(predictions: torch.Tensor, targets: torch.Tensor) -> Any:
    return {"best": 1.0, "worst": accuracy(predictions, targets)}


def annotated() -> MetricsCallback:
    exact = torchmetrics.Accuracy(task="multiclass", num_classes=2)
    return MetricsCallback({"accuracy": accuracy, "exact": exact}, predictions="argmax")


def watching(name: str) -> EarlyStoppingCallback:
    return EarlyStoppingCallback(5, watch_metric=name, greater_is_better=True)


@pytest.mark.parametrize(
    ("name", "callbacks", "sets", "meant"),
    [
        ("eval_loss", (), DATA, "'eval_loss_epoch'"),
        ("eval_acuracy", (annotated,), DATA, "'eval_accuracy'"),
        ("train_accuracy", (annotated,), DATA, "'eval_accuracy'"),  # functions are not computed in training
        ("eval_accuracy", (annotated,), SETS, "'eval_noisy_accuracy' or 'eval_clean_accuracy'"),
        ("eval_nosy_loss_epoch", (), SETS, "'eval_noisy_loss_epoch'"),
        ("ema_model_eval_loss_epoch", (), DATA, "'eval_loss_epoch'"),
        ("ema_model_eval_accuracy", (ModelEmaCallback, annotated), DATA, "'eval_accuracy'"),
    ],
)
def test_a_name_that_nothing_can_record_is_an_error_before_the_first_update(name, callbacks, sets, meant):
    trainer = make_trainer(*(make() for make in callbacks), watching(name))
    with pytest.raises(UnknownMetricError, match=f"is {name!r}, but nothing in this run will .*mean .*{meant}"):
        trainer.train(DATA, 2, sets)
    assert trainer.run_state.updates == 0


def score(predictions: Any, targets: Any) -> Any:  # may return a dict, whose names nobody knows before
    return {"part": 1.0}


@pytest.mark.parametrize("name", ["f1", "F1", "val_f1"])
def test_a_metric_without_its_prefix_is_an_error_before_the_first_update(name: str) -> None:
    trainer = make_trainer(MetricsCallback({"f1": score}, predictions="argmax"), watching(name))
    with pytest.raises(UnknownMetricError, match="nothing in this run will record it. Did you mean 'eval_f1'"):
        trainer.train(DATA, 2, DATA)
    assert trainer.run_state.updates == 0


def test_a_metric_within_epochs_needs_evaluations_within_epochs():
    trainer = make_trainer(watching("intermediate_eval_loss"))
    with pytest.raises(UnknownMetricError, match="or evaluate within epochs, with a `StepBasedEvaluationCallback`"):
        trainer.train(DATA, 2, DATA)


def by_saver(name: str) -> dict[str, Any]:
    return {"callbacks": [SaveTrainingStateCallback(keep_best=1, watch_metric=name)]}


def by_best_model(name: str) -> dict[str, Any]:
    return {"callbacks": [SaveBestModelCallback(watch_metric=name)]}


def by_average(name: str) -> dict[str, Any]:
    return {"callbacks": [ModelEmaCallback(watch_metric=name)]}


def by_schedule(name: str) -> dict[str, Any]:
    return {"callbacks": [], "create_scheduler_fn": ReduceLROnPlateau, "scheduler_metric": name}


@pytest.mark.parametrize("watch", [by_saver, by_best_model, by_average, by_schedule])
def test_everything_that_watches_says_so_before_the_first_update(watch):
    arguments = watch("eval_noisy_los_epoch")
    trainer = make_trainer(*arguments.pop("callbacks"))
    with pytest.raises(UnknownMetricError, match="mean .*'eval_noisy_loss_epoch'"):
        trainer.train(DATA, 2, SETS, **arguments)
    assert trainer.run_state.updates == 0


class Recording(TrainerCallback):
    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("eval_own", 1.0)


class OwnTrainer(Trainer):
    def eval_epoch_end(self) -> None:
        self.run_history.update_metric("eval_own", 1.0)


def ema_of_own() -> ModelEmaCallback:
    return ModelEmaCallback(callbacks=[Recording])


def dict_of_numbers() -> MetricsCallback:
    return MetricsCallback({"accuracy": accuracy, "scores": several}, predictions="argmax")


def classwise() -> MetricsCallback:
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=2, average=None)
    return MetricsCallback({"by_class": torchmetrics.wrappers.ClasswiseWrapper(metric)})


@pytest.mark.parametrize(
    ("name", "callbacks", "sets"),
    [
        ("train_loss_epoch", (), None),
        ("eval_own", (Recording,), DATA),
        ("eval_noisy_own", (Recording,), SETS),
        ("eval_accuracy", (annotated,), DATA),
        ("eval_exact", (annotated,), DATA),
        ("train_exact", (annotated,), DATA),
        ("eval_noisy_accuracy", (annotated,), SETS),
        ("eval_worst", (dict_of_numbers,), DATA),
        ("eval_multiclassaccuracy_0", (classwise,), DATA),
        ("ema_model_eval_own", (ema_of_own,), DATA),
        ("ema_model_eval_noisy_loss_epoch", (ModelEmaCallback,), SETS),
        ("intermediate_eval_loss", (lambda: StepBasedEvaluationCallback(2),), DATA),
        ("intermediate_eval_noisy_accuracy", (annotated, lambda: StepBasedEvaluationCallback(2)), SETS),
        ("learning_rate", (LearningRateMonitorCallback,), DATA),
    ],
)
def test_a_name_that_may_be_recorded_is_no_error(name, callbacks, sets):
    trainer = make_trainer(*(make() for make in callbacks), watching(name))
    trainer.train(DATA, 1, sets)
    assert name in trainer.run_history.get_metric_names()


def test_what_hooks_of_the_user_record_is_no_error():
    trainer = make_trainer(watching("eval_own"), trainer_class=OwnTrainer)
    trainer.train(DATA, 1, DATA)
    trainer = make_trainer(watching("eval_own"))
    trainer.eval_epoch_end = lambda: trainer.run_history.update_metric("eval_own", 1.0)  # type: ignore[method-assign]
    trainer.train(DATA, 1, DATA)
    trainer = make_trainer(watching("kept"))
    trainer.run_history.update_metric("kept", 1.0)
    trainer.train(DATA, 1, DATA, reset_run_history=False)


def test_a_schedule_waits_for_the_first_evaluation_within_an_epoch():
    watched: list[float] = []

    class Plateau(ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:  # type: ignore[override]
            watched.append(metrics)
            super().step(metrics)

    trainer = make_trainer(StepBasedEvaluationCallback(5))  # in the second of three epochs of three updates
    arguments: dict[str, Any] = {"create_scheduler_fn": Plateau, "scheduler_metric": "intermediate_eval_loss"}
    trainer.train(DATA, 3, DATA, **arguments)
    assert watched == [trainer.run_history.get_latest_metric("intermediate_eval_loss")] * 2


def test_a_gradient_norm_can_be_watched():
    make_trainer(watching("gradient_norm")).train(DATA, 1, DATA, gradient_clip_norm=1.0)


def test_a_probable_slip_is_warned_about_where_the_user_might_record_the_name():
    trainer = make_trainer(Recording(), annotated(), watching("eval_acuracy"))
    with (
        pytest.warns(
            UserWarning, match=r"'eval_acuracy', which may be a slip of the pen. Did you mean 'eval_accuracy'"
        ),
        pytest.raises(UnknownMetricError, match=r"no value. Did you mean .*'eval_accuracy'.* There is: "),
    ):
        trainer.train(DATA, 2, DATA)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SaveBestModelCallback(watch_metric="eval_accuracy"),
        lambda: EarlyStoppingCallback(5, watch_metric="eval_accuracy"),
        lambda: SaveTrainingStateCallback(keep_best=1, watch_metric="eval_accuracy"),
    ],
)
def test_the_smallest_accuracy_as_the_best_is_warned_about(make):
    with pytest.warns(UserWarning, match="'eval_accuracy', of which more is usually better.*greater_is_better=True"):
        make_trainer(annotated(), make()).train(DATA, 1, DATA)
