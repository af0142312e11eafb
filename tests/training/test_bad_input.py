"""Input that cannot work is refused before work is lost: with what we got, why it cannot work, and what to do."""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    PytorchAcceleratedError,
    UnknownMetricError,
)
from pytorch_accelerated.schedulers import CosineLrScheduler
from pytorch_accelerated.tracking.history import InMemoryRunHistory
from tests.support.reference import regression_data, sgd, tiny_model

DATA = regression_data(8)
EMPTY = TensorDataset(torch.empty(0, 3), torch.empty(0, 2))


class Watcher(TrainerCallback):
    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        pass


def make(*callbacks: Any, base: type[Trainer] = Trainer, **kwargs: Any) -> Trainer:
    model = tiny_model()
    return base(model, nn.MSELoss(), sgd(model), callbacks=callbacks, **kwargs)


def refused(
    call: Callable[[], object], error: type[PytorchAcceleratedError], *words: str, trainer: Trainer | None = None
) -> None:
    """The message has all the words, and nothing has happened before."""
    before = None if trainer is None else [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert message.endswith((".", ").")), message
    if trainer is not None and before is not None:
        for parameter, old in zip(trainer.model.parameters(), before, strict=True):
            assert torch.equal(parameter, old)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files would appear, if any were made before the error."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Arguments of train


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_epochs": 0}, ConfigurationError, ["`num_epochs` is 0", "1 or more"]),
        ({"num_epochs": -1}, ConfigurationError, ["`num_epochs` is -1"]),
        ({"num_epochs": 1.5}, ArgumentTypeError, ["`num_epochs` is 1.5 (float)", "whole number"]),
        ({"num_epochs": True}, ArgumentTypeError, ["`num_epochs` is True (bool)"]),
        ({"num_epochs": "3"}, ArgumentTypeError, ["`num_epochs` is '3' (str)"]),
        ({"num_epochs": None}, ConfigurationError, ["`num_epochs` and `max_num_train_steps` are both None"]),
        ({"per_device_batch_size": 0}, ConfigurationError, ["`per_device_batch_size` is 0"]),
        ({"per_device_batch_size": None}, ArgumentTypeError, ["`per_device_batch_size` is None"]),
        ({"eval_per_device_batch_size": -2}, ConfigurationError, ["`eval_per_device_batch_size` is -2"]),
        ({"max_num_train_steps": 0}, ConfigurationError, ["`max_num_train_steps` is 0"]),
        ({"max_num_train_steps": 2.0}, ArgumentTypeError, ["`max_num_train_steps` is 2.0 (float)"]),
        ({"gradient_accumulation_steps": 0}, ConfigurationError, ["`gradient_accumulation_steps` is 0"]),
        ({"gradient_clip_value": 0}, ConfigurationError, ["`gradient_clip_value` is 0", "remove the gradient", "None"]),
        ({"gradient_clip_norm": math.nan}, ConfigurationError, ["`gradient_clip_norm` is nan"]),
        ({"gradient_clip_norm": "1"}, ArgumentTypeError, ["`gradient_clip_norm` is '1' (str)", "a number"]),
        ({"gradient_clip_norm": True}, ArgumentTypeError, ["`gradient_clip_norm` is True (bool)"]),
        (
            {"gradient_clip_norm": 1.0, "gradient_clip_value": 2.0},
            ConfigurationError,
            ["`gradient_clip_value` is 2.0 and `gradient_clip_norm` is 1.0", "set only one of them"],
        ),
        ({"max_duration": "1h"}, ConfigurationError, ["`max_duration` is '1h'", "'HH:MM:SS'"]),
        ({"max_duration": "00:61:00"}, ConfigurationError, ["`max_duration` is '00:61:00'"]),
        ({"max_duration": 0}, ConfigurationError, ["`max_duration` is 0", "a time above 0"]),
        ({"max_duration": True}, ConfigurationError, ["`max_duration` is True"]),
        ({"step_scheduler": "batch"}, ConfigurationError, ["'batch'", "'update' or 'epoch'"]),
        ({"scheduler_metric": 5}, ArgumentTypeError, ["`scheduler_metric` is 5", "name of a metric"]),
        ({"train_dataloader_kwargs": 5}, ArgumentTypeError, ["`train_dataloader_kwargs` is 5 (int)", "dict"]),
        ({"eval_dataloader_kwargs": [("a", 1)]}, ArgumentTypeError, ["`eval_dataloader_kwargs` is [('a', 1)] (list)"]),
        ({"collate_fn": "default"}, ArgumentTypeError, ["`collate_fn` is 'default'", "function"]),
        ({"resume_from": True}, ArgumentTypeError, ["`resume_from` is True", "path"]),
        (
            {"num_epochs": 0, "per_device_batch_size": -1, "step_scheduler": "never"},
            ConfigurationError,
            ["`num_epochs` is 0", "`per_device_batch_size` is -1", "'never'"],
        ),
    ],
)
def test_arguments_of_train_are_checked_before_anything_starts(arguments: dict[str, Any], error: Any, words: list[str]):
    trainer = make()
    trainer.run_history.update_metric("earlier", 1.0)
    call = functools.partial(trainer.train, DATA, **{"num_epochs": 1, **arguments})
    refused(call, error, *words, trainer=trainer)
    assert trainer.run_history.get_metric_values("earlier") == [1.0]
    assert trainer.run_config is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"per_device_batch_size": 0}, ConfigurationError, ["`per_device_batch_size` is 0"]),
        ({"per_device_batch_size": "8"}, ArgumentTypeError, ["`per_device_batch_size` is '8' (str)"]),
        ({"dataloader_kwargs": 5}, ArgumentTypeError, ["`dataloader_kwargs` is 5"]),
        ({"collate_fn": 5}, ArgumentTypeError, ["`collate_fn` is 5"]),
        ({"dataset": "rows"}, ArgumentTypeError, ["'rows' is not a dataset"]),
    ],
)
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_arguments_of_evaluate_and_predict_are_checked(method: str, arguments: dict[str, Any], error: Any, words: Any):
    trainer = make()
    trainer.run_history.update_metric("earlier", 1.0)
    refused(functools.partial(getattr(trainer, method), **{"dataset": DATA, **arguments}), error, *words)
    assert trainer.run_history.get_metric_values("earlier") == [1.0]


