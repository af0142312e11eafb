"""Situations of public bug reports, in which other trainers were wrong: what is right, on both faces.

A test names the report. What is expected comes from the report's description or from a loop by hand.
"""

import _thread
import functools
import gc
import json
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    LogMetricsCallback,
    ModelEmaCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    RecordMeansCallback,
    ResultCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import SignalExit
from pytorch_accelerated.extras.activations import checkpoint_activations
from pytorch_accelerated.huggingface import EarlyStoppingCallback as StopEarly
from pytorch_accelerated.huggingface import Trainer as HuggingFaceTrainer
from pytorch_accelerated.huggingface import TrainerCallback as FaceCallback
from pytorch_accelerated.huggingface import TrainingArguments
from pytorch_accelerated.record.bars import BarDisplay
from tests.huggingface.runs import StopAt
from tests.proving.faults import Own
from tests.support.dispositions import default_signals
from tests.support.processes import run_forked, run_on_ranks
from tests.support.reference import regression_data
from tests.support.resuming import SaveAndStop, assert_same
from tests.support.terminal import in_a_terminal
from tests.training.test_host_reads import CountAfterUpdates, HostReads, reads_within

FACES = ("native", "huggingface")
both_faces = pytest.mark.parametrize("face", FACES)

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


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
            self.linear: nn.Module = nn.Linear(3, 1).double()
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

    def __init__(
        self,
        face: str,
        folder: Path,
        *callbacks: Any,
        net: Any = None,
        base: Any = None,
        make_optimizer: Any = SGD,
        **arguments: Any,
    ) -> None:
        self.face, self.folder, self.callbacks, self.arguments = face, folder, callbacks, arguments
        self.net = net or Net()
        self.base = base or {"native": Trainer, "huggingface": HuggingFaceTrainer}[face]
        self.optimizer = make_optimizer(self.net.parameters())
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
        defaults: dict[str, Any] = {"save_strategy": "no", "lr_scheduler_type": "constant", "disable_tqdm": True}
        args = TrainingArguments(
            str(self.folder),
            num_train_epochs=epochs,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=0,
            use_cpu=True,
            train_sampling_strategy="sequential",
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


def saving_epochs(face: str, folder: Path) -> Run:
    """A run that saves after each epoch."""
    if face == "huggingface":
        return Run(face, folder, save_strategy="epoch")
    return Run(face, folder, SaveTrainingStateCallback(folder, save_every_n_epochs=1, save_at_end=False))


def by_hand(updates: list[list[int]], size: int) -> tuple[Net, list[float]]:
    """The model after updates with these rows, each a mean over its own, and their losses."""
    net, data, losses = Net(), Rows(size), []
    optimizer = SGD(net.parameters())
    for rows in updates:
        loss = (net.linear(data.inputs[rows]) - data.targets[rows]).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return net, losses


def assert_close(actual: Any, expected: Net) -> None:
    torch.testing.assert_close(actual.linear.state_dict(), expected.linear.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluated_rows_and_penalties_count_once_on_any_number_of_ranks_areal_1096(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).parents[1] / "ranks" / "situations.py", ranks, tmp_path)


@both_faces
@pytest.mark.parametrize(("accumulation", "sizes"), [(4, [4, 4, 2]), (32, [10])])
def test_the_last_update_of_an_epoch_has_the_batches_that_are_left_burn_5695(
    face: str, accumulation: int, sizes: list[int], tmp_path: Path
) -> None:
    def cosine(optimizer: Any) -> Any:
        return lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(sizes))

    run = Run(face, tmp_path).train(Rows(40), 2, accumulation=accumulation, schedule=cosine)
    assert [len(update) for update in run.updates] == 2 * sizes
    expected = [0.025 * (1 + math.cos(math.pi * update / (2 * len(sizes)))) for update in range(2 * len(sizes))]
    assert run.rates == pytest.approx(expected, rel=1e-12)


@both_faces
def test_no_batch_of_an_epoch_counts_in_an_update_of_the_next_PaddleFormers_4365(face: str, tmp_path: Path) -> None:
    run = Run(face, tmp_path).train(Rows(17), 2, accumulation=4)
    four = [list(range(start, start + 4)) for start in range(0, 16, 4)]
    assert run.updates == 2 * [four, [[16]]]
    assert_close(run.net, by_hand(2 * [list(range(16)), [16]], 17)[0])


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


