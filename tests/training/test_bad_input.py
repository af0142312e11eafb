"""Input that cannot work is refused before work is lost: with what we got, why it cannot work, and what to do."""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    LimitBatchesCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DataError,
    DuplicateCallbackError,
    HookOutputError,
    UnknownMetricError,
)
from tests.support.reference import regression_data, sgd, tiny_model

DATA = regression_data(8)
WRONG_NAME: dict[str, Any] = {"batch_size": 8}
TABLE = pd.DataFrame(DATA[0].numpy())


class Watcher(TrainerCallback):
    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        pass


class Rows(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return DATA[0][index], DATA[1][index]


class EmptyStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class OnlySays(nn.Module):
    """A loss of no class of torch's."""

    reduction = "sum"

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().sum()


class OwnMean(nn.MSELoss):
    """Sums, and divides itself."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs, targets) / targets.numel()


def make(*callbacks: Any, base: type[Trainer] = Trainer, **parts: Any) -> Trainer:
    model = tiny_model()
    return base(**{"model": model, "loss_func": nn.MSELoss(), "optimizer": sgd(model), "callbacks": callbacks, **parts})


def train(data: Any = DATA, num_epochs: Any = 1, *, parts: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return lambda: make(**(parts or {})).train(data, **{"num_epochs": num_epochs, **arguments})


def returning(method: str, value: Any) -> type[Trainer]:
    """A trainer whose method returns this, or what this makes of the loss."""

    def hook(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        return value(trainer.model(args[0][0]).mean()) if callable(value) else value

    return type("Mine", (Trainer,), {method: hook})


def loss_output(make_output: Callable[[torch.Tensor], Any]) -> Any:
    return train(parts={"base": returning("calculate_train_batch_loss", make_output)})


Case = tuple[Callable[[], object], type[Exception], list[str]]

ARGUMENTS: list[Case] = [
    (train(num_epochs=0), ConfigurationError, ["`num_epochs` is 0", "1 or more"]),
    (train(num_epochs=1.5), ArgumentTypeError, ["`num_epochs` is 1.5 (float)", "whole number"]),
    (train(num_epochs=True), ArgumentTypeError, ["`num_epochs` is True (bool)"]),
    (
        train(num_epochs=DATA[1]),
        ArgumentTypeError,
        ["is float64 [8, 2] on", "one dataset: `train((inputs, targets), "],
    ),
    (train(num_epochs=None), ConfigurationError, ["`num_epochs` and `max_num_train_steps` are both None"]),
    (train(per_device_batch_size=None), ArgumentTypeError, ["`per_device_batch_size` is None"]),
    (train(eval_per_device_batch_size=-2), ConfigurationError, ["`eval_per_device_batch_size` is -2"]),
    (train(max_num_train_steps=2.0), ArgumentTypeError, ["`max_num_train_steps` is 2.0 (float)"]),
    (train(gradient_accumulation_steps=0), ConfigurationError, ["`gradient_accumulation_steps` is 0"]),
    (train(gradient_clip_value=0), ConfigurationError, ["`gradient_clip_value` is 0", "must be above 0", "None"]),
    (train(gradient_clip_norm=math.nan), ConfigurationError, ["`gradient_clip_norm` is nan"]),
    (train(gradient_clip_norm="1"), ArgumentTypeError, ["`gradient_clip_norm` is '1' (str)", "a number"]),
    (train(gradient_clip_norm=1.0, gradient_clip_value=2.0), ConfigurationError, ["set only one of them"]),
    (train(max_duration="00:61:00"), ConfigurationError, ["`max_duration` is '00:61:00'", "'HH:MM:SS'"]),
    (train(max_duration=0), ConfigurationError, ["`max_duration` is 0", "above 0"]),
    (train(step_scheduler="batch"), ConfigurationError, ["'batch'", "'update', 'epoch'"]),
    (train(nonfinite_policy="ignore"), ConfigurationError, ["'ignore'", "'skip', 'rollback'"]),
    (train(nonfinite_policy="rollback"), ConfigurationError, ["there is nothing to go back to"]),
    (train(nonfinite_policy="skip", max_skipped_updates=0), ConfigurationError, ["`max_skipped_updates` is 0"]),
    (train(nonfinite_policy="skip", max_skipped_updates=1.5), ArgumentTypeError, ["`max_skipped_updates` is 1.5"]),
    (train(epochs=3), ArgumentTypeError, ["`Trainer.train` has no argument `epochs`", "`num_epochs`"]),
    (train(max_steps=3), ArgumentTypeError, ["`Trainer.train` has no argument `max_steps`", "`max_num_train_steps`"]),
    (train(eval_datset=DATA), ArgumentTypeError, ["no argument `eval_datset`", "`eval_dataset`"]),
    (train(verbose=1), ArgumentTypeError, ["`Trainer.train` has no argument `verbose`."]),
    (lambda: make().evaluate(DATA, 0), ConfigurationError, ["`per_device_batch_size` is 0"]),
    (lambda: make().predict(DATA, "8"), ArgumentTypeError, ["`per_device_batch_size` is '8' (str)"]),  # type: ignore[arg-type]
    (lambda: make().predict(DATA, **WRONG_NAME), ArgumentTypeError, ["no argument `batch_size`"]),
    (lambda: make().evaluate(), ConfigurationError, ["got no dataset", "Pass `dataset`"]),
]
PARTS: list[Case] = [
    (train(parts={"model": None}), ArgumentTypeError, ["`model` is None", "instance of nn.Module"]),
    (train(parts={"model": nn.Linear}), ArgumentTypeError, ["`model` is <class", "instance of nn.Module"]),
    (train(parts={"loss_func": nn.MSELoss}), ArgumentTypeError, ["`loss_func` is <class", "instance of a loss module"]),
    (train(parts={"optimizer": None}), ArgumentTypeError, ["`optimizer` is None", "both", "`optimizer_zero_grad`"]),
    (train(parts={"optimizer": torch.optim.SGD}), ArgumentTypeError, ["`optimizer` is <class"]),
    (train(parts={"optimizer": sgd(tiny_model())}), ConfigurationError, ["4 parameters", "`model.parameters()`"]),
    (lambda: make(accelerator=5), ArgumentTypeError, ["`accelerator` is 5", "function that returns one"]),
    (lambda: make(accelerator=lambda: "cpu"), ArgumentTypeError, ["a function that returns one"]),
    (
        lambda: make(accelerator=lambda: Accelerator(gradient_accumulation_steps=2)),
        ConfigurationError,
        ["gradient_accumulation_steps=2", "to `train`"],
    ),
    (lambda: make(mixed_precision="float16"), ConfigurationError, ["`mixed_precision` is 'float16'", "'bf16'"]),
    (lambda: make([5]), ArgumentTypeError, ["is not a callback", "none of its methods is named like an event"]),
    (lambda: make(nn.Linear(1, 1)), ArgumentTypeError, ["Linear", "is not a callback"]),
    (lambda: make(Watcher, Watcher), DuplicateCallbackError, ["'Watcher'", "`state_key`"]),
    (
        lambda: make(LimitBatchesCallback(2), LimitBatchesCallback(2)),
        DuplicateCallbackError,
        ["LimitBatchesCallback(2)"],
    ),
]
for loss_func, name in (
    (nn.MSELoss(reduction="sum"), "MSELoss"),
    (functools.partial(nn.functional.mse_loss, reduction="sum"), "mse_loss"),
    (OnlySays(), "OnlySays"),
):
    words = [f"`loss_func` is {name} with reduction='sum'", "reduction='mean'", "learning rate"]
    parts = {"loss_func": loss_func}
    PARTS.append((train(parts=parts), ConfigurationError, [*words, "`calculate_train_batch_loss`"]))
    PARTS.append((lambda parts=parts: make(**parts).evaluate(DATA), ConfigurationError, [*words, "`calculate_eval_"]))  # type: ignore[misc]
DATASETS: list[Case] = [
    (
        train(eval_dataset=[TensorDataset(*DATA)] * 2),
        ArgumentTypeError,
        ["A list of 2 datasets", "a dict with a name for each"],
    ),
    (train([TensorDataset(*DATA)] * 2), ArgumentTypeError, ["A list of 2 datasets", "ConcatDataset"]),
    (train(None), ArgumentTypeError, ["None is not a dataset", "torch Dataset"]),
    (train("path/to/data"), ArgumentTypeError, ["'path/to/data' is not a dataset"]),
    (train(eval_dataset=Rows), ArgumentTypeError, ["Rows'> is not a dataset"]),
    (train((torch.ones(4, 3), torch.ones(5, 2))), DataError, ["data[0] has 4", "data[1] has 5", "one length"]),
    (train(eval_dataset={"x": torch.ones(4), "y": "abc"}), DataError, ["data['y']", "str"]),
    (lambda: make().predict(list(DATA)), ArgumentTypeError, ["this one of two arrays has two samples", "a tuple"]),
    (lambda: make().predict((DATA[0], ["cat"] * 8)), DataError, ["is of type str", "a torch Dataset"]),
    (train(TABLE), ArgumentTypeError, ["A DataFrame is not a dataset", 'to_numpy("float32")']),
    (train((DATA[0], TABLE[0])), ArgumentTypeError, ["A Series is not a dataset"]),
    (train(OrderedDict(train=DATA)), ArgumentTypeError, ["'train'", "one of its entries"]),
    (
        train(datasets.DatasetDict(train=datasets.Dataset.from_dict({"x": [1.0]}))),
        ArgumentTypeError,
        ["DatasetDict", "'train'", "one of its entries"],
    ),
    (train(iter([DATA]), 2), ConfigurationError, ["can be iterated over only once", "2 epochs"]),
    (train(DATA, 2, eval_dataset=map(tuple, [DATA])), ConfigurationError, ["can be iterated over only once"]),
    (train(iter([DATA] * 2), None, max_num_train_steps=3), DataError, ["nothing to train on", "list_iterator"]),
    (train(eval_dataset=Rows(0)), DataError, ["nothing to evaluate", "samples: 0"]),
    (train(DataLoader(Rows(3), 4, drop_last=True)), DataError, ["the Rows", "samples: 3", "batch size: 4"]),
    (
        train(
            per_device_batch_size=10,
            train_dataloader_kwargs={"drop_last": True},
            create_scheduler_fn=functools.partial(
                OneCycleLR,
                max_lr=1.0,
                total_steps=TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,  # type: ignore[arg-type]
            ),
        ),
        DataError,  # before the scheduler divides by 0
        ["nothing to train on", "samples: 8", "batch size: 10", "drop_last: True"],
    ),
    (train(parts={"base": returning("create_train_dataloader", 5)}), ArgumentTypeError, ["int", "iterable of batches"]),
]
OUTPUTS: list[Case] = [
    (loss_output(lambda loss: None), HookOutputError, ["returned a NoneType", "a dict with 'loss'"]),
    (loss_output(lambda loss: (loss, 8)), HookOutputError, ["returned a tuple"]),
    (loss_output(lambda loss: {}), HookOutputError, ["returned a dict with nothing in it"]),
    (loss_output(lambda loss: {"loss": loss}), HookOutputError, ["a dict with 'loss'", "'batch_size'"]),
    (loss_output(lambda loss: {"loss": None, "batch_size": 8}), HookOutputError, ["None as 'loss'", "one number"]),
    (
        loss_output(lambda loss: {"loss": loss.expand(8), "batch_size": 8}),
        HookOutputError,
        ["[8] as 'loss'", ".mean()"],
    ),
    (loss_output(lambda loss: {"loss": loss, "batch_size": None}), HookOutputError, ["None as 'batch_size'"]),
    (loss_output(lambda loss: {"loss": loss, "batch_size": 0}), HookOutputError, ["0 as 'batch_size'"]),
    (loss_output(lambda loss: {"loss": loss, "batch_size": torch.ones(8)}), HookOutputError, ["[8] as 'batch_size'"]),
    (
        loss_output(lambda loss: {"loss": loss, "batch_size": 8, "num_items_in_batch": -8}),
        HookOutputError,
        ["-8 as 'num_items_in_batch'"],
    ),
    (
        lambda: make(base=returning("calculate_eval_batch_loss", {"loss": "2", "batch_size": 8})).evaluate(DATA),
        HookOutputError,
        ["calculate_eval_batch_loss", "a str as 'loss'"],
    ),
    (loss_output(lambda loss: {"loss": loss.detach(), "batch_size": 8}), RuntimeError, ["does not require grad"]),
]
SCHEDULES: list[Case] = [
    (train(create_scheduler_fn=StepLR(sgd(tiny_model()), 1)), ArgumentTypeError, ["StepLR", "takes the optimizer"]),
    (train(create_scheduler_fn=lambda optimizer: None), HookOutputError, ["returned None", "`step`"]),
    (train(create_scheduler_fn=ReduceLROnPlateau), ConfigurationError, ["'eval_loss_epoch'", "no evaluation set"]),
    (
        train(eval_dataset=DATA, create_scheduler_fn=ReduceLROnPlateau, scheduler_metric="score"),
        UnknownMetricError,
        ["'score'", "'train_loss_epoch', 'eval_loss_epoch'"],
    ),
    (train(parts={"callbacks": [EarlyStoppingCallback()]}), ConfigurationError, ["no evaluation set"]),
    (train(parts={"callbacks": [StepBasedEvaluationCallback(1)]}), ConfigurationError, ["no evaluation set"]),
    (
        train(
            eval_dataset=DATA,
            parts={"callbacks": [SaveBestModelCallback(watch_metric="accuracy", greater_is_better=True)]},
        ),
        UnknownMetricError,
        ["'accuracy'", "'train_loss_epoch', 'eval_loss_epoch'"],
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [*ARGUMENTS, *PARTS, *DATASETS, *OUTPUTS, *SCHEDULES],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_what_cannot_work_is_refused_with_words_that_help_before_anything_is_written(
    call: Any, error: type[Exception], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        call()
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [{"num_epochs": 0}, {"train_dataset": None}, {"eval_dataset": Rows(0)}, {"gradient_clip_norm": -1}]
)
def test_nothing_has_changed_then(arguments: dict[str, Any]) -> None:
    trainer = make()
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises((ConfigurationError, ArgumentTypeError, DataError)):
        trainer.train(**{"train_dataset": DATA, "num_epochs": 1, **arguments})
    assert all(map(torch.equal, trainer.model.parameters(), before))
    trainer.train(DATA, 1)


def test_an_override_that_prepares_nothing_is_refused() -> None:
    class Forgetful(Trainer):
        def _prepare_model_optimizer_and_dataloaders(self) -> None:
            pass

    trainer = make(base=Forgetful)
    for call in (lambda: trainer.train(DATA, 1), lambda: trainer.evaluate(DATA)):
        with pytest.raises(ConfigurationError, match=r"`Forgetful._prepare_.*` has prepared nothing.*`super\(\)`"):
            call()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the device is not the CPU")
@pytest.mark.parametrize("source", ["argument", "configuration"])
def test_fp16_is_rejected_on_the_cpu_where_it_would_have_no_effect(source: str, monkeypatch: pytest.MonkeyPatch):
    if source == "configuration":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
        AcceleratorState._reset_state()  # else the precision of an earlier test would stay
    try:
        with pytest.raises(ConfigurationError, match=r"fp16.*CPU.*'bf16' or 'no'"):
            make(mixed_precision="fp16" if source == "argument" else None)
        if source == "argument":
            assert make()._accelerator.mixed_precision == "no", "the next trainer has inherited it"
    finally:
        if source == "configuration":
            AcceleratorState._reset_state()


# Hooks


@pytest.mark.parametrize(
    ("name", "meant"),
    [("calculate_training_batch_loss", "calculate_train_batch_loss"), ("creat_scheduler", "create_scheduler")],
)
def test_a_misspelt_hook_is_warned_about_on_the_users_line_with_the_nearest_name(name: str, meant: str):
    kind = type("Mine", (type("Base", (Trainer,), {name: lambda self: None}),), {})
    with pytest.warns(UserWarning, match=f"Base.{name} is not called.*Did you mean '{meant}'") as caught:
        make(base=kind)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_custom_methods_are_not_mistaken_for_misspelt_hooks():
    class Mixin:
        def train_epoch_ended(self) -> None: ...

    class Mine(Mixin, Trainer):
        optimizer_steps = 0

        @property
        def scheduler_steps(self) -> int:
            return 0

        def train_epoch_ended(self) -> None: ...

        def _calculate_train_batch_loss(self) -> None: ...

        def calculate_test_batch_loss(self) -> None: ...

        def test_epoch_start(self) -> None: ...

        def evaluation_epoch_end(self) -> None: ...

    make(base=Mine)  # warnings are errors


def test_an_evaluation_hook_may_return_numbers_and_a_batch_without_samples_may_have_items():
    output = {"loss": 2.5, "model_outputs": None, "batch_size": 8}
    assert make(base=returning("calculate_eval_batch_loss", output)).evaluate(DATA)["evaluation_loss"] == 2.5
    counted = {**output, "batch_size": 0, "num_items_in_batch": 8}
    assert make(base=returning("calculate_eval_batch_loss", counted)).evaluate(DATA)["evaluation_loss"] == 2.5


@pytest.mark.parametrize("loss_func", [OwnMean(reduction="sum"), nn.functional.mse_loss])
def test_a_loss_that_does_not_say_that_it_sums_is_used(loss_func: Any):
    make(loss_func=loss_func).train(DATA, 1, DATA)


def test_a_sum_may_be_divided_in_the_hooks():
    class Divides(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] / batch[1].numel()}

    trainer = make(base=Divides, loss_func=nn.MSELoss(reduction="sum"))
    trainer.train(DATA, 1)
    with pytest.raises(ConfigurationError, match="`calculate_eval_batch_loss`"):
        trainer.train(DATA, 1, DATA)


def test_a_trainer_may_step_and_schedule_as_it_likes():
    class Mine(Trainer):
        def optimizer_step(self) -> None:
            def closure() -> torch.Tensor:
                return self.loss_func(self.model(DATA[0]), DATA[1])  # type: ignore[misc,no-any-return]

            self.optimizer.step(closure)

        def create_scheduler(self) -> Any:
            assert self.create_scheduler_fn is not None
            return self.create_scheduler_fn(self.optimizer, 5)

    model = tiny_model()
    trainer = make(base=Mine, model=model, optimizer=torch.optim.LBFGS(model.parameters(), max_iter=1))
    trainer.train(DATA, 1, create_scheduler_fn=StepLR)
    assert trainer.scheduler.step_size == 5


def test_parts_may_be_filled_in_after_the_constructor():
    trainer = Trainer(None, None, None, callbacks=())  # type: ignore[arg-type]
    trainer.model, trainer.loss_func = tiny_model(), nn.MSELoss()
    trainer.optimizer = sgd(trainer.model)
    trainer.train(DATA, 1)
    assert trainer.run_state.updates == 1


# Data


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(torch.empty(0, 3), torch.empty(0, 2)), [], Rows(0), {"x": torch.empty(0, 3)}, EmptyStream()],
    ids=["TensorDataset", "list", "map-style", "dict", "stream"],
)
def test_an_empty_dataset_is_refused_by_train_and_evaluate_and_gives_an_empty_prediction(dataset: Any, tmp_path: Path):
    trainer = make(SaveTrainingStateCallback(tmp_path / "states"))
    with pytest.raises(DataError, match="There is nothing to train on.*length of the data"):
        trainer.train(dataset, 1)
    with pytest.raises(DataError, match="There is nothing to evaluate"):
        trainer.evaluate(dataset)
    assert trainer.predict(dataset).shape == (0,)
    assert list(tmp_path.glob("states/*")) == []


def test_what_is_said_about_tables_and_iterators_works():
    trainer = make()
    trainer.train((TABLE.to_numpy(), pd.DataFrame(DATA[1].numpy()).to_numpy()), 1)
    assert trainer.predict(TABLE.to_numpy()).shape == (8, 2)
    trainer.train(iter([DATA]), 1, iter([DATA]))
    assert trainer.run_state.updates == 1


# At the wrong time


@pytest.mark.parametrize("method", ["train", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda trainer: trainer.train(DATA, 1), "`train` was called while.*another trainer"),
        (lambda trainer: trainer.evaluate(DATA), "`evaluate` was called while.*request_evaluation"),
        (lambda trainer: trainer.preflight(DATA, 1), "`preflight` was called while"),
    ],
)
def test_a_run_within_a_run_is_refused(method: str, call: Any, words: str):
    class Inside(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            call(trainer)

        on_eval_step_end = on_prediction_step_end = on_train_step_end

    arguments = (DATA, 1) if method == "train" else (DATA,)
    with pytest.raises(ConfigurationError, match=words):
        getattr(make(Inside()), method)(*arguments)


def test_predictions_within_a_run_are_welcome_and_evaluations_need_a_set():
    class Inside(TrainerCallback):
        predictions: Any = None

        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            self.predictions = trainer.predict(DATA[0])
            assert trainer.model.training
            trainer.request_evaluation()

    trainer = make(inside := Inside())
    with pytest.raises(ConfigurationError, match=r"no evaluation dataset.*`eval_dataset`"):
        trainer.train(DATA, 1)
    torch.testing.assert_close(inside.predictions, trainer.model(DATA[0]).detach(), rtol=1e-6, atol=1e-6)