# Parts of the trainer


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ({"model": None}, ArgumentTypeError, ["`model` is None", "instance of nn.Module"]),
        ({"model": nn.Linear}, ArgumentTypeError, ["`model` is <class", "instance of nn.Module"]),
        ({"loss_func": nn.MSELoss}, ArgumentTypeError, ["`loss_func` is <class", "instance of a loss module"]),
        ({"loss_func": 5}, ArgumentTypeError, ["`loss_func` is 5"]),
        ({"optimizer": None}, ArgumentTypeError, ["`optimizer` is None", "torch.optim.AdamW(model.parameters())"]),
        ({"optimizer": torch.optim.SGD}, ArgumentTypeError, ["`optimizer` is <class"]),
        ({"run_history": InMemoryRunHistory}, ArgumentTypeError, ["`run_history` is <class", "instance"]),
        ({"seed": "abc"}, ArgumentTypeError, ["`seed` is 'abc' (str)", "whole number"]),
        ({"seed": True}, ArgumentTypeError, ["`seed` is True (bool)"]),
        ({"compile_model": "yes"}, ArgumentTypeError, ["`compile_model` is 'yes'", "bool"]),
        ({"model": None, "seed": 0.5}, ArgumentTypeError, ["`model` is None", "`seed` is 0.5"]),
    ],
)
def test_parts_of_the_trainer_are_checked_when_a_run_starts(parts: dict[str, Any], error: Any, words: list[str]):
    model = tiny_model()
    trainer = Trainer(**{"model": model, "loss_func": nn.MSELoss(), "optimizer": sgd(model), "callbacks": (), **parts})
    refused(lambda: trainer.train(DATA, 1), error, *words)
    assert trainer.run_config is None


def test_parts_may_be_filled_in_after_the_constructor():
    trainer = Trainer(None, None, None, callbacks=())  # type: ignore[arg-type]
    trainer.model, trainer.loss_func = tiny_model(), nn.MSELoss()
    trainer.optimizer = sgd(trainer.model)
    trainer.train(DATA, 1)
    assert trainer.run_state.updates == 1


