"""Scripts that were written for the documented interface run as they are: names, arguments, styles of subclassing."""

import ast
import functools
import importlib
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

import pytorch_accelerated.callbacks as callbacks_module
from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated import trainer as trainer_module
from pytorch_accelerated.callbacks import (
    CallbackHandler,
    EarlyStoppingCallback,
    LimitBatchesCallback,
    LogMetricsCallback,
    PrintMetricsCallback,
    ProgressBarCallback,
    TrainerCallback,
    get_default_callbacks,
)
from pytorch_accelerated.callbacks.base import EVENTS
from pytorch_accelerated.finetuning import ModelFreezer
from pytorch_accelerated.run_config import TrainerRunConfig
from pytorch_accelerated.trainer import DEFAULT_CALLBACKS
from pytorch_accelerated.utils import DataLoaderSlice
from tests.support.histories import state_without_times
from tests.support.recording import HOOKS, INTERNAL_HOOKS, Recorder
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model

DATA = regression_data(12)
DATASET = TensorDataset(*DATA)


def make(base: type[Trainer] = Trainer, callbacks: Any = (), **kwargs: Any) -> Any:
    return base(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=callbacks, seed=3, **kwargs)


# Names, arguments and defaults

NAMES = {
    "pytorch_accelerated": "Trainer TrainerPlaceholderValues notebook_launcher __version__ set_seed",
    "pytorch_accelerated.trainer": "DEFAULT_CALLBACKS Trainer TrainerWithTimmScheduler TrainerPlaceholderValues "
    "replace_trainer_placeholder_values",
    "pytorch_accelerated.callbacks": "TrainerCallback CallbackHandler StopTrainingError "
    "CallbackMethodNotImplementedError get_default_callbacks LogMetricsCallback PrintMetricsCallback "
    "PrintProgressCallback ProgressBarCallback TerminateOnNaNCallback SaveBestModelCallback EarlyStoppingCallback "
    "MoveModulesToDeviceCallback LimitBatchesCallback LimitEvalStepsCallback StepBasedEvaluationCallback "
    "ModelEmaCallback ConvertSyncBatchNormCallback SaveTrainingStateCallback WSDCheckpointCallback MetricsCallback "
    "CSVLoggerCallback JSONLoggerCallback LearningRateMonitorCallback ProfilerCallback",
    "pytorch_accelerated.tracking": "RunHistory InMemoryRunHistory LossTracker",
    "pytorch_accelerated.run_config": "TrainerRunConfig",
    "pytorch_accelerated.schedulers": "SchedulerBase StatefulSchedulerBase CosineLrScheduler WSDLrScheduler "
    "estimate_checkpoint_steps LinearLrScheduler PolynomialLrScheduler ConstantLrScheduler InverseSqrtLrScheduler",
    "pytorch_accelerated.finetuning": "ModelFreezer Layer LayerGroup",
    "pytorch_accelerated.utils": "LimitBatches DataLoaderSlice ModelEma local_process_zero_only "
    "local_process_zero_first world_process_zero_only worker_init_fn remove_padding LIMIT_BATCHES_ENV_VAR",
}