@pytest.mark.parametrize(
    ("face", "arguments", "name"),
    [
        ("native", {}, "num_epochs"),
        ("native", {"max_num_train_steps": 5}, "max_num_train_steps"),
        ("huggingface", {}, "num_train_epochs"),
        ("huggingface", {"max_steps": 5}, "max_steps"),
    ],
)
def test_a_finished_run_that_is_resumed_names_the_argument_to_raise(
    face: str, arguments: dict[str, Any], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    saving_epochs(face, folder).train(Rows(20), 1)
    resumed = Run(face, folder, **arguments).train(Rows(20), 1, resumes=True)
    assert resumed.updates == []
    assert f"is the end of the run, after update 5. Raise `{name}`" in capsys.readouterr().out


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


def test_a_decay_that_ramps_goes_on_after_a_resume_or_prove_names_its_counter_lightly_train_892(
    tmp_path: Path,
) -> None:
    def ramp(kind: type[Ramp]) -> Ramp:
        return kind(save_path=tmp_path / "average.pt", evaluate_during_training=False)

    folder = tmp_path / "run"
    whole, resumed = ramp(SavedRamp), ramp(SavedRamp)
    Run("native", tmp_path / "whole", whole).train(Rows(20), 2)
    Run("native", folder, ramp(SavedRamp), stop_at("native", folder, 7)).train(Rows(20), 2)
    Run("native", folder, resumed).train(Rows(20), 2, resumes=True)
    assert resumed.ema_model.decay == 10 / 11
    assert_same(resumed.ema_model.module.state_dict(), whole.ema_model.module.state_dict())

    proofs = {}
    for takes_part in (False, True):
        average, net = ramp(Ramp), Net()
        average.takes_part_in_preflight = takes_part  # by default callbacks that write files don't
        trainer = Own(net, None, SGD(net.parameters()), callbacks=[average], seed=1)
        proofs[takes_part] = str(trainer.prove(Rows(20), updates=4, per_device_batch_size=4))
    assert re.search("not checked: callbacks that .* write files, .*: Ramp", proofs[False])
    assert re.search(r"`updates` of the callback Ramp was \d in the uninterrupted run and 0 after", proofs[True])


VALUES = (1.0, 0.9, 0.8, 0.85, 0.7, 0.75, 0.76, 0.5, 0.4)  # the best is the fifth; with patience 2 the seventh ends it


class GivenValues(TrainerCallback):
    """Records the given values as the metric of the epochs."""

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("eval_given", VALUES[trainer.run_state.epochs])


@pytest.mark.parametrize(("face", "stops_first"), [("native", True), ("native", False), ("huggingface", False)])
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


@pytest.mark.parametrize("damage", ["cut", "empty", "missing"])
@both_faces
def test_a_damaged_newest_state_is_named_and_the_one_before_is_used_speculators_739(
    face: str, damage: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    saving_epochs(face, folder).train(Rows(20), 2)
    newest, foreign = {"native": ("epoch_2", "epoch_99"), "huggingface": ("checkpoint-10", "checkpoint-99")}[face]
    (folder / foreign).mkdir()
    (folder / foreign / "notes.txt").write_text("not a state")
    if damage == "cut":
        path = folder / newest / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "empty":
        (path := folder / newest / "run.json").write_text("")
    else:
        (path := folder / newest / "run.safetensors").unlink()
    with pytest.warns(UserWarning, match=rf"skipped:[\s\S]*{newest}/{path.name}"):
        resumed = Run(face, folder).train(Rows(20), 2, resumes=True)
    assert resumed.rows == list(range(20))


@pytest.mark.parametrize("has_schedule", [False, True])
@both_faces
def test_changed_settings_of_the_optimizer_are_told_before_the_first_update_rf_detr_1209(
    face: str, has_schedule: bool, tmp_path: Path
) -> None:
    def cosine(optimizer: Any) -> Any:
        return lr_scheduler.CosineAnnealingLR(optimizer, 10)

    schedule, folder = (cosine if has_schedule else None), tmp_path / "run"
    old = functools.partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, betas=(0.9, 0.99))
    new = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.2, betas=(0.8, 0.99))
    Run(face, folder, stop_at(face, folder, 3), make_optimizer=old).train(Rows(20), 2, schedule=schedule)
    resumed = Run(face, folder, make_optimizer=new)
    with pytest.warns(UserWarning, match="For the new ones change `optimizer.param_groups`") as told:
        resumed.train(Rows(20), 2, schedule=schedule, resumes=True)
    (text,) = [str(each.message) for each in told]
    for line in (
        "learning_rate: 0.0001, not 0.001",
        "weight_decay: 0.1, not 0.2",
        "betas: (0.9, 0.99), not (0.8, 0.99)",
    ):
        assert line in text
    assert "For the new ones change `optimizer.param_groups`" in text
    rates = [5e-5 * (1 + math.cos(math.pi * update / 10)) if has_schedule else 1e-4 for update in range(3, 10)]
    assert resumed.rates == pytest.approx(rates, rel=1e-12)


