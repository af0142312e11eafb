"""`Trainer.prove` names what keeps a script from being exact, raises no false alarm, and changes nothing."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import LimitBatchesCallback, LogMetricsCallback, ModelEmaCallback, TrainerCallback
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.extras.proving import Check, Proof, children
from pytorch_accelerated.extras.proving.trace import digest
from pytorch_accelerated.facts.seeding import generator_states
from tests.proving import faults
from tests.proving.faults import INPUTS, TARGETS, Own, Rows, Run, run
from tests.support.processes import run_script
from tests.support.reference import tiny_model

AGAIN, RESUMED, HALVES = "again", "resumed at each update", "half batches, twice as many"
WORKERS, KILLED, RANKS = "two workers", "killed and resumed", "two ranks, half batches"


def state_of(trainer: Trainer) -> str:
    """Everything that the trainer, its callbacks and this process have, as a digest."""
    history = [(record.name, record.value) for record in trainer.run_history.records]
    callbacks = [{name: repr(value) for name, value in vars(each).items()} for each in trainer.callback_handler]
    model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    modes = [each.training for each in trainer.model.modules()]
    counts = repr(trainer.run_state)
    return digest([model, optimizer, modes, history, callbacks, counts, generator_states(), list(vars(trainer))])


def proof_of(made: Run) -> dict[str, Check]:
    """The rows of a proof by name; everything is as before."""
    trainer, arguments = made
    dataset = arguments["train_dataset"]
    kept = [state_of(trainer), digest({name: repr(value) for name, value in getattr(dataset, "__dict__", {}).items()})]
    proof = trainer.prove(**arguments)
    now = [state_of(trainer), digest({name: repr(value) for name, value in getattr(dataset, "__dict__", {}).items()})]
    assert now == kept
    assert proof.is_exact == all(row.verdict != "difference" for row in proof.rows)
    return {row.check: row for row in proof.rows}


PLANTED: dict[str, tuple[Callable[[], Run], str, int | None, str]] = {
    "a torch generator in a dataset": (
        lambda: run(faults.TorchNoise()),
        RESUMED,
        2,
        "contents of the batch: `noise` of the dataset TorchNoise is a generator of its own",
    ),
    "a numpy generator in a dataset": (
        lambda: run(faults.NumpyNoise()),
        RESUMED,
        2,
        "`rng` of the dataset NumpyNoise is a generator of its own.*draw from torch, numpy or random",
    ),
    "a random.Random in a transform": (
        lambda: run(faults.Transformed()),
        WORKERS,
        1,
        "`source` of Jitter in the dataset Transformed is a generator of its own",
    ),
    "a counter in a dataset": (
        lambda: run(faults.Fading()),
        RESUMED,
        2,
        r"`served` of the dataset Fading was \d+ in the uninterrupted run and \d+ after the resume: make the row",
    ),
    "a variable of a module": (
        lambda: run(faults.Global()),
        RESUMED,
        2,
        r"`_drawn`, a variable of the module tests.proving.faults, was \d+ in the uninterrupted run",
    ),
    "a clock in an augmentation": (
        lambda: run(faults.ByTheClock()),
        AGAIN,
        1,
        "the contents of the batch: the rows depend on a clock",
    ),
    "a clock in a model": (lambda: run(model=faults.OwnNoise()), AGAIN, 1, "the loss: the forward pass .* a clock"),
    "a callback without state": (
        lambda: run(None, faults.EveryFourth()),
        RESUMED,
        4,
        "`count` of the callback EveryFourth was 3 in the uninterrupted run and 0 after "
        "the resume: give the callback `state_dict`",
    ),
    "a callback with a generator": (
        lambda: run(None, faults.RandomRates()),
        RESUMED,
        2,
        "`rng` of the callback RandomRates is a generator of its own",
    ),
    "a curriculum in the trainer": (
        lambda: run(base=faults.Curriculum),
        RESUMED,
        2,
        "the loss: `level` of the trainer Curriculum was 0.9 .* and 1.0 after the resume: move it to a callback",
    ),
    "an attribute of an optimizer": (
        faults.warming,
        RESUMED,
        2,
        "the weights after the update: `calls` of the optimizer Warming was 1 .* and 0 after the resume",
    ),
    "an optimizer that leaves out its state": (
        faults.forgetful,
        RESUMED,
        2,
        "the weights after the update: `momentum_buffer` in the state of the optimizer Forgetful",
    ),
    "a loss function with a mean": (
        lambda: run(loss_func=faults.RunningLoss()),
        RESUMED,
        2,
        r"the loss: `mean` of the loss function RunningLoss was 0\.\d+ in the uninterrupted run and 1.0 after",
    ),
    "a counter in a model": (
        lambda: run(model=faults.Counting()),
        RESUMED,
        2,
        "`calls` of the model Counting was 1 .* and 0 after the resume: register it as a buffer",
    ),
    "a counter in a schedule": (
        lambda: run(create_scheduler_fn=faults.counted_rate),
        RESUMED,
        2,
        "`calls`, a variable of counted_rate.<locals>.rate, was 1 .* and 0 after the resume: compute the rate",
    ),
    "a loss that is no mean over rows": (
        lambda: run(loss_func=faults.of_batch),
        HALVES,
        1,
        "the gradients, by .* of their norm: the loss is not a mean over the rows",
    ),
}


class Watching(faults.EveryFourth):
    """Keeps the model, which has the fault, and another thing that does nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.count = model, -100