def test_no_optimizer_is_refused_unless_both_of_its_hooks_are_overridden():
    class StepsOnly(Trainer):
        def optimizer_step(self) -> None:
            pass

    trainer = StepsOnly(tiny_model(), nn.MSELoss(), None, callbacks=())
    refused(lambda: trainer.train(DATA, 1), ArgumentTypeError, "`optimizer_zero_grad`", "both", trainer=trainer)


def test_an_optimizer_of_another_model_is_refused_because_it_would_train_nothing():
    trainer = Trainer(tiny_model(), nn.MSELoss(), sgd(tiny_model()), callbacks=())
    refused(lambda: trainer.train(DATA, 1), ConfigurationError, "4 parameters", "none of them", "`model.parameters()`")


def test_an_optimizer_may_have_parameters_of_any_module_of_the_trainer():
    class ScaledLoss(nn.MSELoss):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.scale.exp() * super().forward(outputs, targets) - self.scale

    loss_func = ScaledLoss()
    Trainer(tiny_model(), loss_func, torch.optim.SGD(loss_func.parameters(), lr=0.1), callbacks=()).train(DATA, 1)
    assert loss_func.scale.item() != 1


def test_lbfgs_is_refused_unless_the_step_is_overridden():
    class WithClosure(Trainer):
        def optimizer_step(self) -> None:
            def closure() -> torch.Tensor:
                return self.loss_func(self.model(DATA[0]), DATA[1])  # type: ignore[misc,no-any-return]

            self.optimizer.step(closure)

    model = tiny_model()
    parts = (model, nn.MSELoss(), torch.optim.LBFGS(model.parameters(), max_iter=1))
    refused(lambda: Trainer(*parts, callbacks=()).train(DATA, 1), ConfigurationError, "closure", "`optimizer_step`")
    WithClosure(*parts, callbacks=()).train(DATA, 1)


@pytest.mark.parametrize(
    ("accelerator", "error", "words"),
    [
        (5, ArgumentTypeError, ["`accelerator` is 5", "function that returns one"]),
        (lambda: "cpu", ArgumentTypeError, ["is not an Accelerator and returns none"]),
        (
            lambda: Accelerator(gradient_accumulation_steps=2),
            ConfigurationError,
            ["gradient_accumulation_steps=2", "divided twice", "to `train`"],
        ),
    ],
)
def test_an_accelerator_that_cannot_be_used_is_refused(accelerator: Any, error: Any, words: list[str]):
    refused(lambda: make(accelerator=accelerator), error, *words)


def test_a_precision_with_an_unknown_name_is_refused():
    words = ["`mixed_precision` is 'float16'", "'no', 'fp16', 'bf16' or 'fp8'"]
    refused(lambda: make(mixed_precision="float16"), ConfigurationError, *words)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the device is not the CPU")
@pytest.mark.parametrize("source", ["argument", "configuration", "accelerator"])
def test_fp16_is_rejected_on_the_cpu_where_it_would_have_no_effect(source: str, monkeypatch: pytest.MonkeyPatch):
    arguments: dict[str, Any] = {}
    if source == "argument":
        arguments = {"mixed_precision": "fp16"}
    else:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
        AcceleratorState._reset_state()  # else the precision of an earlier test would stay
    if source == "accelerator":
        arguments = {"accelerator": Accelerator}
    try:
        refused(lambda: make(**arguments), ConfigurationError, "fp16", "CPU", "'bf16' or 'no'")
        if source == "argument":
            assert make()._accelerator.mixed_precision == "no", "the next trainer has inherited it"
    finally:
        if source != "argument":
            AcceleratorState._reset_state()


# Callbacks


class NeedsArguments(TrainerCallback):
    def __init__(self, needed: int) -> None:
        self.needed = needed