def two_parts(optimizer: Any, length: int) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, length)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda o, length: lr_scheduler.CosineAnnealingLR(o, length),
            "T_max of CosineAnnealingLR: 6, not 12",
        ),
        (lambda o, length: lr_scheduler.StepLR(o, length), "step_size of StepLR: 6, not 12"),
        (
            lambda o, length: lr_scheduler.MultiStepLR(o, [length]),
            "milestones of MultiStepLR: .*6.*, not .*12",
        ),
        (lambda o, length: lr_scheduler.OneCycleLR(o, 0.1, length), "total_steps of OneCycleLR: 6, not 12"),
        (two_parts, "T_max of CosineAnnealingLR: 6, not 12"),
        (lambda o, length: lr_scheduler.LambdaLR(o, lambda update: 1 - update / length), None),
    ],
)
@both_faces
def test_a_schedule_that_a_state_brings_along_is_told_before_the_first_update(
    face: str, make: Any, told: str | None, tmp_path: Path
) -> None:
    folder, state = tmp_path / "run", stop_at(face, tmp_path / "run", 3)
    Run(face, folder, state).train(Rows(24), 1, schedule=lambda optimizer: make(optimizer, 6))
    options: dict[str, Any] = {"schedule": lambda optimizer: make(optimizer, 12), "resumes": True}
    resumed = Run(face, folder)
    if told is None:
        resumed.train(Rows(24), 2, **options)
        expected = [0.05 * (1 - update / 12) for update in range(4, 12)]
        assert resumed.rates[1:] == pytest.approx(expected, rel=1e-12)  # the first one was set before
        return
    with pytest.warns(UserWarning, match=told):
        resumed.train(Rows(24), 1, **options)
    assert resumed.rates == Run(face, tmp_path / "whole").train(Rows(24), 1, schedule=lambda o: make(o, 6)).rates[3:]


def test_a_changed_rate_in_a_tensor_is_told(tmp_path: Path) -> None:
    old, new = (functools.partial(torch.optim.SGD, lr=torch.tensor(rate)) for rate in (0.5, 0.25))
    Run("native", tmp_path, stop_at("native", tmp_path, 3), make_optimizer=old).train(Rows(20), 1)
    with pytest.warns(UserWarning, match="learning_rate: 0.5, not 0.25"):
        Run("native", tmp_path, make_optimizer=new).train(Rows(20), 1, resumes=True)


@both_faces
def test_each_record_is_the_mean_of_its_own_updates_tt_blacksmith_596(face: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"record_every_n_steps": 4} if face == "native" else {"logging_steps": 4}
    run = Run(face, tmp_path, **arguments).train(Rows(40), 3)
    _, losses = by_hand(3 * [list(range(start, start + 4)) for start in range(0, 40, 4)], 40)
    if face == "native":
        records = [(each.update, each.train_loss) for each in run.trainer.run_history.step_records]
        assert [update for update, _ in records] == [4, 8, 10, 14, 18, 20, 24, 28, 30]
    else:
        records = [(each["step"], each["loss"]) for each in run.trainer.state.log_history if "loss" in each]
        assert [update for update, _ in records] == [4, 8, 12, 16, 20, 24, 28]
    first = 0
    for last, mean in records:
        assert mean == pytest.approx(sum(losses[first:last]) / (last - first), rel=1e-12)
        first = last


class FiveParts(Trainer):
    """Returns five tensors beside the loss."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        parts = {f"part_{number}": number * output["model_outputs"]["logits"].flatten() for number in range(5)}
        return {**output, **parts}


class CountTensors(TrainerCallback):
    """How many tensors there are after every 50th update."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates % 50 == 0:
            self.counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))