def test_what_has_the_fault_is_named_wherever_else_it_is_kept() -> None:
    model = faults.Counting()
    row = proof_of(run(None, Watching(model), model=model))[RESUMED]
    assert (row.verdict, row.update) == ("difference", 2)
    assert_matches(
        "^the loss: .*`calls` of the model Counting was 1 .* after the resume: register it as a buffer$", row.culprit
    )


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str) -> None:
    make, check, update, culprit = PLANTED[name]
    row = proof_of(make())[check]
    assert (row.verdict, row.update) == ("difference", update)
    assert_matches(culprit, row.culprit)


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_batch_statistics_are_a_known_difference() -> None:
    trainer, arguments = faults.normalised()
    proof = trainer.prove(**arguments)
    row = next(each for each in proof.rows if each.check == HALVES)
    assert (row.verdict, row.update) == ("known difference", 1)
    assert "batch statistics: 1 normalises each batch" in row.culprit
    assert proof.is_exact


@pytest.mark.processes
def test_an_order_from_a_set_differs_in_a_new_process() -> None:
    trainer, arguments = faults.by_set()
    rows = {row.check: row for row in trainer.prove(**arguments, factory=f"{faults.__name__}:by_set_anew").rows}
    assert {rows[name].verdict for name in (AGAIN, RESUMED, WORKERS)} == {"same bits"}
    assert (rows[KILLED].verdict, rows[KILLED].update) == ("difference", 1)
    assert_matches("`groups` of the sampler BySet was .* in a new process: it is another one ", rows[KILLED].culprit)
    assert rows[RANKS].verdict == "not checked"


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer

INPUTS, ORDER = torch.linspace(-1, 1, 48).reshape(-1, 1), {f"row {index}" for index in range(48)}


class Rows(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        row = INPUTS[[int(name.split()[1]) for name in ORDER][index]]
        return row, row.square()


def make_run():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=())
    # Batches of three cannot be halved, which spares two processes.
    return trainer, {"train_dataset": Rows(), "num_epochs": 3, "per_device_batch_size": 3}


if __name__ == "__main__":
    trainer, arguments = make_run()
    print(trainer.prove(**arguments, updates=4, factory=f"{__file__}:make_run").rows[5].culprit)
