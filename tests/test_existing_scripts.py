"""Scripts that were written for the documented interface run as they are: attributes, styles of subclassing.

`tests/differential` compares names and arguments with those of pytorch-accelerated 0.1.61.
"""

import functools
import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

import pytorch_accelerated.callbacks as callbacks_module
from pytorch_accelerated import Trainer
from pytorch_accelerated import trainer as trainer_module
from pytorch_accelerated.callbacks import (
    CallbackHandler,
    EarlyStoppingCallback,
    LimitBatchesCallback,
    LogMetricsCallback,
    ProgressBarCallback,
    TrainerCallback,
    get_default_callbacks,
)
from pytorch_accelerated.run_config import TrainerRunConfig
from pytorch_accelerated.trainer import DEFAULT_CALLBACKS
from tests.support.histories import state_without_times
from tests.support.recording import EVENTS, HOOKS, INTERNAL_HOOKS, Recorder
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model

DATA = regression_data(12)
DATASET = TensorDataset(*DATA)


def make(base: type[Trainer] = Trainer, callbacks: Any = (), **kwargs: Any) -> Any:
    return base(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=callbacks, seed=3, **kwargs)


ATTRIBUTES = """model loss_func optimizer scheduler create_scheduler_fn collate_fn train_dataset eval_dataset run_config
run_history callback_handler _accelerator _train_dataloader _eval_dataloader _loss_tracker _train_dl_kwargs
_eval_dl_kwargs _pad_uneven_eval_batches run_state device"""


def test_the_default_callbacks_are_the_promised_ones():
    names = ["MoveModulesToDevice", "TerminateOnNaN", "PrintProgress", "ProgressBar", "LogMetrics"]
    assert [callback.__name__ for callback in DEFAULT_CALLBACKS] == [f"{name}Callback" for name in names]
    assert get_default_callbacks() == DEFAULT_CALLBACKS
    assert ProgressBarCallback not in get_default_callbacks(progress_bar=False)
    assert callbacks_module.PrintMetricsCallback is LogMetricsCallback
    assert trainer_module.DEFAULT_CALLBACKS is DEFAULT_CALLBACKS