def test_means_of_five_tensors_read_nothing_in_an_update_and_keep_nothing_neuracore_893(tmp_path: Path) -> None:
    means = RecordMeansCallback([f"part_{number}" for number in range(5)])
    reads = HostReads()
    plain, counting = CountAfterUpdates(reads), CountAfterUpdates(reads)
    with reads.watching():
        Run("native", tmp_path, plain).train(Rows(62), 1, batch_size=1)
        Run("native", tmp_path, means, counting, base=FiveParts).train(Rows(62), 1, batch_size=1)
    assert reads_within(range(5, 60), counting.after_updates) == reads_within(range(5, 60), plain.after_updates)

    run = Run("native", tmp_path, means, tensors := CountTensors(), base=FiveParts).train(Rows(1200), 1, batch_size=1)
    assert max(tensors.counts[12:]) <= max(tensors.counts[:12])
    history = run.trainer.run_history
    assert history.get_latest_metric("train_part_4") == pytest.approx(4 * history.get_latest_metric("train_part_1"))


SECONDS_OF_BATCH = 0.004


class SlowNet(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, row: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(SECONDS_OF_BATCH)
        return super().forward(x, labels, row)


@both_faces
def test_speeds_and_times_after_a_resume_do_not_count_the_work_before(
    face: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BarDisplay, "seconds_between_refreshes", 0)
    monkeypatch.setenv("TERM", "xterm")
    folder, result = tmp_path / "run", ResultCallback(tmp_path / "result.json")
    is_native = face == "native"
    results = (result,) if is_native else ()
    screen = (PrintProgressCallback(), ProgressBarCallback(), LogMetricsCallback()) if is_native else ()
    arguments: dict[str, Any] = {} if is_native else {"disable_tqdm": False, "logging_steps": 1}
    stop = stop_at(face, folder, 75)  # of 80 updates, so that a speed could be sixteen times too high
    Run(face, folder, *results, stop, net=SlowNet()).train(Rows(160), 2)
    with in_a_terminal() as terminal:
        run = Run(face, folder, *screen, *results, net=SlowNet(), **arguments).train(Rows(160), 2, resumes=True)
        shown, lines = terminal.received, terminal.screen
    assert len(run.updates) == 5
    size_of = {"samples": 4, "steps": 1}
    speeds = [(float(number), size_of[unit]) for number, unit in re.findall(r"([\d.e+]+) (samples|steps)/s", shown)]
    assert len(speeds) > 4
    if is_native:
        records = [each for each in run.trainer.run_history.step_records if each.update > 75]
        speeds += [(record.samples_per_second, 4) for record in records]
        found = json.loads((tmp_path / "result.json").read_text())
        assert [line.split()[-1] for line in lines if line.lstrip().startswith("2  ")] == ["5.00e-02"]  # without a time
        assert found["updates"] == 80
        assert found["seconds"] >= 80 * SECONDS_OF_BATCH
    else:
        found = run.trainer.state.log_history[-1]
        speeds += [(found["train_samples_per_second"], 4), (found["train_steps_per_second"], 1)]
    assert all(speed <= size / SECONDS_OF_BATCH for speed, size in speeds)
    assert any(re.match(r"Finished 2 epochs, 80 (updates|steps), the last 5 in ", line) for line in lines)


class Late(Net):
    """A second layer takes part from the sixth batch on."""

    batches: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 1).double()
        nn.init.constant_(self.second.weight, 0.1)
        nn.init.zeros_(self.second.bias)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, row: torch.Tensor) -> dict[str, torch.Tensor]:
        self.batches += 1
        output = super().forward(x, labels, row)
        if self.batches > 5:
            output["loss"] = output["loss"] + (self.second(x) - labels).square().mean()
        return output


