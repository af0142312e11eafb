"""Situations of public bug reports, in which other trainers were wrong: what is right, on both faces.

A test names the report. What is expected comes from the report's description or from a loop by hand.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    TrainerCallback,
)
from pytorch_accelerated.extras.activations import checkpoint_activations
from pytorch_accelerated.huggingface import EarlyStoppingCallback as StopEarly
from pytorch_accelerated.huggingface import Trainer as HuggingFaceTrainer
from pytorch_accelerated.huggingface import TrainingArguments
from tests.huggingface.runs import StopAt
from tests.support.reference import regression_data
from tests.support.resuming import SaveAndStop, assert_same

FACES = ("native", "huggingface")
both_faces = pytest.mark.parametrize("face", FACES)


class Rows(Dataset[Any]):
    """Rows with their numbers."""

    def __init__(self, size: int) -> None:
        self.inputs, self.targets = regression_data(size, outputs=1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": self.inputs[row], "labels": self.targets[row], "row": row}


class Stream(IterableDataset[Any]):
    """The same rows without a length."""

    def __init__(self, size: int) -> None:
        self.rows = Rows(size)

    def __iter__(self) -> Iterator[Any]:
        return map(self.rows.__getitem__, range(len(self.rows)))


class Net(nn.Module):
    """A linear model that returns its loss, and notes the rows of its training batches, in `updates` by update."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.linear = nn.Linear(3, 1).double()
        self.updates: list[list[list[int]]] = [[]]

    def forward(self, x: torch.Tensor, labels: torch.Tensor, row: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.updates[-1].append(row.tolist())
        outputs = self.linear(x)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


class Run:
    """A run on either face, with SGD.

    Attributes:
        net: the model.
        trainer: of the face.
        updates: the rows of each batch of each update.
        rates: the learning rate of each update.
    """

    def __init__(self, face: str, folder: Path, *callbacks: Any, net: Any = None, base: Any = None, **arguments: Any):
        self.face, self.folder, self.callbacks, self.arguments = face, folder, callbacks, arguments
        self.net = net or Net()
        self.base = base or {"native": Trainer, "huggingface": HuggingFaceTrainer}[face]
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.optimizer.register_step_post_hook(lambda *_: self._close_update())
        self.rates: list[float] = []
        self.trainer: Any = None

    def train(self, data: Any, epochs: int, evaluated: Any = None, *, resumes: bool = False, **options: Any) -> "Run":
        """Train on rows in their order, on a stream or a ready loader; with `resumes`, from the newest state.

        Options are ``batch_size``, ``accumulation`` and ``schedule``, a function of the optimizer.
        """
        options = {"batch_size": 4, "accumulation": 1, "schedule": None, **options}
        getattr(self, f"_train_{self.face}")(data, epochs, evaluated, resumes, **options)
        return self

    def _train_native(
        self, data: Any, epochs: int, evaluated: Any, resumes: bool, batch_size: int, accumulation: int, schedule: Any
    ) -> None:
        self.trainer = self.base(self.net, None, self.optimizer, callbacks=self.callbacks)
        self.trainer.train(
            data,
            epochs,
            evaluated,
            per_device_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            create_scheduler_fn=schedule,
            train_dataloader_kwargs={} if isinstance(data, (DataLoader, IterableDataset)) else {"shuffle": False},
            resume_from=self.folder if resumes else None,
            **self.arguments,
        )

    def _train_huggingface(
        self, data: Any, epochs: int, evaluated: Any, resumes: bool, batch_size: int, accumulation: int, schedule: Any
    ) -> None:
        is_loader = isinstance(data, DataLoader)
        base: Any = type("Face", (self.base,), {"get_train_dataloader": lambda _: data} if is_loader else {})
        defaults = {"save_strategy": "no", "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
        args = TrainingArguments(
            str(self.folder),
            num_train_epochs=epochs,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=0,
            use_cpu=True,
            disable_tqdm=True,
            **{**defaults, **self.arguments},
        )
        self.trainer = base(
            self.net,
            args,
            train_dataset=data.dataset if is_loader else data,
            eval_dataset=evaluated,
            optimizers=(self.optimizer, schedule and schedule(self.optimizer)),
            callbacks=list(self.callbacks),
        )
        self.trainer.train(resume_from_checkpoint=resumes)

    def _close_update(self) -> None:
        self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
        self.net.updates.append([])

    @property
    def updates(self) -> list[list[list[int]]]:
        return [update for update in self.net.updates if update]

    @property
    def rows(self) -> list[int]:
        """The rows of all updates."""
        return [row for update in self.updates for batch in update for row in batch]


def stop_at(face: str, folder: Path, update: int) -> Any:
    """A callback that saves after an update and ends the run there."""
    return SaveAndStop(folder / f"step_{update}", update) if face == "native" else StopAt(update)


def by_hand(updates: list[list[int]], size: int, rates: list[float] | None = None) -> Net:
    """The model after updates with these rows, each a mean over its own."""
    net, data = Net(), Rows(size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for number, rows in enumerate(updates):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[number]
        (net.linear(data.inputs[rows]) - data.targets[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def assert_close(actual: Any, expected: Net) -> None:
    torch.testing.assert_close(actual.linear.state_dict(), expected.linear.state_dict(), rtol=1e-12, atol=1e-12)


@both_faces
@pytest.mark.parametrize(("accumulation", "sizes"), [(4, [4, 4, 2]), (32, [10])])
def test_the_last_update_of_an_epoch_has_the_batches_that_are_left_burn_5695(
    face: str, accumulation: int, sizes: list[int], tmp_path: Path
) -> None:
    def cosine(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(sizes))

    run = Run(face, tmp_path).train(Rows(40), 2, accumulation=accumulation, schedule=cosine)
    assert [len(update) for update in run.updates] == 2 * sizes
    expected = [0.025 * (1 + math.cos(math.pi * update / (2 * len(sizes)))) for update in range(2 * len(sizes))]
    assert run.rates == pytest.approx(expected, rel=1e-12)


@both_faces
def test_no_batch_of_an_epoch_counts_in_an_update_of_the_next_PaddleFormers_4365(face: str, tmp_path: Path) -> None:
    run = Run(face, tmp_path).train(Rows(17), 2, accumulation=4)
    four = [list(range(start, start + 4)) for start in range(0, 16, 4)]
    assert run.updates == 2 * [four, [[16]]]
    assert_close(run.net, by_hand(2 * [list(range(16)), [16]], 17))


@both_faces
def test_a_ready_loader_that_follows_the_global_seed_resumes_in_epoch_2_transgenic_59(
    face: str, tmp_path: Path
) -> None:
    def loader() -> Any:
        return DataLoader(Rows(22), batch_size=4, shuffle=True)

    torch.manual_seed(7)
    whole = Run(face, tmp_path / "whole").train(loader(), 3)
    torch.manual_seed(7)
    Run(face, tmp_path / "run", stop_at(face, tmp_path / "run", 9)).train(loader(), 3)
    torch.manual_seed(99)
    torch.randn(5)
    resumed = Run(face, tmp_path / "run").train(loader(), 3, resumes=True)
    assert resumed.updates == whole.updates[9:]
    second = [row for update in whole.updates[6:12] for batch in update for row in batch]
    assert sorted(second) == list(range(22))
    assert_same(resumed.net.state_dict(), whole.net.state_dict())


@both_faces
def test_a_stream_that_is_resumed_in_epoch_1_is_whole_in_the_next_ones_open_instruct_681(
    face: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    length = {} if face == "native" else {"max_steps": 12}  # which a stream has to be told there
    Run(face, folder, stop_at(face, folder, 2), **length).train(Stream(14), 3)
    resumed = Run(face, folder, **length).train(Stream(14), 3, resumes=True)
    assert resumed.rows == [*range(8, 14), *range(14), *range(14)]


@both_faces
@pytest.mark.parametrize("update", [10, 12])
def test_no_batch_is_repeated_or_left_out_after_a_resume_mini_trainer_79(
    face: str, update: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    interrupted = Run(face, folder, stop_at(face, folder, update)).train(Rows(47), 2, batch_size=2, accumulation=2)
    resumed = Run(face, folder).train(Rows(47), 2, batch_size=2, accumulation=2, resumes=True)
    assert interrupted.rows + resumed.rows == 2 * list(range(47))


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1), nn.Dropout(0.3))


class Blocks(Net):
    """The same with two blocks of convolution, BatchNorm and dropout in front."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            parts = (nn.Unflatten(1, (1, 3)), Block(), Block(), nn.Flatten(), nn.Linear(3, 1))
            self.linear = nn.Sequential(*parts).double()


@pytest.mark.filterwarnings("ignore:.*The update is left out")
@pytest.mark.parametrize(("face", "has_bad_batch"), [("native", False), ("native", True), ("huggingface", False)])
def test_statistics_are_the_same_with_activations_computed_twice_YOLO_Master_262(
    face: str, has_bad_batch: bool, tmp_path: Path
) -> None:
    data = Rows(24)
    data.inputs[9] = math.nan if has_bad_batch else 0.0
    arguments = {"nonfinite_policy": "skip"} if has_bad_batch else {}
    nets = []
    for is_checkpointed in (False, True):
        net = Blocks()
        if is_checkpointed:
            assert checkpoint_activations(net, Block) == 2
        torch.manual_seed(3)
        nets.append(Run(face, tmp_path, net=net, **arguments).train(data, 1, accumulation=2).net)
    states = [net.state_dict() for net in nets]
    assert_same(states[1], states[0])
    # Three updates of two batches; one that is skipped has never been.
    assert int(states[1]["linear.1.1.num_batches_tracked"]) == (4 if has_bad_batch else 6)


class Ramp(ModelEmaCallback):
    """An average whose decay follows a plain counter."""

    updates = 0

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.updates += 1
        self.ema_model.decay = self.updates / (self.updates + 1)
        super().on_optimizer_step_end(trainer, **kwargs)


class SavedRamp(Ramp):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.updates = state["updates"]


def test_a_decay_that_ramps_goes_on_after_a_resume_lightly_train_892(tmp_path: Path) -> None:
    def ramp(kind: type[Ramp]) -> Ramp:
        return kind(save_path=tmp_path / "average.pt", evaluate_during_training=False)

    folder = tmp_path / "run"
    whole, resumed = ramp(SavedRamp), ramp(SavedRamp)
    Run("native", tmp_path / "whole", whole).train(Rows(20), 2)
    Run("native", folder, ramp(SavedRamp), stop_at("native", folder, 7)).train(Rows(20), 2)
    Run("native", folder, resumed).train(Rows(20), 2, resumes=True)
    assert resumed.ema_model.decay == 10 / 11
    assert_same(resumed.ema_model.module.state_dict(), whole.ema_model.module.state_dict())


VALUES = (1.0, 0.9, 0.8, 0.85, 0.7, 0.75, 0.76, 0.5, 0.4)  # the best is the fifth; with patience 2 the seventh ends it


class GivenValues(TrainerCallback):
    """Records the given values as the metric of the epochs."""

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("eval_given", VALUES[trainer.run_state.epochs])


@pytest.mark.parametrize("stops_first", [True, False])
@both_faces
def test_patience_starts_anew_at_each_improvement_in_either_order_GLiNER2_70(
    face: str, stops_first: bool, tmp_path: Path
) -> None:
    if face == "native":
        best = SaveBestModelCallback(tmp_path / "best.pt", "eval_given", load_saved_checkpoint=False)
        callbacks = [best, EarlyStoppingCallback(2, watch_metric="eval_given")]
        run = Run(face, tmp_path, GivenValues(), *callbacks[:: -1 if stops_first else 1])
        run.train(Rows(4), 9, evaluated=Rows(4))
        assert (run.trainer.run_state.epochs, best.best_metric_epoch) == (7, 5)
        return

    class Given(HuggingFaceTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            metrics: dict[str, float] = {"eval_given": VALUES[self.state.global_step - 1]}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    arguments = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    arguments |= {"metric_for_best_model": "eval_given", "greater_is_better": False}
    run = Run(face, tmp_path, StopEarly(2), base=Given, **arguments).train(Rows(4), 9, evaluated=Rows(4))
    assert (run.trainer.state.global_step, run.trainer.state.best_global_step) == (7, 5)