SIGNATURES = """
trainer.Trainer(model, loss_func, optimizer, callbacks=DEFAULT_CALLBACKS, run_history=None)
trainer.Trainer.train(self, train_dataset, num_epochs, eval_dataset=None, per_device_batch_size=8, max_num_train_steps=None, gradient_accumulation_steps=1, gradient_clip_value=None, create_scheduler_fn=None, train_dataloader_kwargs=None, eval_dataloader_kwargs=None, reset_run_history=True, collate_fn=None, resume_from=None)
trainer.Trainer.evaluate(self, dataset=None, per_device_batch_size=8, dataloader_kwargs=None, collate_fn=None)
trainer.Trainer.predict(self, dataset, per_device_batch_size=8, dataloader_kwargs=None, collate_fn=None, output_path=None)
trainer.Trainer.save_checkpoint(self, save_path, checkpoint_kwargs=None, save_optimizer=True, save_per_node=True)
trainer.Trainer.load_checkpoint(self, checkpoint_path, load_optimizer=True, load_scheduler=True)
trainer.Trainer.save_training_state(self, output_dir, checkpoint_kwargs=None)
trainer.Trainer.load_training_state(self, input_dir)
trainer.Trainer.gather(self, tensor, padding_value=None)
trainer.Trainer.get_model(self, keep_torch_compile=True)
trainer.Trainer.explain(self, num_epochs=1, evaluate=True)
trainer.Trainer.create_train_dataloader(self, batch_size, train_dl_kwargs=None)
trainer.Trainer.create_eval_dataloader(self, batch_size, eval_dl_kwargs=None)
trainer.Trainer.get_default_train_dl_kwargs(self, batch_size)
trainer.Trainer.get_default_eval_dl_kwargs(self, batch_size)
trainer.Trainer.create_scheduler(self)
trainer.Trainer.calculate_train_batch_loss(self, batch)
trainer.Trainer.calculate_eval_batch_loss(self, batch)
trainer.Trainer.backward_step(self, loss)
trainer.Trainer._create_run_config(self, per_device_batch_size, num_epochs, gradient_accumulation_steps, max_num_train_steps, gradient_clip_value)
trainer.Trainer._run_train_epoch(self, train_dl)
trainer.Trainer._run_eval_epoch(self, valid_dl, is_training=True, is_intermediate=False)
trainer.Trainer._perform_forward_and_backward_passes(self, batch, step)
trainer.Trainer._update_loss_tracker(self, batch_loss, batch_size)
trainer.Trainer._add_epoch_loss_to_run_history(self, metric_name)
trainer.replace_trainer_placeholder_values(trainer, instance)
callbacks.CallbackHandler(callbacks=())
callbacks.CallbackHandler.call_event(self, event, *args, **kwargs)
callbacks.get_default_callbacks(progress_bar=True)
callbacks.LogMetricsCallback.log_metrics(self, trainer, metrics)
callbacks.SaveBestModelCallback(save_path="best_model.pt", watch_metric="eval_loss_epoch", greater_is_better=False, reset_on_train=True, save_optimizer=True, save_scheduler=True, load_saved_checkpoint=True)
callbacks.EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=0.01, watch_metric="eval_loss_epoch", greater_is_better=False, reset_on_train=True)
callbacks.LimitBatchesCallback(num_batches)
callbacks.LimitEvalStepsCallback(num_eval_steps, limit_intermediate_only=True)
callbacks.StepBasedEvaluationCallback(eval_every_n_steps)
callbacks.ModelEmaCallback(decay=0.99, evaluate_during_training=True, save_path="ema_model.pt", watch_metric="ema_model_eval_loss_epoch", greater_is_better=False, model_ema=ModelEma, callbacks=())
callbacks.SaveTrainingStateCallback(save_dir="training_states", save_every_n_epochs=None, save_every_n_steps=None, save_at_end=True, max_checkpoints=None)
callbacks.WSDCheckpointCallback(save_dir="checkpoints", save_optimizer=True, save_scheduler=True, initial_checkpoint=None)
callbacks.TerminateOnNaNCallback()
callbacks.PrintProgressCallback()
callbacks.ProgressBarCallback()
callbacks.MoveModulesToDeviceCallback()
callbacks.ConvertSyncBatchNormCallback()
callbacks.TrainerCallback.on_train_step_end(self, trainer)
tracking.RunHistory.get_metric_values(self, name)
tracking.RunHistory.get_latest_metric(self, name)
tracking.RunHistory.set_metric_name_prefix(self, prefix="")
tracking.RunHistory.update_metric(self, name, value)
tracking.RunHistory.delete_metric(self, name)
tracking.RunHistory._set_epoch(self, epoch)
tracking.LossTracker.update(self, loss_batch_value, batch_size=1)
schedulers.SchedulerBase(optimizer, param_group_field="lr")
schedulers.SchedulerBase.step_update(self, num_updates)
schedulers.SchedulerBase.get_updated_values(self, num_updates)
schedulers.StatefulSchedulerBase.step(self)
schedulers.CosineLrScheduler(optimizer, total_num_epochs, num_update_steps_per_epoch, k_decay=1.0, lr_min=1e-6, min_lr_ratio=None, num_warmup_epochs=0, warmup_starting_lr=1e-6, warmup_starting_lr_ratio=None, num_cooldown_epochs=0)
schedulers.CosineLrScheduler.create_scheduler_fn(total_num_epochs=NUM_EPOCHS, num_update_steps_per_epoch=NUM_UPDATE_STEPS_PER_EPOCH, k_decay=1.0, lr_min=1e-6, min_lr_ratio=None, num_warmup_epochs=0, warmup_starting_lr=1e-6, warmup_starting_lr_ratio=None, num_cooldown_epochs=0)
schedulers.WSDLrScheduler(optimizer, num_epochs=None, num_update_steps_per_epoch=None, total_steps=None, num_warmup_steps=0, decay_phase_ratio=0.1, lr_min=1e-6, warmup_starting_lr=1e-6, use_inverse_sqrt_decay=True, num_checkpoints=1, is_continuation_from_checkpoint=False)
schedulers.WSDLrScheduler.get_phase_info(self, num_updates)
schedulers.estimate_checkpoint_steps(total_steps, num_checkpoints=3)
finetuning.ModelFreezer(model, freeze_batch_norms=False)
finetuning.ModelFreezer.freeze(self, from_index=0, to_index=-2, set_modules_as_eval=False)
finetuning.ModelFreezer.unfreeze(self, from_index=-1, to_index=0, set_modules_as_training=True)
utils.LimitBatches(num_batches)
utils.DataLoaderSlice(dl, slice_size)
utils.ModelEma(model, decay=0.9999)
utils.remove_padding(padded_tensor, pad_value)
utils.worker_init_fn(worker_id)
"""  # noqa: E501
# Of what was added later, only this may be given by position.
ADDED_BY_POSITION = {"custom_events"}