class Compressed(torch.optim.Optimizer):
    """Momentum in bfloat16, its remainder in steps of int8 within a dict, and a code of signs in uint8."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["rest"] = {"steps": torch.zeros_like(parameter, dtype=torch.int8), "size": torch.tensor(1e-3)}
                state["signs"], state["rule"] = torch.zeros_like(parameter, dtype=torch.uint8), "momentum"
            before = state["momentum"].double() + state["rest"]["steps"].double() * state["rest"]["size"]
            exact = 0.9 * before + parameter.grad
            state["momentum"] = exact.bfloat16()
            rest = (exact - state["momentum"].double()) / state["rest"]["size"]
            state["rest"]["steps"] = rest.clamp(-127, 127).char()
            state["signs"] = (state["signs"] << 1) | (exact > 0).byte()
            parameter.sub_(self.param_groups[0]["lr"] * exact * (1 + (state["signs"] & 7).double() / 8))


def parts_of(run: Run) -> dict[str, Any]:
    return {"model": run.net.state_dict(), "optimizer": run.optimizer.state_dict()}


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, SGD, Compressed])
@pytest.mark.parametrize("update", [3, 7])
@both_faces
def test_late_gradients_and_states_of_any_dtype_come_back_to_the_bit(
    face: str, update: int, make_optimizer: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    whole, early, resumed = (
        Run(face, each, *callbacks, net=Late(), make_optimizer=make_optimizer)
        for each, callbacks in ((tmp_path / "whole", ()), (folder, (stop_at(face, folder, update),)), (folder, ()))
    )
    whole.train(Rows(40), 1)
    early.train(Rows(40), 1)
    assert len(early.optimizer.state) == (4 if update > 5 else 2)  # a layer without a gradient has none
    resumed.train(Rows(40), 1, resumes=True)
    assert_same(parts_of(resumed), parts_of(whole))
    leaves = [tree_leaves(parts_of(run)) for run in (resumed, whole)]
    assert [getattr(leaf, "dtype", None) for leaf in leaves[0]] == [getattr(leaf, "dtype", None) for leaf in leaves[1]]


class Interrupts(TrainerCallback):
    """Ends the run in its third update, as somebody at the keyboard or a scheduler would."""

    def __init__(self, send: Callable[[], object]) -> None:
        self.send = send

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == 2:
            self.send()


class InterruptsFace(FaceCallback):
    def __init__(self, send: Callable[[], object]) -> None:
        self.send = send

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.send()


SIGNALS = {
    "Ctrl-C": lambda: signal.raise_signal(signal.SIGINT),
    "SIGTERM": lambda: signal.raise_signal(signal.SIGTERM),
    "interrupt of a notebook's kernel": _thread.interrupt_main,
}


@pytest.mark.parametrize("name", SIGNALS)
@both_faces
def test_an_interrupt_before_the_first_save_loses_nothing_ace_step_606(
    face: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    if face == "native":
        saver = SaveTrainingStateCallback(folder, save_every_n_epochs=50)
        run = Run(face, folder, PrintProgressCallback(), Interrupts(SIGNALS[name]), saver)
        place = folder / "final"
    else:
        arguments = {"save_strategy": "steps", "save_steps": 1000}
        run = Run(face, folder, InterruptsFace(SIGNALS[name]), **arguments, disable_tqdm=False)
        place = folder / "checkpoint-3"
    error = SignalExit if name == "SIGTERM" else KeyboardInterrupt
    with default_signals(), pytest.raises(error) as caught:
        run.train(Rows(20), 2)
    argument = "resume_from" if face == "native" else "resume_from_checkpoint"
    assert f"To continue: `train(..., {argument}='{place}')`" in capsys.readouterr().out
    assert f"It can be resumed from {place}" in str(caught.value)
    assert run.rows == list(range(12))
    resumed = Run(face, folder).train(Rows(20), 2, resumes=True)
    assert run.rows + resumed.rows == 2 * list(range(20))


@pytest.mark.processes
def test_a_process_that_ends_in_a_save_goes_on_from_the_newest_complete_state_verl_7952(tmp_path: Path) -> None:
    output = run_forked(Path(__file__).parents[1] / "ranks" / "ending_at_once.py", tmp_path)
    cases = json.loads(output.stdout.splitlines()[-1])
    for name, case in cases.items():
        newest = max(case["left"], key=lambda state: int(re.split("[_-]", state)[1]), default=None)
        said = f"No training state in {tmp_path / name}: starting from scratch"
        if newest is not None:
            said = f"Resuming from {tmp_path / name / newest}: "
        assert case["lines"][0].startswith(said)
        assert case["lines"][-1] == f"updates {10 if name == 'huggingface' else 8}"
    # What was asked for before a return or an exception is there; before `os._exit` at least what was complete.
    assert "step_5" in cases["return 5"]["left"]
    assert "step_5" in cases["exception 5"]["left"]
    assert {"step_1", "step_2", "step_3"} <= set(cases["os._exit 5"]["left"])
    assert cases["huggingface"]["left"][-1] == "checkpoint-3"
