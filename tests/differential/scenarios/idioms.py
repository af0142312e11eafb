"""What public scripts were seen to do, in our own words."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    LogMetricsCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    TrainerCallback,
)
from pytorch_accelerated.schedulers import CosineLrScheduler
from pytorch_accelerated.tracking import InMemoryRunHistory, LossTracker
from pytorch_accelerated.utils import ModelEma
from tests.differential.scenarios.common import (
    attempt,
    dataset,
    history_of,
    model,
    plain,
    train,
    trainer,
    weights_of,
)


def own_training_epoch() -> Any:
    """A whole training epoch of one's own, with the events in it."""

    class OwnEpoch(Trainer):
        def _run_train_epoch(self, train_dl: Any) -> None:
            self.train_epoch_start()
            self._loss_tracker.reset()
            self.callback_handler.call_event("on_train_epoch_start", self)
            for batch in train_dl:
                self.callback_handler.call_event("on_train_step_start", self)
                output = self.calculate_train_batch_loss(batch)
                self._loss_tracker.update(output["loss"].item(), output["batch_size"])
                self.callback_handler.call_event("on_train_step_end", self, batch_output=output, batch=batch)
                self.backward_step(output["loss"])
                self.optimizer_step()
                self.optimizer_zero_grad()
            self.train_epoch_end()
            self.run_history.update_metric("train_loss_epoch", self._loss_tracker.average)
            self.callback_handler.call_event("on_train_epoch_end", self)

    made = train(trainer(OwnEpoch))
    return {"weights": weights_of(made.model), "history": history_of(made)}


def around_epochs() -> Any:
    """Overrides that do something around what there is, with fewer arguments than there are today."""
    calls: list[str] = []

    class Around(Trainer):
        def _run_train_epoch(self, train_dl: Any) -> None:
            calls.append(f"train {len(train_dl)}")
            super()._run_train_epoch(train_dl)

        def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True) -> None:
            calls.append(f"eval {len(valid_dl)} {is_training}")
            super()._run_eval_epoch(valid_dl, is_training)

    made = train(trainer(Around))
    made.evaluate(dataset(5), 4, {"num_workers": 0})
    return {"calls": calls, "weights": weights_of(made.model)}


def averages_with_a_growing_decay() -> Any:
    """A decay that depends on the number of updates, in a subclass of the average."""

    class Growing(ModelEma):
        def __init__(self, network: Any, decay: float = 0.9999) -> None:
            super().__init__(network, decay)
            self.num_updates = 0
            self.decay_fn = lambda updates: decay * (1 - math.exp(-updates / 10))
            self.decay = self.decay_fn(self.num_updates)

        def update(self, network: Any) -> None:
            super().update(network)
            self.num_updates += 1
            self.decay = self.decay_fn(self.num_updates)

    def by_hand() -> Any:
        source = model()
        average = Growing(source, 0.9)
        for _ in range(3):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.mul_(1.5)
            average.update(source)
        return weights_of(average.module)

    def in_a_run() -> Any:
        callback = ModelEmaCallback(decay=0.9, model_ema=Growing, evaluate_during_training=False)
        made = train(trainer(callbacks=[callback]), rows=4)  # one update an epoch
        return {"average": weights_of(callback.ema_model.module), "model": weights_of(made.get_model())}

    return {"by hand": attempt(by_hand), "in a run": attempt(in_a_run)}


def progress_bars_of_ones_own() -> Any:
    """Lengths and ranks that such a callback asks for."""
    seen: list[Any] = []

    class Bar(TrainerCallback):
        def __init__(self) -> None:
            self.count: Any = None

        def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
            self.count = 0
            seen.append(["train", len(trainer._train_dataloader), trainer._accelerator.is_local_main_process])

        def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
            self.count += 1

        def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
            seen.append(["eval", trainer._eval_dataloader.__len__(), self.count])

    train(trainer(callbacks=[Bar]))
    return plain(seen)


def accelerator_in_callbacks() -> Any:
    seen: dict[str, Any] = {}

    class Uses(TrainerCallback):
        def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            outputs = trainer._accelerator.gather(batch_output["model_outputs"])
            seen["gathered"] = list(outputs.shape)

        def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer._accelerator.wait_for_everyone()
            network = trainer._accelerator.unwrap_model(trainer.model)
            seen["unwrapped"] = weights_of(network)
            trainer._accelerator.print("one line")
            trainer.print("two", "things")

    train(trainer(callbacks=[Uses]))
    return seen


