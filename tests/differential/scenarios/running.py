"""Runs: weights, history and run config for arguments of `train` and `evaluate`."""

from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler, Subset, SubsetRandomSampler

from pytorch_accelerated import Trainer
from pytorch_accelerated.tracking import InMemoryRunHistory
from tests.differential.scenarios.common import attempt, dataset, grid, history_of, plain, train, trainer, weights_of

_FIELDS = """
    num_epochs train_per_device_batch_size eval_per_device_batch_size gradient_accumulation_steps
    gradient_clip_value train_total_batch_size eval_total_batch_size num_update_steps_per_epoch
    num_local_update_steps_per_epoch max_num_train_steps is_local_process_zero is_world_process_zero is_distributed
    mixed_precision num_processes
""".split()

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


def datasets() -> Any:
    """Other kinds of training data."""

    rows = [dataset()[index] for index in range(12)]
    seen = {}
    for name, data in {
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


def histories() -> Any:
    """`InMemoryRunHistory` alone, where scripts see something else."""
    history = InMemoryRunHistory()
    history.update_metric("a tensor", torch.tensor(2.0))
    history.update_metric("a bool", True)
    history._set_epoch(7)
    return {
        "epoch that was set": history.current_epoch,
        "kept a bool": float(history.get_latest_metric("a bool")),
        "kind of a tensor": type(history.get_latest_metric("a tensor")).__name__,
        "item of a tensor": attempt(lambda: history.get_latest_metric("a tensor").item()),
        "deleting what never was": attempt(lambda: InMemoryRunHistory().delete_metric("a")),
    }