"""


@pytest.mark.processes
def test_variables_of_a_script_are_the_same_ones_in_a_new_process() -> None:
    stdout = run_script(SCRIPT).stdout
    assert_matches("^the contents of the batch: `ORDER`, a variable of the module script, was .* in a new", stdout)
    assert "INPUTS" not in stdout


# -------------------------------------------------------------------------------------------------- no false alarm


class Augmented(Rows):
    def changed(self, row: torch.Tensor) -> torch.Tensor:
        return row + torch.from_numpy(np.random.normal(size=3)) + torch.rand(())


class Alternating(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(INPUTS)

    def __iter__(self) -> Iterator[int]:
        order = range(len(INPUTS))
        return iter(order if self.epoch % 2 else order[::-1])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(INPUTS, TARGETS, strict=True)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        outputs = self.inner(inputs)
        loss = {} if labels is None else {"loss": nn.functional.mse_loss(outputs, labels)}
        return {**loss, "logits": outputs}


class Halving(TrainerCallback):
    """Has a state, and saves it; and an attribute that is nobody's concern."""

    def __init__(self) -> None:
        self.count = self.seen = 0

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.count, self.seen = self.count + 1, self.seen + 1
        if self.count == 4:
            trainer.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def two_optimizers() -> Run:
    model = tiny_model()
    first, _, second = model.children()
    return run(
        model=model, optimizer=[torch.optim.SGD(first.parameters(), 0.1), torch.optim.AdamW(second.parameters())]
    )


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()


def scheduled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)