def files_of_ones_own() -> Any:
    """Histories and configurations that are written to files."""
    seen: dict[str, Any] = {}

    class Writes(TrainerCallback):
        def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
            names = sorted(trainer.run_history.get_metric_names())
            metrics = np.array([trainer.run_history.get_metric_values(name) for name in names])
            table = np.concatenate(([np.arange(1, len(metrics[0]) + 1)], metrics), axis=0).T
            with open("history.csv", "w") as file:
                csv.writer(file).writerows([["epoch", *names], *table.tolist()])
            seen["shape"] = list(table.shape)
            wanted = ("num_epochs", "train_per_device_batch_size", "num_processes")
            seen["config"] = {name: vars(trainer.run_config)[name] for name in wanted}

    class ReadsItems(TrainerCallback):
        def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
            seen["items"] = attempt(lambda: [trainer.run_config[name] for name in ("num_epochs", "num_processes")])

    train(trainer(callbacks=[Writes, ReadsItems]))
    seen["lines"] = len(Path("history.csv").read_text().splitlines())
    return plain(seen)


def saving_the_best_by_hand() -> Any:
    """A callback that keeps the best itself, with another name for the trainer."""

    class Keeps(TrainerCallback):
        def __init__(self) -> None:
            self.best: Any = None
            self.epoch: Any = None

        def on_training_run_start(self, args: Any, **kwargs: Any) -> None:
            self.best = None

        def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            latest = trainer.run_history.get_latest_metric("eval_loss_epoch")
            if self.best is None or latest < self.best:
                self.best = latest
                self.epoch = trainer.run_history.current_epoch
                trainer.save_checkpoint("mine.pt", checkpoint_kwargs={"eval_loss_epoch": self.best})

        def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer.print(f"best {self.best}", f"epoch {self.epoch}")
            trainer.load_checkpoint("mine.pt")

    keeps = Keeps()
    made = train(trainer(callbacks=[keeps], lr=0.9), num_epochs=4)
    return {"best": keeps.best, "epoch": keeps.epoch, "weights": weights_of(made.get_model())}


def histories_of_ones_own() -> Any:
    seen: list[str] = []

    class Prints(InMemoryRunHistory):
        def update_metric(self, metric_name: str, metric_value: Any) -> None:
            seen.append(metric_name)
            super().update_metric(metric_name, metric_value)

    made = train(trainer(run_history=Prints()))
    return {"updated": seen, "history": history_of(made)}