@pytest.mark.parametrize(
    ("callbacks", "error", "words"),
    [
        (5, ArgumentTypeError, ["`callbacks` is 5", "list or tuple"]),
        (None, ArgumentTypeError, ["`callbacks` is None"]),
        (TrainerCallback, ArgumentTypeError, ["is not a list of callbacks", "even if there is only one"]),
        (TrainerCallback(), ArgumentTypeError, ["is not a list of callbacks"]),
        ("callback", ArgumentTypeError, ["'c' cannot be a callback"]),
        ([5], ArgumentTypeError, ["5 cannot be a callback", "none of its methods is named like an event"]),
        ([int], ArgumentTypeError, ["<class 'int'> cannot be a callback"]),
        ([nn.Linear(1, 1)], ArgumentTypeError, ["Linear", "cannot be a callback"]),
        ([NeedsArguments], ArgumentTypeError, ["NeedsArguments", "'needed'", "Pass an instance: NeedsArguments(...)"]),
        ([Watcher, Watcher], DuplicateCallbackError, ["'Watcher'", "told apart", "`state_key`"]),
        ([SaveBestModelCallback(), SaveBestModelCallback()], DuplicateCallbackError, ["best_model.pt"]),
        ([LimitBatchesCallback(2), LimitBatchesCallback(2)], DuplicateCallbackError, ["LimitBatchesCallback(2)"]),
    ],
)
def test_callbacks_that_cannot_be_used_are_refused(callbacks: Any, error: Any, words: list[str]):
    model = tiny_model()
    refused(lambda: Trainer(model, nn.MSELoss(), sgd(model), callbacks=callbacks), error, *words)


# Overridden hooks


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("calculate_train_batch_los", "calculate_train_batch_loss"),
        ("calculate_training_batch_loss", "calculate_train_batch_loss"),
        ("optimizer_stepp", "optimizer_step"),
        ("creat_scheduler", "create_scheduler"),
        ("val_epoch_end", "eval_epoch_end"),
        ("calculate_valid_batch_loss", "calculate_eval_batch_loss"),
    ],
)
def test_a_misspelt_hook_is_warned_about_on_the_users_line_with_the_nearest_name(name: str, meant: str):
    kind = type("Mine", (type("Base", (Trainer,), {name: lambda self: None}),), {})
    with pytest.warns(UserWarning, match=f"Base.{name} will never be called.*Did you mean '{meant}'") as caught:
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

        def create_test_dataloader(self) -> None: ...

        def test_epoch_start(self) -> None: ...

        def train_step_end(self) -> None: ...

        def evaluation_epoch_end(self) -> None: ...

        def optimizer_state(self) -> None: ...

    make(base=Mine)  # warnings are errors


# Data


class Rows(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return DATA[0][index], DATA[1][index]


class WithoutLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return DATA[0][index], DATA[1][index]


class EmptyStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    "dataset",
    [EMPTY, [], Rows(0), (torch.empty(0, 3), torch.empty(0, 2)), {"x": torch.empty(0, 3)}, EmptyStream(), iter(())],
    ids=["TensorDataset", "list", "map-style", "tensors", "dict", "stream", "iterator"],
)
def test_an_empty_dataset_is_refused_by_train_and_evaluate_and_gives_an_empty_prediction(dataset: Any, folder: Path):
    trainer = make(SaveTrainingStateCallback(folder / "states"))
    words = ["There is nothing to train on", "length of the data"]
    refused(lambda: trainer.train(dataset, 1), DataError, *words, trainer=trainer)
    refused(lambda: trainer.evaluate(dataset), DataError, "There is nothing to evaluate", "length of the data")
    assert trainer.predict(dataset).shape == (0,)
    assert not (folder / "states").exists()


@pytest.mark.parametrize("make_iterator", [iter, lambda rows: (row for row in rows), lambda rows: map(tuple, rows)])
def test_an_iterator_for_several_epochs_is_refused_before_the_first(make_iterator: Any):
    batches = [(DATA[0][:4], DATA[1][:4])]
    trainer = make()
    words = ["can be iterated over only once", "2 epochs", "over again"]
    refused(lambda: trainer.train(make_iterator(batches), 2), ConfigurationError, *words, trainer=trainer)
    refused(lambda: trainer.train(DATA, 2, make_iterator(batches)), ConfigurationError, *words, trainer=trainer)
    trainer.train(make_iterator(batches), 1, make_iterator(batches))
    assert trainer.run_state.updates == 1


def test_an_iterator_that_is_used_up_is_an_error_that_says_so():
    batches = [(DATA[0][:4], DATA[1][:4])] * 2
    words = ["nothing to train on", "list_iterator", "used up", "over again"]
    refused(lambda: make().train(iter(batches), None, max_num_train_steps=3), DataError, *words)

    class NoIterators(Trainer):
        def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Any = None) -> Any:
            return iter(batches)

    refused(lambda: make(base=NoIterators).train(DATA, 2, DATA), DataError, "nothing to evaluate", "used up")


