"""Runs: weights, history and run config for arguments of `train` and `evaluate`."""

from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler, Subset, SubsetRandomSampler

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.tracking import InMemoryRunHistory
from tests.differential.scenarios.common import (
    attempt,
    dataset,
    grid,
    history_of,
    plain,
    train,
    trainer,
    weights_of,
)

# Of a run config, what is the same object or function on both sides only by accident, or depends on the machine.
_LEFT_OUT = {"train_dl_kwargs", "eval_dl_kwargs"}
_FIELDS = [
    "num_epochs",
    "train_per_device_batch_size",
    "eval_per_device_batch_size",
    "gradient_accumulation_steps",
    "gradient_clip_value",
    "train_total_batch_size",
    "eval_total_batch_size",
    "num_update_steps_per_epoch",
    "num_local_update_steps_per_epoch",
    "max_num_train_steps",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_distributed",
    "mixed_precision",
    "num_processes",
]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short last batch": {"rows": 10},
    "one batch": {"per_device_batch_size": 100},
    "batch size 1": {"per_device_batch_size": 1, "rows": 5},
    "no evaluation": {"eval_rows": None},
    "clipped by value": {"gradient_clip_value": 0.01},
    "accumulation": {"gradient_accumulation_steps": 3},
    "accumulation, short last update": {"gradient_accumulation_steps": 2},
    "accumulation, short last batch": {"gradient_accumulation_steps": 3, "rows": 10},
    "accumulation longer than the epoch": {"gradient_accumulation_steps": 10},
    "accumulation and clipping": {"gradient_accumulation_steps": 3, "gradient_clip_value": 0.01},
    "drop last": {"rows": 10, "train_dataloader_kwargs": {"drop_last": True}},
    "another evaluation batch size": {"eval_dataloader_kwargs": {"batch_size": 2}},
    "another training batch size": {"train_dataloader_kwargs": {"batch_size": 2}},
    "step limit at an epoch's end": {"max_num_train_steps": 3},
    "step limit of two epochs": {"max_num_train_steps": 6, "num_epochs": 5},
    "step limit within an epoch": {"max_num_train_steps": 4, "num_epochs": 5},
    "step limit beyond the epochs": {"max_num_train_steps": 7, "num_epochs": 1},
    "step limit and accumulation": {"max_num_train_steps": 2, "num_epochs": 5, "gradient_accumulation_steps": 2},
    "no epochs": {"num_epochs": 0},
}


def _seen(made: Any) -> dict[str, Any]:
    config = made.run_config
    return {
        "weights": weights_of(made.model),
        "history": history_of(made),
        "epoch": made.run_history.current_epoch,
        "config": {name: plain(getattr(config, name)) for name in _FIELDS},
    }


def arguments() -> Any:
    return grid(lambda **case: _seen(train(trainer(), **case)), ARGUMENTS)


def config_as_dict() -> Any:
    """`to_dict`, and which fields there are in the middle of a run and after an evaluation alone."""
    made = train(trainer())
    evaluated = trainer()
    evaluated.evaluate(dataset(5), dataloader_kwargs={"num_workers": 0})
    alone = evaluated.run_config
    return {
        "keys": {name: name in made.run_config.to_dict() for name in _FIELDS},
        "train_dl_kwargs": attempt(lambda: _kwargs(made.run_config.train_dl_kwargs)),
        "eval_dl_kwargs": attempt(lambda: _kwargs(made.run_config.eval_dl_kwargs)),
        "after evaluate": {name: plain(getattr(alone, name)) for name in _FIELDS},
        "assigned": attempt(lambda: setattr(made.run_config, "num_epochs", 7)),
    }


def _kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in arguments.items() if name != "num_workers"}


def default_loader_arguments() -> Any:
    made = trainer()
    made.train(dataset(), 1, per_device_batch_size=4)
    train_kwargs = made.get_default_train_dl_kwargs(4)
    eval_kwargs = made.get_default_eval_dl_kwargs(4)
    return {"train": _kwargs(train_kwargs), "eval": _kwargs(eval_kwargs)}