def losses_with_parts() -> Any:
    """Trackers for the parts of a loss, reset and recorded by hooks."""

    class Parts(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.trackers = {name: LossTracker() for name in ("first", "second")}

        def train_epoch_start(self) -> None:
            super().train_epoch_start()
            for tracker in self.trackers.values():
                tracker.reset()

        def calculate_train_batch_loss(self, batch: Any) -> Any:
            inputs, targets = batch[0], batch[1]
            outputs = self.model(inputs)
            parts = {"first": (outputs - targets).abs().mean(), "second": outputs.square().mean()}
            for name, part in parts.items():
                self.trackers[name].update(self.gather(part).detach().mean().item(), len(inputs))
            return {"loss": sum(parts.values()), "model_outputs": None, "batch_size": len(inputs)}

        def train_epoch_end(self) -> None:
            for name, tracker in self.trackers.items():
                self.run_history.update_metric(f"train_{name}", tracker.average)

    return history_of(train(trainer(Parts), rows=10))


def arguments_of_ones_own() -> Any:
    """Subclasses with other constructors and other signatures of `train`."""

    class Configured(Trainer):
        def __init__(self, network: Any, rate: float, **kwargs: Any) -> None:
            self.rate = rate
            super().__init__(
                model=network,
                loss_func=nn.MSELoss(),
                optimizer=torch.optim.SGD(network.parameters(), lr=rate),
                **kwargs,
            )

        def train(self, data: Any, epochs: int = 2, **kwargs: Any) -> Any:  # type: ignore[override]
            kwargs.setdefault("per_device_batch_size", 4)
            super().train(train_dataset=data, num_epochs=epochs, **kwargs)
            return self

    made = Configured(model(), 0.1, callbacks=[LogMetricsCallback])
    made.train(dataset(), train_dataloader_kwargs={"shuffle": False, "num_workers": 0})
    return {"weights": weights_of(made.model), "history": history_of(made)}


def callbacks_added_later() -> Any:
    calls: list[str] = []

    class Late(TrainerCallback):
        def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            calls.append("late")

    class Adds(TrainerCallback):
        def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
            trainer.callback_handler.add_callback(Late())

    made = trainer(callbacks=[Adds])
    train(made)
    return calls


def groups_with_rates_of_their_own() -> Any:
    """Groups of parameters, one of them added between two runs, and a schedule over all."""
    network = model()
    optimizer = torch.optim.SGD([{"params": network[0].parameters(), "lr": 0.05}], lr=0.1)
    made = Trainer(network, nn.MSELoss(), optimizer, callbacks=[])
    for parameter in network[2].parameters():
        parameter.requires_grad_(False)
    train(made)
    for parameter in network[2].parameters():
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": list(network[2].parameters()), "lr": 0.01})
    train(made, eval_rows=None)
    return {"weights": weights_of(network), "rates": [group["lr"] for group in made.optimizer.param_groups]}


def factories_that_take_nothing() -> Any:
    """`create_scheduler_fn` given as a flag, where `create_scheduler` is overridden."""

    class OwnScheduler(Trainer):
        def create_scheduler(self) -> Any:
            return torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    made = trainer(OwnScheduler)
    outcome = attempt(lambda: weights_of(train(made, create_scheduler_fn=made.create_scheduler).model))

    class ByKeyword(Trainer):
        def create_scheduler(self) -> Any:
            return self.create_scheduler_fn(optimizer=self.optimizer, steps=len(self._train_dataloader))

    def factory(optimizer: Any, steps: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, steps, 0.1)

    keyword = attempt(lambda: weights_of(train(trainer(ByKeyword), create_scheduler_fn=factory).model))
    return {"of the trainer": outcome, "with more arguments": keyword}


def losses_that_change() -> Any:
    """Other losses for training and evaluation, put in place by hooks."""

    class TwoLosses(Trainer):
        def train_epoch_start(self) -> None:
            super().train_epoch_start()
            self.loss_func = nn.L1Loss()

        def eval_epoch_start(self) -> None:
            super().eval_epoch_start()
            self.loss_func = nn.MSELoss()

    made = train(trainer(TwoLosses))
    return {"weights": weights_of(made.model), "history": history_of(made)}


def data_that_changes() -> Any:
    """A callback that changes the dataset between epochs."""

    class Scaled(torch.utils.data.Dataset):  # type: ignore[type-arg]
        factor = 1.0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            inputs, targets = dataset()[index]
            return inputs * self.factor, targets

    class Changes(TrainerCallback):
        def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
            if trainer.run_history.current_epoch == trainer.run_config.num_epochs - 1:
                trainer.train_dataset.factor = 2.0

    made = trainer(callbacks=[Changes])
    made.train(Scaled(), 3, None, 4, train_dataloader_kwargs={"shuffle": False, "num_workers": 0})
    return {"weights": weights_of(made.model), "history": history_of(made)}


def best_models_of_several_runs() -> Any:
    """One trainer, several runs with other data, the best of each kept."""
    made = trainer(callbacks=[SaveBestModelCallback(save_path="best.pt")])
    seen = {}
    for rows in (8, 12):
        train(made, rows=rows, create_scheduler_fn=None)
        seen[str(rows)] = weights_of(made.get_model())
    return seen


def predictions_gathered_by_hooks() -> Any:
    """Outputs collected in the evaluation hook of a subclass, computed at its end."""

    class Accuracy(Trainer):
        def evaluation_run_start(self) -> None:
            self.rows: list[float] = []

        def training_run_start(self) -> None:
            self.rows = []

        def calculate_eval_batch_loss(self, batch: Any) -> Any:
            with torch.no_grad():
                outputs = self.model(batch[0])
                loss = self.loss_func(outputs, batch[1])
            self.rows.extend(self._accelerator.gather(outputs).flatten().tolist())
            return {"loss": loss, "model_outputs": outputs, "batch_size": batch[0].size(0)}

        def eval_epoch_end(self) -> None:
            self.run_history.update_metric("mean_output", sum(self.rows) / len(self.rows))
            self.rows = []

    made = train(trainer(Accuracy, callbacks=[LogMetricsCallback]))
    seen = {"trained": history_of(made)}
    made.evaluate(dataset(7), 4, {"num_workers": 0})
    return {**seen, "evaluated": history_of(made)}


def schedules_of_several_groups() -> Any:
    network = model()
    groups = [{"params": network[0].parameters(), "lr": 0.1}, {"params": network[2].parameters(), "lr": 0.01}]
    made = Trainer(network, nn.MSELoss(), torch.optim.SGD(groups), callbacks=[])
    train(made, create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(lr_min=0.0))
    return [group["lr"] for group in made.optimizer.param_groups]