def test_an_empty_evaluation_set_is_refused_before_training():
    trainer = make()
    refused(lambda: trainer.train(DATA, 1, EMPTY), DataError, "nothing to evaluate", "samples: 0", trainer=trainer)


def test_an_epoch_without_batches_is_refused_before_the_scheduler_divides_by_its_length():
    total = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    call = functools.partial(
        make().train,
        DATA,
        2,
        per_device_batch_size=10,
        train_dataloader_kwargs={"drop_last": True},
        create_scheduler_fn=functools.partial(OneCycleLR, max_lr=1.0, total_steps=total),  # type: ignore[arg-type]
    )
    refused(call, DataError, "nothing to train on", "samples: 8", "batch size: 10", "drop_last: True")


@pytest.mark.parametrize(
    ("dataset", "error", "words"),
    [
        (None, ArgumentTypeError, ["None is not a dataset", "torch Dataset"]),
        (5, ArgumentTypeError, ["5 is not a dataset"]),
        ("path/to/data", ArgumentTypeError, ["'path/to/data' is not a dataset"]),
        (Rows, ArgumentTypeError, ["Rows'> is not a dataset"]),
        (WithoutLength(), ArgumentTypeError, ["WithoutLength", "no `__len__`", "IterableDataset"]),
        ((torch.ones(4, 3), torch.ones(5, 2)), DataError, ["4", "5", "one length"]),
        ({"x": torch.ones(4, 3), "y": torch.ones(5)}, DataError, ["data['x'] has 4", "data['y'] has 5"]),
        ({"x": torch.ones(4), "y": "abc"}, DataError, ["data['y']", "str"]),
    ],
)
@pytest.mark.parametrize("role", ["train", "eval"])
def test_an_object_that_is_not_a_dataset_is_rejected(role: str, dataset: Any, error: Any, words: list[str]):
    if role == "eval" and dataset is None:
        return  # no evaluation
    trainer = make()
    datasets = (dataset, None) if role == "train" else (DATA, dataset)
    refused(lambda: trainer.train(datasets[0], 1, datasets[1]), error, *words, trainer=trainer)
    assert trainer.run_config is None


def test_a_dict_of_datasets_is_refused_for_training():
    refused(lambda: make().train(OrderedDict(train=DATA), 1), ArgumentTypeError, "'train'", "one of its entries")


def test_a_dict_of_hugging_face_datasets_is_refused_with_its_entries():
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict(train=datasets.Dataset.from_dict({"x": [1.0]}))
    refused(lambda: make().train(both, 1), ArgumentTypeError, "DatasetDict", "'train'", "one of its entries")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"bacth_size": 4}, ["bacth_size=4", "unexpected keyword"]),
        ({"batch_size": -1}, ["batch_size=-1"]),
        ({"batch_sampler": [[0, 1]], "shuffle": True}, ["shuffle=True"]),
        ({"num_workers": -1}, ["num_workers=-1"]),
    ],
)
def test_loader_arguments_that_torch_refuses_are_named(kwargs: dict[str, Any], words: list[str], folder: Path):
    refused(lambda: make().train(DATA, 1, train_dataloader_kwargs=kwargs), ConfigurationError, *words, "tuple")
    output = folder / "predictions"
    call = functools.partial(make().predict, DATA[0], dataloader_kwargs=kwargs, output_path=output)
    refused(call, ConfigurationError, *words)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("loader", [None, 5])
def test_a_loader_hook_that_returns_no_loader_is_refused(loader: Any):
    class NoLoader(Trainer):
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return loader

    refused(lambda: make(base=NoLoader).train(DATA, 1), ArgumentTypeError, type(loader).__name__, "iterable of batches")


def test_without_a_loss_function_a_pair_or_a_model_without_a_loss_is_refused():
    model = tiny_model()
    trainer = Trainer(model, None, sgd(model), callbacks=())
    refused(lambda: trainer.train(DATA, 1), DataError, "`loss_func` is None", "loss function")
    dataset = {"input": DATA[0]}
    refused(lambda: trainer.train(dataset, 1), DataError, "must return its loss", "Tensor", "labels")