ATTRIBUTES = """model loss_func optimizer scheduler create_scheduler_fn collate_fn train_dataset eval_dataset run_config
run_history callback_handler _accelerator _train_dataloader _eval_dataloader _loss_tracker _train_dl_kwargs
_eval_dl_kwargs _pad_uneven_eval_batches run_state device"""
MEMBERS = {
    "callbacks.CallbackHandler": "add_callback add_callbacks clear_callbacks callback_list call_event __iter__",
    "callbacks.TrainerCallback": "state_dict load_state_dict on_init_end on_training_run_start on_train_epoch_start "
    "on_train_step_start on_train_step_end on_optimizer_step_start on_optimizer_step_end on_train_epoch_end "
    "on_eval_epoch_start on_eval_step_start on_eval_step_end on_eval_epoch_end on_training_run_epoch_end "
    "on_training_run_end on_evaluation_run_start on_evaluation_run_end on_prediction_run_start on_prediction_step_end "
    "on_prediction_run_end on_stop_training_error on_exception",
    "callbacks.SaveBestModelCallback": "best_metric best_metric_epoch",
    "tracking.RunHistory": "get_metric_names get_metric_values get_latest_metric metric_name_prefix current_epoch "
    "_increment_epoch _set_epoch reset",
    "tracking.LossTracker": "reset update average loss_value total_loss running_count",
    "schedulers.SchedulerBase": "state_dict load_state_dict step_update get_updated_values",
    "schedulers.WSDLrScheduler": "get_checkpoint_steps get_phase_info get_decay_info get_current_step "
    "create_scheduler_fn",
    "finetuning.ModelFreezer": "get_layer_groups get_layers get_trainable_parameters",
    "trainer.Trainer": " ".join([*HOOKS, *INTERNAL_HOOKS]),
    "trainer.TrainerWithTimmScheduler": "num_updates",
    "trainer.TrainerPlaceholderValues": "NUM_EPOCHS NUM_UPDATE_STEPS_PER_EPOCH TRAIN_DATALOADER_LEN "
    "EVAL_DATALOADER_LEN PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH",
}


def find(path: str) -> Any:
    module, *names = path.split(".")
    return functools.reduce(getattr, names, importlib.import_module(f"pytorch_accelerated.{module}"))


