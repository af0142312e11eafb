"""Optimizers and schedules by name are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import huggingface
from pytorch_accelerated.huggingface.arguments.fields import OptimizerNames, SchedulerType
from pytorch_accelerated.huggingface.engine.optimizing import make_schedule
from tests.huggingface.runs import StopAt, everything, losses, make_trainer
from tests.support.resuming import assert_same

SCHEDULES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {"power": 2.0, "lr_end": 0.01}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("cosine_with_min_lr", {"min_lr": 0.02}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 0.02}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.4, "num_cycles": 1.0}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "cosine", "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 2, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
]


def rates(make) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = make(optimizer)
    values = []
    for _ in range(14):  # beyond the end, too
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize(("kind", "arguments"), SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_schedule_by_name_has_the_rates_of_transformers(kind: str, arguments: dict[str, Any], warmup: int) -> None:
    transformers = pytest.importorskip("transformers")
    ours = rates(
        lambda optimizer: make_schedule(
            kind, optimizer, num_warmup_steps=warmup, num_training_steps=12, arguments=arguments
        )
    )
    theirs = rates(
        lambda optimizer: transformers.get_scheduler(
            kind, optimizer, num_warmup_steps=warmup, num_training_steps=12, scheduler_specific_kwargs=arguments
        )
    )
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15)
    assert len(set(ours)) > 1 or kind.startswith("constant")


def test_every_kind_of_schedule_is_compared() -> None:
    assert {kind for kind, _ in SCHEDULES} == {kind.value for kind in SchedulerType} - {"reduce_lr_on_plateau"}


def test_weight_decay_spares_biases_and_norms(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    assert make_trainer(tmp_path).get_decay_parameter_names(model) == ["0.weight", "2.0.weight"]


# ------------------------------------------------------------------------------------------------- optimizers by name


OF_BITSANDBYTES = [
    name.value
    for name in OptimizerNames
    if name.value.startswith(("paged_", "lion_", "ademamix", "rmsprop_"))
    or name.value in ("adamw_bnb_8bit", "adamw_8bit")
]


def class_and_arguments(library: Any, name: str) -> tuple[type, dict[str, Any]]:
    args = library.TrainingArguments(
        "unused", optim=name, learning_rate=0.1, adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=0.01, use_cpu=True
    )
    kind, arguments = library.Trainer.get_optimizer_cls_and_kwargs(args)
    if name.endswith(("ademamix_8bit", "ademamix_32bit", "ademamix")):
        arguments.pop("alpha", None)  # theirs gives the class its own default
    return kind, arguments


@pytest.mark.parametrize(
    "name", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor", *OF_BITSANDBYTES]
)
def test_an_optimizer_by_name_is_that_of_transformers(name: str) -> None:
    if name in OF_BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    assert class_and_arguments(huggingface, name) == class_and_arguments(transformers, name)


@pytest.mark.parametrize(
    ("optim", "optim_args", "expected"),
    [
        ("sgd", "momentum=0.9, nesterov=True", {"momentum": 0.9, "nesterov": True}),
        ("rmsprop", "alpha=1e-2", {"alpha": 0.01, "lr": 0.1}),
        ("adamw_torch", None, {"lr": 0.1, "fused": None}),
    ],
)
def test_further_arguments_are_the_optimizers(optim: str, optim_args: Any, expected: Any, tmp_path: Path) -> None:
    defaults = make_trainer(tmp_path, optim=optim, optim_args=optim_args).create_optimizer().defaults
    assert {name: defaults[name] for name in expected} == expected


class Words(nn.Module):
    """Has weights that are large enough for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.outer = nn.Embedding(128, 64), nn.Linear(64, 128), nn.Linear(128, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.outer(self.inner(self.words((x[:, 0].abs() * 50).long() % 128)).relu())
        return (outputs,) if labels is None else (((outputs - labels) ** 2).mean(), outputs)


@pytest.mark.parametrize(
    ("name", "package"),
    [("adafactor", "transformers"), *((name, "bitsandbytes") for name in ("adamw_8bit", "lion_8bit"))],
)
def test_a_run_with_it_is_that_of_transformers_and_is_resumed_exactly(name: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    from tests.huggingface.test_against_transformers import run

    arguments: dict[str, Any] = {"optim": name, "learning_rate": 1e-3}
    ours, theirs = (
        run(library, tmp_path / library, parts={"model": Words()}, **arguments) for library in ("ours", "theirs")
    )
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    if package == "bitsandbytes":  # embeddings are not quantized
        kinds = {name: ours.optimizer.state[value]["state1"].dtype for name, value in ours.model.named_parameters()}
        assert (kinds["words.weight"], kinds["inner.weight"]) == (torch.float32, torch.uint8)
    folder = tmp_path / "resumed"
    make_trainer(folder, StopAt(4), parts={"model": Words()}, **arguments).train()
    resumed = make_trainer(folder, parts={"model": Words()}, **arguments)
    resumed.train(resume_from_checkpoint=True)
    assert_same(everything(resumed)["model"], everything(ours)["model"])


def warmed_up(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))


class Returns(huggingface.Trainer):
    """Returns what it makes, without assigning it."""

    def create_optimizer(self, model: Any = None) -> Any:
        return torch.optim.SGD(self.model.parameters(), 0.2)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        return warmed_up(optimizer or self.optimizer)


class TakesStepsAlone(Returns):
    def create_scheduler(self, num_training_steps: int) -> Any:  # type: ignore[override]
        self.lr_scheduler = warmed_up(self.optimizer)
        return self.lr_scheduler


class TakesAnything(Returns):
    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        return warmed_up(kwargs["optimizer"])


@pytest.mark.parametrize("kind", [Returns, TakesStepsAlone, TakesAnything])
def test_an_optimizer_and_a_schedule_that_are_only_returned_are_used(kind: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=kind, logging_steps=1, num_train_epochs=1)
    before = trainer.model.linear.weight.detach().clone()
    trainer.train()
    rates_logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates_logged[:2] == pytest.approx([0.1, 0.2])
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert not torch.equal(trainer.model.linear.weight, before)


def test_gradients_are_said_to_be_complete_in_the_last_batch_of_an_update_only(tmp_path: Path) -> None:
    class Synced(huggingface.Trainer):
        seen: list[bool] = []

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(self.accelerator.sync_gradients)
            return super().training_step(*args, **kwargs)

    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 1,
    }
    make_trainer(tmp_path, kind=Synced, **arguments).train()
    assert Synced.seen == [False, False, True, False, True][: len(Synced.seen)]
    assert Synced.seen.count(True) == 2