class OwnLoss(nn.MSELoss):
    """Sums, and divides itself."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs, targets) / targets.numel()


class OnlySays(nn.Module):
    """Of no class of torch's."""

    reduction = "sum"

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().sum()


@pytest.mark.parametrize(
    ("loss_func", "name"),
    [
        (nn.MSELoss(reduction="sum"), "MSELoss"),
        (functools.partial(nn.functional.mse_loss, reduction="sum"), "mse_loss"),
        (functools.partial(nn.MSELoss(reduction="sum")), "MSELoss"),
        (OnlySays(), "OnlySays"),
    ],
)
def test_a_loss_that_sums_over_the_batch_is_refused_wherever_it_would_be_taken_for_a_mean(loss_func: Any, name: str):
    def make_with(base: type[Trainer] = Trainer) -> Trainer:
        return base(model := tiny_model(), loss_func, sgd(model), callbacks=())

    trainer = make_with()
    words = [f"`loss_func` is {name} with reduction='sum'", "reduction='mean'", "learning rate"]
    refused(lambda: trainer.train(DATA, 1), ConfigurationError, *words, "`calculate_train_batch_loss`", trainer=trainer)
    refused(lambda: trainer.evaluate(DATA), ConfigurationError, *words, "`calculate_eval_batch_loss`", trainer=trainer)

    class Divides(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] / batch[1].numel()}

    trainer = make_with(Divides)
    refused(lambda: trainer.train(DATA, 1, DATA), ConfigurationError, *words, "`calculate_eval_batch_loss`")
    trainer.train(DATA, 1)

    class DividesEverywhere(Divides):
        calculate_eval_batch_loss = Divides.calculate_train_batch_loss

    make_with(DividesEverywhere).train(DATA, 1, DATA)


@pytest.mark.parametrize(
    "loss_func",
    [
        nn.MSELoss(),
        OwnLoss(reduction="sum"),
        nn.functional.mse_loss,
        functools.partial(functools.partial(nn.functional.mse_loss, reduction="sum"), reduction="mean"),
    ],
)
def test_a_loss_that_does_not_say_that_it_sums_is_used(loss_func: Any):
    trainer = Trainer(model := tiny_model(), loss_func, sgd(model), callbacks=())
    trainer.train(DATA, 1, DATA)


def test_evaluate_without_a_dataset_is_refused():
    refused(make().evaluate, ConfigurationError, "without a dataset", "Pass `dataset`")