def samplers() -> Any:
    """Loader arguments that exclude others."""

    def run(**kwargs: Any) -> Any:
        made = trainer()
        made.train(dataset(), 2, None, 4, train_dataloader_kwargs={"num_workers": 0, **kwargs})
        return _seen(made)

    return grid(
        run,
        {
            "a sampler": {"sampler": SequentialSampler(dataset())},
            "a sampler of some": {"sampler": SubsetRandomSampler([5])},
            "collate_fn": {"shuffle": False, "collate_fn": torch.utils.data.default_collate},
        },
    )


def ready_made_loaders() -> Any:
    class OwnLoaders(Trainer):
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return DataLoader(self.train_dataset, batch_size=batch_size)

        def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Any = None) -> Any:
            return DataLoader(self.eval_dataset, batch_size=2)

    return _seen(train(trainer(OwnLoaders)))


def runs_after_each_other() -> Any:
    made = train(trainer())
    seen = {"first": _seen(made)}
    train(made, reset_run_history=False)
    seen["second"] = _seen(made)
    made.evaluate(dataset(5), 2, {"num_workers": 0})
    seen["evaluated"] = {"history": history_of(made), "epoch": made.run_history.current_epoch}
    train(made)
    seen["third"] = _seen(made)
    return seen


def evaluations() -> Any:
    seen = {}
    for name, (rows, batch_size) in {"even": (4, 2), "short last batch": (5, 2), "one batch": (5, 8)}.items():
        made = trainer()
        made.evaluate(dataset(rows), batch_size, {"num_workers": 0})
        seen[name] = history_of(made)
    return seen


def datasets() -> Any:
    """Other kinds of training data."""

    class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return dataset()[index]

    rows = [dataset()[index] for index in range(12)]
    seen = {}
    for name, data in {
        "map style": Pairs(),
        "a list of rows": rows,
        "a subset": Subset(dataset(20), range(12)),
        "an empty set": Subset(dataset(), []),
    }.items():
        made = trainer()

        def run(made: Any = made, data: Any = data) -> Any:
            made.train(data, 1, None, 4, train_dataloader_kwargs={"shuffle": False, "num_workers": 0})
            return _seen(made)

        seen[name] = attempt(run)
    return seen


def batches() -> Any:
    """What the default hooks make of batches of other shapes."""

    def run(collate: Any, loss: Any = None) -> Any:
        made = trainer()
        if loss is not None:
            made.loss_func = loss
        made.train(
            dataset(),
            1,
            dataset(5),
            4,
            train_dataloader_kwargs={"shuffle": False, "num_workers": 0},
            eval_dataloader_kwargs={"num_workers": 0},
            collate_fn=collate,
        )
        return _seen(made)

    default = torch.utils.data.default_collate

    def three(rows: Any) -> Any:
        return (*default(rows), torch.arange(len(rows)))

    return grid(
        run,
        {
            "pairs": {"collate": default},
            "a list of two": {"collate": lambda rows: list(default(rows))},
            "three items": {"collate": three},
            "one item": {"collate": lambda rows: default(rows)[:1]},
            "a tensor": {"collate": lambda rows: default(rows)[0]},
            "a dict": {"collate": lambda rows: dict(zip(("inputs", "targets"), default(rows), strict=True))},
        },
    )


def losses() -> Any:
    """Which loss is recorded, for the batch sizes that a hook reports."""

    def run(batch_size: Any, extra: Any = None) -> Any:
        class Reports(Trainer):
            def calculate_train_batch_loss(self, batch: Any) -> Any:
                result = super().calculate_train_batch_loss(batch)
                return {**result, "batch_size": batch_size(batch)}

        return history_of(train(trainer(Reports), rows=10))

    return grid(
        run,
        {
            "the batch's": {"batch_size": lambda batch: len(batch[0])},
            "one": {"batch_size": lambda batch: 1},
            "a tensor": {"batch_size": lambda batch: torch.tensor(len(batch[0]))},
            "another": {"batch_size": lambda batch: 2 * len(batch[0]) - 3},
        },
    )


