"""Runs under torchrun: differences between ranks neither hang the run nor change a number."""

import os
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ArgumentTypeError, HookOutputError, StopTrainingError
from tests.chaos.size import some
from tests.support.recording import EVENTS
from tests.support.reference import assert_same_numbers, assert_same_parameters, regression_data, sgd, tiny_model

RANKS = int(os.environ["WORLD_SIZE"])
LAST = RANKS - 1


def trainer_of(*callbacks: Any, base: type[Trainer] = Trainer, model: nn.Module | None = None) -> Trainer:
    model = tiny_model() if model is None else model
    trainer = base(model, nn.MSELoss(), sgd(model), callbacks=callbacks, seed=3)
    assert trainer._ranks.count == RANKS > 1
    return trainer


def same_on_all_ranks(trainer: Trainer, value: Any) -> bool:
    everyones = trainer._ranks.exchange(value)
    return all(one == everyones[0] for one in everyones)


# ------------------------------------------------------ what layers have kept for themselves is what the first rank has


class Keeper(nn.Module):
    """Keeps things of many kinds in buffers, which training changes differently on each rank."""

    seen: torch.Tensor
    mask: torch.Tensor
    means: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("means", torch.zeros(1, 3))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += len(x)
                self.mask |= x.mean(0) > 0
                self.means += x.mean(0)
        return self.head(self.norm(x) + self.means[0] * self.mask + 1 / self.seen)


torch.manual_seed(1)
keeper = Keeper().double()
data = regression_data(8 * RANKS)
held_out = regression_data(2 * RANKS + 1)
trainer = trainer_of(model=keeper)
history = trainer.train(data, 2, held_out, per_device_batch_size=4)

weights = [{name: tensor.clone() for name, tensor in keeper.state_dict().items()}]
torch.distributed.broadcast_object_list(weights, src=0)
alone = Keeper().double().eval()
alone.load_state_dict(weights[0])
with torch.no_grad():
    expected = alone(held_out[0])
loss = nn.functional.mse_loss(expected, held_out[1]).item()
assert 0.01 < loss < 100, "a problem that has numbers worth comparing"
assert_same_numbers(history.get_latest_metric("eval_loss_epoch"), loss)
assert_same_numbers(trainer.evaluate(held_out, 2)["evaluation_loss"], loss)
assert_same_numbers(trainer.predict(held_out, 1), expected)

# Models that were never the same are those of the first rank.
different = trainer_of(model=tiny_model(seed=trainer._ranks.index))
with torch.no_grad():
    assert_same_numbers(different.predict(held_out, 2), tiny_model(seed=0)(held_out[0]))

# ----------------------------------------------------------------- gathering while training, down to the last sample


