"""`Trainer(lanes=...)`: the same bits on any number of processes."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from tests.chaos.size import IS_RELEASE
from tests.ranks import lanes as script
from tests.support.processes import run_forked, run_on_ranks

SCRIPT = Path(script.__file__)


def trained(ranks: int, folder: Path, **options: Any) -> dict[str, Any]:
    """What a run on so many processes, which writes to a folder, ends with."""
    asked, where = json.dumps(options), {"env": {"ACCELERATE_USE_CPU": "true"}, "cwd": folder}
    output = run_forked(SCRIPT, asked, **where) if ranks == 1 else run_on_ranks(SCRIPT, ranks, asked, **where)
    assert ("UserWarning" in output.stderr) == ("bad_row" in options)
    return json.loads(output.stdout.splitlines()[-1])  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------ what a lane is: one process


def rows_by_hand(rows: int, lanes: int, batch_size: int, accumulation: int) -> list[list[list[range]]]:
    """The rows of each update, lane by lane and batch by batch."""
    updates = []
    for start in range(0, rows, lanes * batch_size * accumulation):
        size = min(rows - start, lanes * batch_size * accumulation)
        batches = -(-size // (lanes * batch_size))
        share, rest = divmod(size, batches * lanes)
        ends = [start]
        for cell in range(batches * lanes):
            ends.append(ends[-1] + share + (cell < rest))
        cells = [range(*pair) for pair in zip(ends, ends[1:], strict=False)]
        updates.append([[each for each in cells[lane::lanes] if each] for lane in range(lanes)])
    return updates


def added_in_pairs(values: list[torch.Tensor]) -> torch.Tensor:
    """The sum of neighbours, then of their sums, and so on."""
    while len(values) > 1:
        pairs = [values[at : at + 2] for at in range(0, len(values), 2)]
        values = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


@pytest.mark.parametrize(("lanes", "accumulation", "rows"), [(8, 2, 69), (8, 1, 37), (6, 3, 50), (1, 2, 7)])
def test_lanes_are_a_loop_by_hand_to_the_bit(lanes: int, accumulation: int, rows: int) -> None:
    inputs, targets = script.data(rows)
    model, loss_func = script.make_model(has_dropout=False), nn.CrossEntropyLoss()
    trainer = Trainer(model, loss_func, torch.optim.AdamW(model.parameters(), lr=0.02), callbacks=(), lanes=lanes)
    arguments: Any = {"gradient_accumulation_steps": accumulation, "train_dataloader_kwargs": {"shuffle": False}}
    trainer.train((inputs, targets), 2, per_device_batch_size=2, gradient_clip_norm=0.5, **arguments)

    by_hand = script.make_model(has_dropout=False)
    parameters, buffers = list(by_hand.parameters()), dict(by_hand.named_buffers())
    mean, variance, count = (buffers[f"0.2.{name}"] for name in ("running_mean", "running_var", "num_batches_tracked"))
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    for of_lanes in rows_by_hand(rows, lanes, 2, accumulation) * 2:
        gradients, means, variances, counts = [], [], [], []
        size = sum(len(batch) for batches in of_lanes for batch in batches)
        before = {name: each.clone() for name, each in buffers.items()}
        for batches in filter(None, of_lanes):
            for name, buffer in buffers.items():
                buffer.copy_(before[name])
            for batch in batches:
                loss = loss_func(by_hand(inputs[batch]), targets[batch])
                (loss * (len(batch) / size)).backward()
            gradients.append([each.grad for each in parameters])
            means.append(mean - before["0.2.running_mean"])
            variances.append(variance - before["0.2.running_var"])
            counts.append(count.clone())
            optimizer.zero_grad()
        for parameter, of_lane in zip(parameters, zip(*gradients, strict=True), strict=True):
            parameter.grad = added_in_pairs(list(of_lane))
        mean.copy_(before["0.2.running_mean"] + added_in_pairs(means) / len(means))
        variance.copy_(before["0.2.running_var"] + added_in_pairs(variances) / len(variances))
        count.copy_(counts[0])
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in by_hand.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_lanes_add_up_to_one_large_batch() -> None:
    inputs, targets = script.data(69)
    inputs = inputs.double()
    models = [script.make_model(has_dropout=False, has_norm=False).double() for _ in range(2)]
    trainer = Trainer(models[0], nn.CrossEntropyLoss(), torch.optim.SGD(models[0].parameters(), lr=0.1), (), lanes=8)
    arguments: Any = {"gradient_accumulation_steps": 2, "train_dataloader_kwargs": {"shuffle": False}}
    history = trainer.train((inputs, targets), 2, per_device_batch_size=2, **arguments)
    optimizer, losses = torch.optim.SGD(models[1].parameters(), lr=0.1), []
    for start in [0, 32, 64] * 2:
        batch = slice(start, start + 32)
        loss = nn.functional.cross_entropy(models[1](inputs[batch]), targets[batch])
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert [each.train_loss for each in history.step_records] == pytest.approx(losses, rel=1e-12)


def test_parameters_that_no_lane_uses_stay_and_those_of_some_lanes_train() -> None:
    class Picks(nn.Module):
        parts: Any

        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.parts[int(inputs[0, 0])](inputs)

    inputs, targets = torch.tensor([[0.0, 1.0], [0.0, 2.0], [1.0, 3.0], [0.0, 4.0]]), torch.ones(4, 1)
    model = Picks()
    before = [part.weight.detach().clone() for part in model.parts]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    Trainer(model, nn.MSELoss(), optimizer, callbacks=(), lanes=4).train((inputs, targets), 1, None, 1)
    used, partly, unused = (not torch.equal(part.weight, old) for part, old in zip(model.parts, before, strict=True))
    assert used
    assert partly
    assert not unused  # no weight decay without a gradient
    expected = before[1] - 0.1 * (0.1 * before[1] + 2 * (inputs[2] @ before[1].T - 1) * inputs[2] / 4)
    torch.testing.assert_close(model.parts[1].weight.detach(), expected)


# ---------------------------------------------------------------------------------------------------- several processes

RUNS: dict[str, dict[str, Any]] = {
    "everything": {},
    "more lanes than a power of two, short groups": {"lanes": 6, "rows": 50, "accumulation": 3},
    "lanes without rows, one optimizer": {"rows": 37, "accumulation": 1, "optimizers": 1, "workers": 1},
    "rows in memory, items counted": {"in_memory": True, "optimizers": 1},
    "updates left out": {"policy": "skip", "bad_row": 40},
}


@pytest.mark.processes
@pytest.mark.parametrize("name", RUNS)
def test_weights_losses_metrics_and_states_have_the_same_bits_on_any_number_of_processes(
    name: str, tmp_path: Path
) -> None:
    alone = trained(1, tmp_path, **RUNS[name])
    assert alone["rows"] == {"train": RUNS[name].get("rows", 69), "eval": 29}
    for ranks in (2, 3, 4) if name == "everything" else (3,):
        assert trained(ranks, tmp_path, **RUNS[name]) == alone, ranks


@pytest.mark.processes
def test_a_run_killed_on_some_processes_is_resumed_on_others_to_the_bit(tmp_path: Path) -> None:
    whole = trained(1, tmp_path, epochs=3)
    for ranks, updates in ((4, 2), (3, 4), (1, 6)):  # within two epochs, and at the end of one
        trained(ranks, tmp_path, epochs=3, stop_after=updates, resumes=ranks != 4)
    assert trained(2, tmp_path, epochs=3, resumes=True) == whole


@pytest.mark.skipif(not IS_RELEASE, reason="make chaos runs it")
@pytest.mark.processes
def test_two_hundred_updates_have_the_same_bits_on_one_to_eight_processes(tmp_path: Path) -> None:
    options = {"epochs": 67}
    alone = trained(1, tmp_path, **options)
    assert alone["position"]["updates"] == 201
    for ranks in (2, 3, 4, 5, 8):
        assert trained(ranks, tmp_path, **options) == alone, ranks
    for before, after in ((8, 3), (8, 1), (3, 8), (2, 4), (1, 8)):
        trained(before, tmp_path, **options, stop_after=100)
        assert trained(after, tmp_path, **options, resumes=True) == alone, (before, after)


@pytest.mark.processes
def test_more_processes_than_lanes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="`lanes` is 1, but there are 2 processes"):
        trained(2, tmp_path, lanes=1)


# ----------------------------------------------------------------------------------------------------- what it can't do


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(script.FEATURES), 1)] * 4)


class OwnPasses(Trainer):
    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        super()._perform_forward_and_backward_passes(batch, step)


class TwoGames(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic = nn.Linear(1, 1)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)


def _with_sync(model: nn.Module) -> None:
    nn.SyncBatchNorm.convert_sync_batchnorm(model)


def _stepping_in_backward(model: nn.Module) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize(
    ("reason", "kind", "change", "data"),
    [
        ("is a stream", Trainer, None, Numbers()),
        ("`_perform_forward_and_backward_passes` is overridden", OwnPasses, None, None),
        ("critic_optimizer steps within a batch", TwoGames, None, None),
        ("SyncBatchNorm", Trainer, _with_sync, None),
        ("a hook of a parameter acts in the backward pass", Trainer, _stepping_in_backward, None),
    ],
)
def test_what_cannot_keep_the_promise_is_refused(
    reason: str, kind: type[Trainer], change: Callable[[nn.Module], None] | None, data: Any
) -> None:
    model = script.make_model()
    if change is not None:
        change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = kind(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), lanes=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigurationError, match=reason):
        trainer.train(script.data(20) if data is None else data, 1)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(("lanes", "error"), [(0, ConfigurationError), ("8", ArgumentTypeError)])
def test_lanes_are_a_number(lanes: Any, error: type[Exception]) -> None:
    model = script.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match="`lanes` is"):
        Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), lanes=lanes).train(script.data(20), 1)


def test_a_buffer_that_only_later_updates_change_is_refused() -> None:
    class Counts(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(script.FEATURES, 3), 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> Any:
            self.calls += 1
            if self.calls > 4:
                self.seen += 1
            return self.linear(inputs)

    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="'seen' changed after the first one only"):
        Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), lanes=4).train(script.data(20), 1, None, 1)


def make_saving(folder: Path, lanes: int | None) -> Trainer:
    model = script.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = SaveTrainingStateCallback(folder, save_every_n_steps=1)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, [saver], seed=1, lanes=lanes)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, None), (None, 4)])
def test_a_state_is_resumed_with_its_lanes_only(before: int | None, after: int | None, tmp_path: Path) -> None:
    make_saving(tmp_path, before).train(script.data(20), 1)
    with pytest.raises(ConfigurationError, match=f"had lanes={before}, and this trainer has lanes={after}"):
        make_saving(tmp_path, after).train(script.data(20), 2, resume_from=tmp_path)


def test_a_resume_with_other_threads_is_warned_of(tmp_path: Path) -> None:
    make_saving(tmp_path, 4).train(script.data(20), 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(UserWarning, match=f"saved with {threads} threads of torch and resumes with {threads + 1}"):
            make_saving(tmp_path, 4).train(script.data(20), 2, resume_from=tmp_path)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("has_fault", [False, True] if IS_RELEASE else [False])
def test_a_run_with_lanes_is_proven_on_two_processes_to_the_bit(has_fault: bool) -> None:
    model = script.make_model()
    callbacks = [FavoursTheFirst()] if has_fault else []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks, seed=1, lanes=4)
    proof = trainer.prove(train_dataset=script.data(20), num_epochs=1, per_device_batch_size=2)
    verdicts = {row.check: row.verdict for row in proof.rows}
    assert verdicts["resumed at each update"] == "same bits"
    assert (verdicts["two ranks"] == "same bits") != has_fault


class FavoursTheFirst(TrainerCallback):
    """Changes a weight where the process isn't the only one."""

    def on_optimizer_step_end(self, trainer: Any, **kwargs: Any) -> None:
        """Change it."""
        with torch.no_grad():
            trainer.get_model()[1].bias += trainer.run_config.num_processes - 1


def test_an_update_of_a_run_with_lanes_is_replayed_to_the_bit(tmp_path: Path) -> None:
    class Weights(TrainerCallback):
        def __init__(self) -> None:
            self.after: list[torch.Tensor] = []

        def on_optimizer_step_end(self, trainer: Any, **kwargs: Any) -> None:
            self.after.append(next(trainer.get_model().parameters()).detach().clone())

    watching, trainer = Weights(), make_saving(tmp_path, 4)
    trainer.callback_handler.add_callback(watching)
    trainer.train(script.data(37), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay = make_saving(tmp_path, 4).replay(tmp_path, 2, train_dataset=script.data(37), num_epochs=1)
    assert replay.rows is not None
    assert len(replay.rows) == 5
    assert torch.equal(replay.weights_after["0.0.weight"], watching.after[1])
    assert replay.loss == replay.recorded_loss