HEALTHY: dict[str, Callable[[], Run]] = {
    "an augmentation": lambda: run(Augmented()),
    "dropout": lambda: run(model=with_dropout()),
    "a sampler": lambda: run(Rows(), train_dataloader_kwargs={"sampler": Alternating()}),
    "a loader": lambda: run(DataLoader(TensorDataset(INPUTS, TARGETS), 6, shuffle=True)),
    "a stream": lambda: run(Stream()),
    "an average of the weights": lambda: run(None, ModelEmaCallback(decay=0.9)),
    "two optimizers": two_optimizers,
    "dict batches and the model's own loss": lambda: run(
        {"inputs": INPUTS, "labels": TARGETS}, model=WithLoss(), loss_func=None
    ),
    "a callback with a state": lambda: run(None, Halving()),
    "accumulation, clipping, a schedule, evaluations": lambda: run(
        gradient_accumulation_steps=2,
        per_device_batch_size=4,
        gradient_clip_norm=0.1,
        create_scheduler_fn=scheduled,
        eval_dataset=(INPUTS, TARGETS),
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_raises_no_alarm(name: str) -> None:
    rows = proof_of(HEALTHY[name]())
    assert rows[AGAIN].verdict == rows[RESUMED].verdict == "same bits"
    assert {row.verdict for row in rows.values()} <= {"same bits", "equal to rounding", "not checked"}, rows
    can_be_cut = name not in ("an augmentation", "dropout", "a loader")
    assert (rows[HALVES].verdict == "equal to rounding") is can_be_cut, rows[HALVES]
    assert (rows[WORKERS].verdict == "same bits") is (name != "a stream")


@pytest.mark.processes
def test_new_processes_train_the_same_bits_and_two_ranks_the_same_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[tuple[str, int | None]] = []
    start = children._started

    def noted(job: Any, variables: Any) -> Any:
        lives.append((job.name, pickle.loads(job.payload)[1].keywords["killed_in"]))
        return start(job, variables)

    monkeypatch.setattr(children, "_started", noted)
    trainer, arguments = faults.healthy()
    proof = trainer.prove(**arguments, updates=6, factory=faults.healthy)
    to_rounding = {HALVES, RANKS}
    expected = {row.check: "equal to rounding" if row.check in to_rounding else "same bits" for row in proof.rows}
    assert {row.check: row.verdict for row in proof.rows} == expected
    # Epochs have three updates: within the first one after the second update, and after the third.
    assert [killed for name, killed in lives if not name.startswith("rank")] == [3, 4, None]


# ------------------------------------------------------------------------------------------------------- the rest


def test_a_proof_is_a_table_and_plain_values() -> None:
    rows = (Check("again", "same bits"), Check("two workers", "difference", 3, "the rows: unknown"))
    proof = Proof(5, rows)
    assert not proof.is_exact
    assert proof.to_json()["rows"][1]["culprit"] == "the rows: unknown"
    assert str(proof).splitlines()[0] == "5 updates, trained uninterrupted and in 2 other ways:"
    assert str(proof).splitlines()[-1].split() == ["two", "workers", "difference", "3", "the", "rows:", "unknown"]


def test_what_cannot_be_checked_is_said() -> None:
    trainer, arguments = run(per_device_batch_size=3)
    rows = {row.check: row for row in trainer.prove(**{**arguments, "updates": 2}).rows}
    assert rows[HALVES] == (HALVES, "not checked", None, "a batch of 3 has no halves")
    assert "Own may need other arguments than a `Trainer`: pass `factory`" in rows[KILLED].culprit


def test_what_no_row_is_about_is_said_too() -> None:
    trainer, arguments = run(None, LogMetricsCallback(), LimitBatchesCallback(3), per_device_batch_size=2)
    proof = trainer.prove(**arguments)
    said = "\n".join(proof.not_checked)
    for words in (
        "after update 6, in epoch 2",
        "more than 3 batches",
        "no `eval_dataset`",
        ": LogMetricsCallback",
    ):
        assert words in said
    assert proof.to_json()["not_checked"] == list(proof.not_checked)
    assert f"not checked: {proof.not_checked[0]}" in str(proof)


def test_what_fails_with_other_batches_is_not_checked() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    trainer, arguments = run(model=model, per_device_batch_size=2, num_epochs=1)
    row = next(row for row in trainer.prove(**{**arguments, "updates": 2}).rows if row.check == HALVES)
    assert row.verdict == "not checked"
    assert "it failed with ValueError: Expected more than 1 value per channel" in row.culprit


def test_a_run_that_ends_before_has_fewer_updates() -> None:
    trainer, arguments = run(num_epochs=1)
    assert trainer.prove(**{**arguments, "updates": 20}).updates == 3


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"updates": 0}, ConfigurationError, "`updates` is 0"),
        ({"updates": 2.5}, ArgumentTypeError, "`updates` is 2.5"),
        ({"resume_from": "states"}, ArgumentTypeError, "`prove` got `resume_from`"),
    ],
)
def test_bad_input_is_an_error(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    trainer, arguments = run()
    with pytest.raises(error, match=words):
        trainer.prove(**{**arguments, **wrong})


def test_an_error_of_the_run_is_raised_and_everything_is_as_before() -> None:
    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    trainer, arguments = run(loss_func=broken)
    before = state_of(copy.copy(trainer))
    with pytest.raises(ZeroDivisionError):
        trainer.prove(**arguments)
    assert state_of(trainer) == before
    assert isinstance(trainer, Own)


def clamped(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.clamp(-0.5, 0.5)


class ClampFirst(TrainerCallback):
    """Adds a hook at the start of a run, and removes it after three updates."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.handle, self.left = trainer.get_model().register_forward_hook(clamped), 3

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.handle.remove()


class SlowWeights(TrainerCallback):
    """Keeps an average as an attribute of each parameter."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        with torch.no_grad():
            for each in trainer.get_model().parameters():
                if not hasattr(each, "slow"):
                    each.slow = each.detach().clone()  # type: ignore[attr-defined]
                each.lerp_(each.slow, 0.5)  # type: ignore[attr-defined]


class Curriculum(Rows):
    """Rows that depend on a level in shared memory."""

    def __init__(self) -> None:
        self.level = multiprocessing.Value("d", 0.0)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs * (1 + self.level.value), targets


class Raise(TrainerCallback):
    def __init__(self, dataset: Curriculum) -> None:
        self.dataset = dataset

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.dataset.level.value += 0.2


def test_hooks_attributes_of_parameters_and_shared_memory_are_given_back_and_not_blamed() -> None:
    made = run(None, ClampFirst())
    rows = proof_of(made)
    assert not made[0].get_model()._forward_hooks
    assert rows[AGAIN].verdict == rows["no workers"].verdict == "same bits"
    assert "`left` of the callback ClampFirst" in rows[RESUMED].culprit

    made = run(None, SlowWeights())
    rows = proof_of(made)
    assert not any(hasattr(each, "slow") for each in made[0].get_model().parameters())
    assert (rows[AGAIN].verdict, rows[RESUMED].verdict) == ("same bits", "difference")

    dataset = Curriculum()
    rows = proof_of(run(dataset, Raise(dataset)))
    assert dataset.level.value == 0.0
    assert rows[AGAIN].verdict == "same bits"