def test_every_attribute_that_scripts_read_exists_from_the_beginning_and_in_a_run():
    class Reads(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            assert [name for name in ATTRIBUTES.split() if not hasattr(trainer, name)] == []
            assert trainer._train_dataloader is not None
            assert trainer._eval_dataloader is not None
            assert isinstance(trainer.run_config, TrainerRunConfig)

    trainer = make(callbacks=[Reads()])
    assert [name for name in ATTRIBUTES.split() if not hasattr(trainer, name)] == []
    assert trainer._pad_uneven_eval_batches is False
    trainer.train(DATASET, 1, DATASET)
    assert trainer.train_dataset is trainer.eval_dataset is DATASET


def test_every_override_point_is_called():
    recorder = Recorder([*HOOKS, *INTERNAL_HOOKS])
    trainer = recorder.trainer(seed=3)
    factory = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    trainer.train(DATASET, 2, DATASET, 4, None, 2, 0.1, factory)
    trainer.evaluate(DATASET)
    trainer.predict(DATASET)
    assert {*HOOKS, *INTERNAL_HOOKS} <= set(recorder.calls)
    assert set(EVENTS) - set(recorder.calls) == {
        "on_stop_training_error",
        "on_exception",
        "on_non_finite_loss",
        "on_loss_spike",
    }


# Styles of subclassing


class OverridesEverything(Trainer):
    """Each documented method with its documented arguments, doing nothing but what it did."""

    seen: dict[str, Any]

    def __init__(self, *args: Any, extra: str, **kwargs: Any) -> None:
        self.seen = {}
        super().__init__(*args, **kwargs)
        self.extra = extra

    def _create_accelerator(self) -> Accelerator:
        return super()._create_accelerator()

    def _create_callback_handler(self) -> CallbackHandler:
        return CallbackHandler([*self._callbacks, LimitBatchesCallback(100)])

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        super()._prepare_model_optimizer_and_dataloaders()
        self.seen["model"] = self.model

    def _create_run_config(
        self,
        per_device_batch_size: int,
        num_epochs: int | None,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> TrainerRunConfig:
        self.seen["config"] = (per_device_batch_size, num_epochs, gradient_accumulation_steps, gradient_clip_value)
        return super()._create_run_config(
            per_device_batch_size, num_epochs, gradient_accumulation_steps, max_num_train_steps, gradient_clip_value
        )

    def _run_training(self) -> None:
        super()._run_training()

    def _run_train_epoch(self, train_dl: Any) -> None:
        assert train_dl is self._train_dataloader
        super()._run_train_epoch(train_dl)

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        super()._run_eval_epoch(valid_dl, is_training, is_intermediate)

    def _clip_gradients(self) -> None:
        self._accelerator.clip_grad_value_(self.model.parameters(), self.run_config.gradient_clip_value)

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        self.seen.setdefault("steps", []).append(step)
        super()._perform_forward_and_backward_passes(batch, step)

    def _update_loss_tracker(self, batch_loss: Any, batch_size: Any) -> None:
        self._loss_tracker.update(batch_loss, batch_size)

    def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
        super()._add_epoch_loss_to_run_history(metric_name)

    def _check_eval_batch_size(self) -> None:
        pass

    def backward_step(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def scheduler_step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def train_epoch_start(self) -> None:
        self.model.train()

    def eval_epoch_start(self) -> None:
        self.model.eval()

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        xb, yb = batch[0], batch[1]
        outputs = self.model(xb)
        return {"loss": self.loss_func(outputs, yb), "model_outputs": outputs, "batch_size": yb.size(0)}  # type: ignore[misc]

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        with torch.no_grad():
            return self.calculate_train_batch_loss(batch)


def test_a_subclass_that_overrides_everything_trains_to_the_same_weights():
    arguments = (DATASET, 2, DATASET, 2, None, 2, 0.05)
    plain = make()
    plain.train(*arguments)
    overriding = make(OverridesEverything, extra="mine")
    overriding.train(*arguments)
    assert_same_parameters(overriding.model, plain.model, tolerance=0)
    assert state_without_times(overriding.run_history) == state_without_times(plain.run_history)
    assert overriding.seen["config"] == (2, 2, 2, 0.05)
    assert overriding.seen["steps"] == [0, 1, 2, 3, 4, 5] * 2


# Styles of callbacks


def test_callbacks_need_not_call_the_constructors_or_events_of_their_bases(capsys: pytest.CaptureFixture[str]):
    class Quiet(ProgressBarCallback):
        def __init__(self) -> None:
            pass

        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            pass

    class Impatient(EarlyStoppingCallback):
        def __init__(self) -> None:
            self.early_stopping_patience = 2
            self.early_stopping_threshold = math.inf

    class Collects(LogMetricsCallback):
        def __init__(self) -> None:
            self.metrics: list[dict[str, float]] = []

        def log_metrics(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            self.metrics.append(metrics)

    collects = Collects()
    trainer = make(callbacks=[Quiet, Impatient, collects])
    trainer.train(DATASET, 5, DATASET)
    values = trainer.run_history
    assert collects.metrics == [
        {name: values.get_metric_values(name)[epoch]}
        for epoch in range(trainer.run_state.epochs)
        for name in ("train_loss_epoch", "eval_loss_epoch")
    ]
    assert trainer.run_state.epochs == 3
    assert "train_loss_epoch" not in capsys.readouterr().out


def test_the_backward_pass_uses_the_loss_as_callbacks_have_left_it():
    class Doubles(TrainerCallback):
        def on_train_step_end(self, trainer, batch_output, **kwargs):
            batch_output["loss"] = 2 * batch_output["loss"]

    class DoubleLoss(nn.MSELoss):
        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(outputs, targets)

    doubled, expected = make(callbacks=[Doubles]), make()
    expected.loss_func = DoubleLoss()
    doubled.train(DATASET, 1)
    expected.train(DATASET, 1)
    assert_same_parameters(doubled.model, expected.model, tolerance=0)
    losses = [trainer.run_history.get_latest_metric("train_loss_epoch") for trainer in (doubled, expected)]
    assert losses[1] == pytest.approx(2 * losses[0]), "what is recorded is the loss that the hook returned"


def test_a_trainer_may_fire_its_own_events():
    """Without a warning that nobody fires them: their names resemble no event of ours."""

    class Fires(Trainer):
        def train_epoch_end(self) -> None:
            self.callback_handler.call_event("on_half_time", trainer=self, message="half")
            self.callback_handler.call_event("on_nobody_listens", self)

    class Listens(TrainerCallback):
        heard: str | None = None

        def on_half_time(self, trainer: Trainer, message: str, **kwargs: Any) -> None:
            self.heard = message

    listens = Listens()
    make(Fires, callbacks=[LogMetricsCallback, listens]).train(DATASET, 1)
    assert listens.heard == "half"


def test_an_error_that_went_is_still_caught_by_its_name():
    with pytest.warns(FutureWarning, match="goes with version 2.0"):
        from pytorch_accelerated.errors import LoaderTimeoutError
    assert LoaderTimeoutError is RuntimeError


# Everyday use


class OwnAverage(TrainerCallback):
    """Evaluates averaged weights, which it puts into the model itself: the way of public scripts."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.trained: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        for name, value in trainer.get_model().state_dict().items():
            self.average[name] = 0.5 * (self.average.get(name, value) + value)

    def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.trained = {name: value.clone() for name, value in trainer.get_model().state_dict().items()}
        trainer.get_model().load_state_dict(self.average)
        with torch.no_grad():
            self.losses.append(nn.functional.mse_loss(trainer.get_model()(DATA[0]), DATA[1]).item())

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.get_model().load_state_dict(self.trained)


class ReplacesModel(OwnAverage):
    """The same with another module in place of the trainer's."""

    def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.own, averaged = trainer.model, tiny_model()
        averaged.load_state_dict(self.average)
        trainer.model = averaged
        with torch.no_grad():
            self.losses.append(nn.functional.mse_loss(averaged(DATA[0]), DATA[1]).item())

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.model = self.own


@pytest.mark.parametrize("kind", [OwnAverage, ReplacesModel])
def test_a_callback_may_evaluate_an_average_of_its_own(kind: type[OwnAverage]):
    trainer, plain = make(callbacks=[averaging := kind()]), make()
    history = trainer.train(DATASET, 3, DATASET, 4)
    plain.train(DATASET, 3, DATASET, 4)
    assert list(history.get_metric_values("eval_loss_epoch")) == pytest.approx(averaging.losses, rel=1e-12)
    assert_same_parameters(trainer.model, plain.model, tolerance=0)
    assert trainer.model is not plain.model