# What hooks return


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda loss: None, ["returned a NoneType", "a dict with 'loss'"]),
        (lambda loss: loss, ["returned a Tensor", "a dict"]),
        (lambda loss: (loss, 8), ["returned a tuple"]),
        (lambda loss: {}, ["returned a dict with nothing in it"]),
        (lambda loss: {"lost": loss, "batch_size": 8}, ["a dict with 'lost', 'batch_size'"]),
        (lambda loss: {"loss": loss}, ["a dict with 'loss'", "'batch_size'"]),
        (lambda loss: {"loss": None, "batch_size": 8}, ["None as 'loss'", "one number"]),
        (lambda loss: {"loss": loss.expand(8), "batch_size": 8}, ["shape [8] as 'loss'", "`.mean()`"]),
        (lambda loss: {"loss": loss, "batch_size": None}, ["None as 'batch_size'", "Return a number"]),
        (lambda loss: {"loss": loss, "batch_size": "8"}, ["a str as 'batch_size'"]),
        (lambda loss: {"loss": loss, "batch_size": 0}, ["0 as 'batch_size'", "count nowhere", "number of samples"]),
        (lambda loss: {"loss": loss, "batch_size": -8}, ["-8 as 'batch_size'"]),
        (lambda loss: {"loss": loss, "batch_size": torch.ones(8)}, ["shape [8] as 'batch_size'"]),
        (
            lambda loss: {"loss": loss, "batch_size": 8, "num_items_in_batch": [8]},
            ["a list as 'num_items_in_batch'"],
        ),
        (lambda loss: {"loss": loss.item(), "batch_size": 8}, ["a float that no gradient", "`.item()`"]),
        (lambda loss: {"loss": loss.detach(), "batch_size": 8}, ["no gradient", "`.detach()`", "requires_grad=True"]),
    ],
)
def test_a_training_hook_that_returns_something_else_is_an_error_before_the_first_update(output: Any, words: list[str]):
    class Wrong(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> Any:
            return output(self.model(batch[0]).mean())

    trainer = make(base=Wrong)
    call = functools.partial(trainer.train, DATA, 1)
    refused(call, HookOutputError, "calculate_train_batch_loss", *words, trainer=trainer)


def test_an_evaluation_hook_may_return_a_number_and_nothing_else():
    class Mine(Trainer):
        loss: Any = 2.5

        def calculate_eval_batch_loss(self, batch: Any) -> Any:
            return {"loss": self.loss, "model_outputs": None, "batch_size": len(batch[0])}

    trainer = make(base=Mine)
    assert trainer.evaluate(DATA)["evaluation_loss"] == 2.5
    vars(trainer)["loss"] = "2.5"
    refused(lambda: trainer.evaluate(DATA), HookOutputError, "calculate_eval_batch_loss", "a str as 'loss'")


def test_a_batch_without_samples_may_have_items():
    class Mine(Trainer):
        def calculate_eval_batch_loss(self, batch: Any) -> Any:
            return {"loss": 2.5, "model_outputs": None, "batch_size": 0, "num_items_in_batch": len(batch[0])}

    assert make(base=Mine).evaluate(DATA)["evaluation_loss"] == 2.5


@pytest.mark.parametrize("hook", ["get_default_train_dl_kwargs", "get_default_eval_dl_kwargs"])
@pytest.mark.parametrize("returned", [None, [("num_workers", 1)]])
def test_a_hook_that_returns_no_loader_arguments_is_refused(hook: str, returned: Any):
    trainer = make(base=type("Mine", (Trainer,), {hook: lambda self, batch_size: returned}))
    words = [f"`{hook}` returned {returned}", "a dict", f"super().{hook}(batch_size)"]
    refused(lambda: trainer.train(DATA, 1, DATA), HookOutputError, *words, trainer=trainer)


def test_a_model_without_trainable_parameters_is_an_error():
    trainer = make()
    for parameter in trainer.model.parameters():
        parameter.requires_grad_(False)
    refused(lambda: trainer.train(DATA, 1), HookOutputError, "no gradient", "`requires_grad=True`")


# Schedulers and metrics


@pytest.mark.parametrize(
    ("factory", "error", "words"),
    [
        (
            StepLR(sgd(tiny_model()), 1),
            ArgumentTypeError,
            ["a StepLR", "is already a scheduler", "functools.partial(StepLR"],
        ),
        (5, ArgumentTypeError, ["`create_scheduler_fn` is 5", "takes the optimizer"]),
        (StepLR, ArgumentTypeError, ["StepLR", "`step_size`", "functools.partial(StepLR, step_size=...)"]),
        (
            functools.partial(OneCycleLR, epochs=2),
            ArgumentTypeError,
            ["`max_lr`", "functools.partial(OneCycleLR, max_lr=...)"],
        ),
        (
            CosineLrScheduler,
            ArgumentTypeError,
            ["`total_num_epochs`, `num_update_steps_per_epoch`", "`CosineLrScheduler.create_scheduler_fn(...)`"],
        ),
        (lambda optimizer, *, gamma: None, ArgumentTypeError, ["`gamma`", "functools.partial(<lambda>, gamma=...)"]),
        (lambda: None, ArgumentTypeError, ["too many positional arguments", "takes the optimizer"]),
        (lambda optimizer: None, HookOutputError, ["returned None", "`step`"]),
        (lambda optimizer: 5, HookOutputError, ["returned 5", "cannot be stepped"]),
        (ReduceLROnPlateau, ConfigurationError, ["'eval_loss_epoch'", "no evaluation set", "`eval_dataset`"]),
    ],
)
def test_a_factory_that_creates_no_scheduler_is_rejected(factory: Any, error: Any, words: list[str]):
    trainer = make()
    refused(lambda: trainer.train(DATA, 1, create_scheduler_fn=factory), error, *words, trainer=trainer)


@pytest.mark.parametrize(
    "factory",
    [
        functools.partial(StepLR, step_size=1),
        functools.partial(OneCycleLR, max_lr=1.0, total_steps=TrainerPlaceholderValues.NUM_EPOCHS),  # type: ignore[arg-type]
        CosineLrScheduler.create_scheduler_fn(),
        lambda *args: StepLR(args[0], 1),
        lambda optimizer, gamma=0.5: StepLR(optimizer, 1, gamma),
        functools.partial(lambda step_size, optimizer: StepLR(optimizer, step_size), 1),
    ],
)
def test_functions_of_the_optimizer_alone_are_accepted_as_scheduler_factories(factory: Any):
    trainer = make()
    trainer.train(DATA, 1, create_scheduler_fn=factory)
    assert trainer.scheduler is not None


def test_a_trainer_that_makes_the_scheduler_itself_may_give_its_factory_more_arguments():
    class Mine(Trainer):
        def create_scheduler(self) -> Any:
            assert self.create_scheduler_fn is not None
            return self.create_scheduler_fn(self.optimizer, 5)

    trainer = make(base=Mine)
    trainer.train(DATA, 1, create_scheduler_fn=StepLR)
    assert trainer.scheduler.step_size == 5


@pytest.mark.parametrize("kind", ["scheduler", EarlyStoppingCallback, SaveBestModelCallback])
def test_a_metric_that_nothing_records_is_an_error_that_names_those_that_are(kind: Any, folder: Path):
    arguments: dict[str, Any] = {}
    callbacks = []
    if kind == "scheduler":
        arguments = {"create_scheduler_fn": ReduceLROnPlateau, "scheduler_metric": "accuracy"}
    else:
        callbacks = [kind(watch_metric="accuracy")]
    words = ["'accuracy'", "'train_loss_epoch', 'eval_loss_epoch'"]
    refused(lambda: make(*callbacks).train(DATA, 3, DATA, **arguments), UnknownMetricError, *words)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "callback",
    [EarlyStoppingCallback(), SaveBestModelCallback(), StepBasedEvaluationCallback(1)],
)
def test_callbacks_that_need_an_evaluation_set_say_so_before_the_first_update(callback: Any):
    trainer = make(callback)
    refused(lambda: trainer.train(DATA, 1), ConfigurationError, "no evaluation set", trainer=trainer)