class _ReadsAttributes(TrainerCallback):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
        names = [
            "model",
            "loss_func",
            "optimizer",
            "scheduler",
            "create_scheduler_fn",
            "collate_fn",
            "train_dataset",
            "eval_dataset",
            "run_config",
            "run_history",
            "callback_handler",
            "_accelerator",
            "_train_dataloader",
            "_eval_dataloader",
            "_loss_tracker",
            "_train_dl_kwargs",
            "_eval_dl_kwargs",
            "_pad_uneven_eval_batches",
            "device",
        ]
        self.seen = {name: _kind(trainer, name) for name in names}
        self.seen["device"] = str(trainer.device)
        self.seen["model is the same"] = trainer.get_model() is trainer.model
        accelerator = trainer._accelerator
        for name in [
            "num_processes",
            "process_index",
            "local_process_index",
            "is_main_process",
            "sync_gradients",
            "device",
        ]:
            self.seen[f"_accelerator.{name}"] = str(getattr(accelerator, name))
        self.seen["unwrapped"] = type(accelerator.unwrap_model(trainer.model)).__name__


def _kind(holder: Any, name: str) -> Any:
    if not hasattr(holder, name):
        return "absent"
    value = getattr(holder, name)
    return "None" if value is None else "there"


def attributes() -> Any:
    reads = _ReadsAttributes()
    made = trainer(callbacks=[reads])
    before = {
        name: _kind(made, name) for name in ("model", "run_config", "scheduler", "callback_handler", "run_history")
    }
    train(made)
    return {"in the run": reads.seen, "before": before}


def histories() -> Any:
    """`InMemoryRunHistory` alone."""
    history = InMemoryRunHistory()
    seen: dict[str, Any] = {
        "epoch at first": history.current_epoch,
        "names at first": sorted(history.get_metric_names()),
    }
    seen["latest of none"] = attempt(lambda: history.get_latest_metric("nothing"))
    seen["values of none"] = attempt(lambda: list(history.get_metric_values("nothing")))
    history.update_metric("a", 1)
    history.update_metric("a", 2.5)
    history.set_metric_name_prefix("x_")
    seen["prefix"] = history.metric_name_prefix
    history.update_metric("b", 3)
    seen["names"] = sorted(name for name in history.get_metric_names() if "nothing" not in name)
    seen["a without its prefix"] = attempt(lambda: history.get_latest_metric("a"))
    seen["with its prefix"] = attempt(lambda: history.get_latest_metric("x_b"))
    history.set_metric_name_prefix()
    seen["a"] = list(history.get_metric_values("a"))
    seen["latest a"] = history.get_latest_metric("a")
    history._increment_epoch()
    seen["epoch"] = history.current_epoch
    history._set_epoch(7)
    seen["epoch that was set"] = history.current_epoch
    history.delete_metric("a")
    seen["a, deleted"] = attempt(lambda: history.get_latest_metric("a"))
    seen["deleting what never was"] = attempt(lambda: InMemoryRunHistory().delete_metric("a"))
    for name, value in {
        "a tensor": torch.tensor(2.0),
        "a bool": True,
        "a string": "text",
        "a dict": {"k": 1},
        "a matrix": torch.eye(2),
        "None": None,
    }.items():
        seen[f"taken {name}"] = attempt(lambda name=name, value=value: history.update_metric(name, value))
        seen[f"kept {name}"] = attempt(lambda name=name: float(history.get_latest_metric(name)))
    history.reset()
    seen["after reset"] = [sorted(history.get_metric_names()), history.current_epoch]
    return seen


def metrics_of_any_kind() -> Any:
    """Metrics that aren't numbers, recorded in a run with the default callbacks."""

    def run(value: Any) -> Any:
        class Records(TrainerCallback):
            def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
                trainer.run_history.update_metric("recorded", value)

        from pytorch_accelerated.trainer import DEFAULT_CALLBACKS

        made = train(trainer(callbacks=[Records, *DEFAULT_CALLBACKS]))
        return len(made.run_history.get_metric_values("recorded"))

    return grid(
        run,
        {
            "a number": {"value": 1.5},
            "a tensor": {"value": torch.tensor(1.5)},
            "a dict": {"value": {"precision": 0.5}},
            "a matrix": {"value": torch.eye(3)},
            "a curve": {"value": (torch.zeros(3), torch.ones(3))},
            "a string": {"value": "good"},
        },
    )