@pytest.mark.parametrize("module", NAMES)
def test_every_promised_name_can_be_imported(module: str):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("path", MEMBERS)
def test_every_promised_member_exists(path: str):
    assert [name for name in MEMBERS[path].split() if not hasattr(find(path), name)] == []


@pytest.mark.parametrize("promise", SIGNATURES.strip().splitlines(), ids=lambda promise: promise.partition("(")[0])
def test_arguments_have_their_promised_names_order_and_defaults(promise: str):
    path, _, arguments = promise.partition("(")
    (function,) = ast.parse(f"def _({arguments}: ...").body
    assert isinstance(function, ast.FunctionDef)
    promised = function.args
    names = [argument.arg for argument in promised.args]
    known = {
        **vars(TrainerPlaceholderValues),
        "DEFAULT_CALLBACKS": DEFAULT_CALLBACKS,
        "ModelEma": find("utils.ModelEma"),
    }
    sources = [compile(ast.Expression(default), "a default", "eval") for default in promised.defaults]
    defaults = [inspect.Parameter.empty] * (len(names) - len(sources)) + [eval(source, known) for source in sources]

    actual = list(inspect.signature(find(path)).parameters.values())
    assert [(parameter.name, parameter.default) for parameter in actual[: len(names)]] == list(
        zip(names, defaults, strict=True)
    )
    assert {parameter.kind for parameter in actual[: len(names)]} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    for added in actual[len(names) :]:
        by_position = added.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and added.name not in ADDED_BY_POSITION
        is_required = added.default is inspect.Parameter.empty and added.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        assert not by_position or path.endswith("on_train_step_end"), added
        assert not is_required or path.endswith("on_train_step_end"), added


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


def test_loader_arguments_of_a_call_win_over_those_of_a_hook_and_its_batch_size_over_the_argument():
    class OwnDefaults(Trainer):
        def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
            return {**super().get_default_train_dl_kwargs(batch_size), "drop_last": True}

    trainer = make(OwnDefaults)
    sampler = torch.utils.data.SubsetRandomSampler(range(10))
    trainer.train(DATASET, 1, None, 8, train_dataloader_kwargs={"batch_size": 4, "sampler": sampler})
    assert trainer.run_config["train_per_device_batch_size"] == 4
    assert trainer.run_config.train_dl_kwargs["drop_last"]
    assert "shuffle" not in trainer.run_config.train_dl_kwargs
    assert trainer.run_state.updates == 2


def test_a_custom_scheduler_may_use_loaders_and_run_config():
    class OwnScheduler(Trainer):
        def create_scheduler(self) -> Any:
            assert self.run_config.num_update_steps_per_epoch == len(self._train_dataloader)
            steps = self.run_config.num_epochs * len(self._train_dataloader)  # type: ignore[operator]
            return OneCycleLR(self.optimizer, max_lr=0.5, total_steps=steps)

    trainer = make(OwnScheduler)
    trainer.train(DATASET, 2, per_device_batch_size=3)
    assert trainer.scheduler.last_epoch == 8


