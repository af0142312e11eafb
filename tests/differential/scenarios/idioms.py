"""What public scripts were seen to do, in our own words."""

from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.schedulers import CosineLrScheduler
from pytorch_accelerated.tracking import InMemoryRunHistory, LossTracker
from tests.differential.scenarios.common import attempt, history_of, model, train, trainer, weights_of


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


def configurations_read_as_items() -> Any:
    seen: dict[str, Any] = {}

    class ReadsItems(TrainerCallback):
        def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
            seen["items"] = attempt(lambda: [trainer.run_config[name] for name in ("num_epochs", "num_processes")])

    train(trainer(callbacks=[ReadsItems]))
    return seen


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


def schedules_of_several_groups() -> Any:
    network = model()
    groups = [{"params": network[0].parameters(), "lr": 0.1}, {"params": network[2].parameters(), "lr": 0.01}]
    made = Trainer(network, nn.MSELoss(), torch.optim.SGD(groups), callbacks=[])
    train(made, create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(lr_min=0.0))
    return [group["lr"] for group in made.optimizer.param_groups]