class GathersWhileTraining(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []
        self.at_update: list[int] = []
        self.starts = 0

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.starts += len(trainer.gather(torch.tensor(1)))

    def on_train_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
        self.rows.append(trainer.gather(batch[0]))

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.at_update.append(len(trainer.gather(torch.tensor([1]))))


class GathersInTheHook(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.in_hook = [*getattr(self, "in_hook", []), self.gather(batch[0])]
        return super().calculate_train_batch_loss(batch)


for batch_size, steps in some([(1, 1), (2, 3)], [(1, 1), (2, 1), (2, 3)]):
    last = 2 * RANKS * batch_size + 1
    for size in some(sorted({1, RANKS, RANKS + 1, last - 2, last - 1, last}), range(1, last + 1)):
        data = regression_data(size)
        plain = trainer_of()
        plain.train(data, 1, None, batch_size, None, steps)
        trainer = trainer_of(seen := GathersWhileTraining(), base=GathersInTheHook)
        trainer.train(data, 1, None, batch_size, None, steps)
        assert_same_parameters(trainer.model, plain.model, tolerance=0)
        assert seen.at_update == [RANKS] * trainer.run_state.updates
        in_hook = torch.cat(trainer.in_hook)  # type: ignore[attr-defined]
        assert torch.equal(in_hook.sort(0)[0], data[0].sort(0)[0]), "each row once, on every rank"
        if trainer._ranks.is_first:
            assert torch.equal(torch.cat(seen.rows), in_hook)
            assert seen.starts == sum(trainer._ranks.count if len(rows) >= RANKS else len(rows) for rows in seen.rows)

# --------------------------------------------------------------------------- one rank stops at any event, and all stop


class LastRankStops(TrainerCallback):
    def __init__(self, event: str) -> None:
        self.seen: list[str] = []
        setattr(self, event, self.stop)

    def stop(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer._ranks.index == LAST:
            raise StopTrainingError("enough")

    def on_stop_training_error(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seen.append("stopped")


class GathersEverywhere(GathersWhileTraining):
    def on_eval_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.gather(torch.tensor(1))

    def on_eval_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
        trainer.gather(batch[0])

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.gather(torch.ones(2))

    on_train_epoch_end = on_training_run_epoch_end = on_evaluation_run_end = on_eval_epoch_end

    def on_prediction_step_end(self, trainer: Trainer, predictions: Any, **kwargs: Any) -> None:
        trainer.gather(predictions)


other_than_runs = ("on_init_end", "on_exception", "on_stop_training_error", "on_non_finite_loss", "on_loss_spike")
data, held_out = regression_data(2 * RANKS + 1), regression_data(RANKS + 1)
for event in EVENTS:
    if event in other_than_runs:
        continue
    trainer = trainer_of(stops := LastRankStops(event), GathersEverywhere())
    if "prediction" in event:
        with torch.no_grad():
            expected = trainer.model(held_out[0])
        predictions = trainer.predict(held_out, 1)
        assert_same_numbers(predictions, expected)
        continue
    if "evaluation" in event:
        trainer.evaluate(held_out, 1)
    else:
        trainer.train(data, 2, held_out, per_device_batch_size=1)
        assert same_on_all_ranks(trainer, trainer.run_state.state_dict()["updates"]), event
        names = list(trainer.run_history.get_metric_names())
        assert same_on_all_ranks(trainer, [trainer.run_history.get_metric_values(name) for name in names]), event
    assert stops.seen == ([] if event.endswith("run_end") else ["stopped"]), event
    assert not trainer._accelerator._models, "the model was not released"

# Before there is anything for the others to go on with, it is an error, and no rank waits for ever.


def raising(hook: str) -> type[Trainer]:
    def stop(self: Trainer, batch: Any) -> Any:
        raise StopTrainingError("too early")

    return type("StopsTooEarly", (Trainer,), {hook: stop})


runs: dict[str, Any] = {
    "calculate_train_batch_loss": lambda trainer: trainer.train(data, 1),
    "calculate_eval_batch_loss": lambda trainer: trainer.evaluate(data),
    "calculate_predict_batch_outputs": lambda trainer: trainer.predict(data),
}
for hook, run in runs.items():
    with pytest.raises(HookOutputError, match=f"`stop` raised StopTrainingError on rank {trainer._ranks.index}"):
        run(trainer_of(base=raising(hook)))

# --------------------------------------------------- a gather that not all ranks call is an error on all, and no hang


class LonelyGather(TrainerCallback):
    """One rank gathers more often than the others."""

    def __init__(self, event: str, only_rank: int) -> None:
        self.only_rank = only_rank
        setattr(self, event, self.gather)

    def gather(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer._ranks.index == self.only_rank:
            trainer.gather(torch.ones(1))


for event, run in {
    "on_eval_step_end": lambda trainer: trainer.evaluate(regression_data(4 * RANKS), 2),  # full rounds
    "on_eval_step_start": lambda trainer: trainer.evaluate(
        regression_data(RANKS + LAST), 1
    ),  # rounds with an idle rank
    "on_prediction_step_end": lambda trainer: trainer.predict(regression_data(4 * RANKS), 2),
    "on_train_epoch_end": lambda trainer: trainer.train(data, 1),
}.items():
    for rank in some((0, LAST), range(RANKS)):
        with pytest.raises(ArgumentTypeError, match="`gather` was called on some ranks but not on rank"):
            run(trainer_of(LonelyGather(event, rank)))

print("done")