def test_two_models_of_which_the_subclass_prepares_one_itself():
    class Distillation(Trainer):
        def __init__(self, teacher: nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.teacher = teacher

        def _prepare_model_optimizer_and_dataloaders(self) -> None:
            super()._prepare_model_optimizer_and_dataloaders()
            self.teacher = self._accelerator.prepare_model(self.teacher, evaluation_mode=True)

        def training_run_start(self) -> None:
            self.teacher.eval()

        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            outputs = self.model(batch[0])
            return {
                "loss": self.loss_func(outputs, self.teacher(batch[0]).detach()),  # type: ignore[misc]
                "model_outputs": outputs,
                "batch_size": len(batch[0]),
            }

    model, loss_func = tiny_model(seed=1), nn.MSELoss()
    trainer = Distillation(tiny_model(), model, loss_func, sgd(model), callbacks=())
    before = loss_func(model(DATA[0]), trainer.teacher(DATA[0])).item()
    trainer.train(DATASET, 20)
    assert loss_func(model(DATA[0]), trainer.teacher(DATA[0])).item() < before


def test_a_custom_loop_replaces_the_training_epoch():
    class OwnEpoch(Trainer):
        def _run_train_epoch(self, train_dl: Any) -> None:
            self.train_epoch_start()
            for step, batch in enumerate(train_dl):
                self._perform_forward_and_backward_passes(batch, step)
                self.optimizer_step()
                self.optimizer_zero_grad()
            self._add_epoch_loss_to_run_history("train_loss_epoch")

    trainer, plain = make(OwnEpoch), make()
    for each in (trainer, plain):
        each.train(DATASET, 2, DATASET, per_device_batch_size=4)
    assert_same_parameters(trainer.model, plain.model, tolerance=0)
    names = list(trainer.run_history.get_metric_names())
    for name in names:
        assert trainer.run_history.get_metric_values(name) == plain.run_history.get_metric_values(name)


def test_a_loader_may_be_replaced_by_a_slice_of_it():
    class Fewer(TrainerCallback):
        def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer._train_dataloader = DataLoaderSlice(trainer._train_dataloader, 2)

    trainer = make(callbacks=[Fewer])
    trainer.train(DATASET, 3, per_device_batch_size=2)
    assert trainer.run_state.updates == 6


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


def test_callbacks_may_take_their_arguments_by_position_or_keyword_and_leave_out_what_they_do_not_need():
    class Mine(TrainerCallback):
        seen: tuple[Any, ...] = ()

        def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):
            self.seen += (step, len(batch[0]), sorted(batch_output))

        def on_eval_epoch_start(self, trainer, is_intermediate, **kwargs):
            self.seen += (is_intermediate,)

        def on_eval_step_end(self, trainer, batch_output, **kwargs):
            self.seen += (trainer.gather(batch_output["model_outputs"]).shape,)

    mine = Mine()
    make(callbacks=[mine]).train(DATASET, 1, DATASET, per_device_batch_size=12)
    assert mine.seen == (0, 12, ["batch_size", "loss", "model_outputs"], False, (12, 2))


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
    """Without a warning that nobody fires them: the names are in the methods of the trainer."""

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


def test_a_default_logger_passed_under_its_other_name_prints_once(capsys: pytest.CaptureFixture[str]):
    make(callbacks=[*DEFAULT_CALLBACKS, PrintMetricsCallback]).train(DATASET, 1)
    assert capsys.readouterr().out.count("train_loss_epoch") == 1


# Everyday use


def test_evaluate_resets_the_history_and_knows_the_last_evaluation_set():
    trainer = make()
    trainer.train(DATASET, 1, DATASET)
    trainer.evaluate()
    assert list(trainer.run_history.get_metric_names()) == ["evaluation_loss"]
    assert trainer.run_config.train_per_device_batch_size is None
    assert trainer.run_config.num_epochs is None


def test_checkpoints_by_position(tmp_path: Path):
    trainer = make()
    trainer.train(DATASET, 1)
    trainer.save_checkpoint(tmp_path / "model.pt", {"epoch": 7}, True, True)
    other = make()
    checkpoint = other.load_checkpoint(tmp_path / "model.pt", False)
    assert_same_parameters(other.model, trainer.model, tolerance=0)
    assert checkpoint["epoch"] == 7
    assert checkpoint.keys() == {"model_state_dict", "optimizer_state_dict", "epoch"}
    assert other.optimizer.state_dict()["state"] == {}


def test_printing_device_and_model(capsys: pytest.CaptureFixture[str]):
    trainer = make()
    trainer.print("hello", 1, sep="-")
    assert capsys.readouterr().out == "hello-1\n"
    assert trainer.device == trainer._accelerator.device
    assert trainer.get_model() is trainer.get_model(True) is trainer.model


def test_freezing_and_unfreezing_between_runs():
    trainer = make()
    freezer = ModelFreezer(trainer.model)
    freezer.freeze()
    first = trainer.model[0].weight.clone()
    trainer.train(DATASET, 1)
    assert torch.equal(trainer.model[0].weight, first)
    unfrozen = freezer.unfreeze()
    assert unfrozen[0]["params"][0] is trainer.model[0].weight
    trainer.train(DATASET, 1, reset_run_history=False)
    assert not torch.equal(trainer.model[0].weight, first)