def test_an_evaluation_that_was_asked_for_without_an_evaluation_set_is_an_error():
    class Ask(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.request_evaluation()

    refused(lambda: make(Ask()).train(DATA, 1), ConfigurationError, "no evaluation dataset", "`eval_dataset`")


# At the wrong time


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda trainer: trainer.train(DATA, 1), ["`train` was called while", "another trainer"]),
        (lambda trainer: trainer.evaluate(DATA), ["`evaluate` was called while", "request_evaluation"]),
        (lambda trainer: trainer.preflight(DATA, 1), ["`preflight` was called while"]),
    ],
)
@pytest.mark.parametrize("method", ["train", "evaluate", "predict"])
def test_a_run_within_a_run_is_refused(method: str, call: Any, words: list[str]):
    class Inside(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            call(trainer)

        def on_eval_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            call(trainer)

        def on_prediction_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            call(trainer)

    trainer = make(Inside())
    arguments = (DATA, 1) if method == "train" else (DATA,)
    refused(lambda: getattr(trainer, method)(*arguments), ConfigurationError, *words)


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.train(DATA, 1),
        lambda trainer: trainer.evaluate(DATA),
        lambda trainer: trainer.predict(DATA[0]),
        lambda trainer: trainer.preflight(DATA, 1),
    ],
)
def test_a_subclass_that_does_not_call_the_constructor_gets_an_error_that_says_so(call: Any):
    class Forgetful(Trainer):
        def __init__(self, model: nn.Module) -> None:
            self.model = model

    refused(lambda: call(Forgetful(tiny_model())), ConfigurationError, "Forgetful", "`super().__init__(")


def test_predictions_within_a_run_are_welcome():
    class Inside(TrainerCallback):
        predictions: Any = None

        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            self.predictions = trainer.predict(DATA[0])
            assert trainer.model.training

    inside = Inside()
    trainer = make(inside)
    trainer.train(DATA, 1)
    assert torch.equal(inside.predictions, trainer.model(DATA[0]).detach())


def test_a_ready_loader_without_batches_is_refused():
    loader = DataLoader(Rows(3), batch_size=4, drop_last=True)
    refused(
        lambda: make().train(loader, 1), DataError, "nothing to train on", "the Rows", "samples: 3", "batch size: 4"
    )
