"""The rows of an update, the updates of a row, and runs that leave rows out: computed, and the same as what happens."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.__main__ import main
from pytorch_accelerated.callbacks import (
    LimitBatchesCallback,
    LossSpikeCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, DataError
from tests.support.processes import run_forked, run_on_ranks
from tests.support.resuming import SaveAndStop, assert_same
from tests.support.rows import (
    ROWS,
    Batches,
    GivenBatches,
    LoggingData,
    check_rows_equal_the_log,
    loaders,
    order_of,
    train,
    train_in_order,
    trainer_of,
    without,
)
from tests.support.states import read_manifest

SCRIPT = Path(__file__).parents[1] / "ranks" / "rows.py"
UPDATES = 6  # of an epoch, with 4 rows each, but 3 in the last


def same_weights(actual: Trainer, expected: Trainer) -> None:
    assert_same(actual.model.state_dict(), expected.model.state_dict())
    assert actual.run_state.updates == expected.run_state.updates


# ------------------------------------------------------------------------------------------------- rows and updates


@pytest.mark.parametrize("name", loaders())
def test_rows_and_updates_are_those_of_a_log_that_the_dataset_wrote(name: str) -> None:
    expected = {"batches": 24, "drop_last": 15, "accumulation": 9, "few batches": 6, "a limit": 7}
    assert check_rows_equal_the_log(name) == expected.get(name, 18)


@pytest.mark.processes
def test_rows_and_runs_that_leave_some_out_are_the_same_on_two_ranks(tmp_path: Path) -> None:
    run_on_ranks(SCRIPT, 2, tmp_path)


def test_a_limit_of_batches_counts() -> None:
    trainer, data = trainer_of(LimitBatchesCallback(2)), LoggingData()
    arguments: dict[str, Any] = {"num_epochs": 3, "per_device_batch_size": 4}
    in_advance = trainer.rows_of(3, data, **arguments)
    trainer.train(data, **arguments)
    assert in_advance == trainer.rows_of(3) == order_of(1)[:4]
    with pytest.raises(ConfigurationError, match="The run has no update 7: they are counted from 1"):
        trainer.rows_of(7)


def test_a_run_that_continues_another_has_its_own_epochs() -> None:
    trainer = train()
    trainer.train(LoggingData(), 2, per_device_batch_size=4, reset_run_history=False)
    assert trainer.rows_of(1) == order_of(3)[:4]
    assert trainer.rows_of(UPDATES + 1) == order_of(4)[:4]
    trainer.evaluate(LoggingData(), 4)
    assert trainer.rows_of(1) == order_of(3)[:4]  # still of the last run of `train`


def test_a_callback_may_ask_within_a_run_which_stays_the_same() -> None:
    class Asks(TrainerCallback):
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            update = trainer.run_state.updates
            self.rows.append(trainer.rows_of(update))
            trainer.updates_of(3)
            with pytest.raises(ConfigurationError, match="`rows_of` was called while .* Leave the arguments"):
                trainer.rows_of(2, LoggingData(), 3, per_device_batch_size=2)

    class Counted(GivenBatches):
        """Another order whenever it is read."""

        reads = 0

        def __iter__(self) -> Any:
            self.reads += 1
            return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.reads)).tolist())

    for kwargs in ({}, {"batch_sampler": Batches()}):
        asking, plain = train(asks := Asks(), train_dataloader_kwargs=kwargs), train(train_dataloader_kwargs=kwargs)
        same_weights(asking, plain)
        assert asks.rows == [plain.rows_of(update) for update in range(1, plain.run_state.updates + 1)]
    orders = [range(ROWS)] * 3
    same_weights(
        train(Asks(), train_dataloader_kwargs={"sampler": Counted(orders)}),
        train(train_dataloader_kwargs={"sampler": Counted(orders)}),
    )


def test_a_resumed_run_knows_its_updates_before_and_after_the_state(tmp_path: Path) -> None:
    whole = train()
    expected = [whole.rows_of(update) for update in range(1, 3 * UPDATES + 1)]
    train(SaveAndStop(tmp_path / "state", 8))
    resumed = train(resume_from=tmp_path / "state")
    assert [resumed.rows_of(update) for update in range(1, 3 * UPDATES + 1)] == expected
    assert resumed.updates_of(7) == whole.updates_of(7)
    wider = train(resume_from=tmp_path / "state", per_device_batch_size=5)
    assert wider.rows_of(9) == order_of(1)[8:13]
    with pytest.raises(ConfigurationError, match=r"resumed after update 8, before which its batches were others"):
        wider.rows_of(8)
    trainer = trainer_of(seed=None)
    arguments: dict[str, Any] = {"per_device_batch_size": 4, "resume_from": tmp_path / "state"}
    assert trainer.rows_of(8, LoggingData(), 3, **arguments) == expected[7]  # the seed is that of the state
    assert trainer.rows_of(9, LoggingData(), 3, **arguments, leave_out={"updates": [9]}) == expected[9]
    assert trainer.run_context.asked.resumed_from is None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


def test_what_cannot_be_known_is_an_error_that_says_why() -> None:
    fresh, data = trainer_of(), LoggingData()
    with pytest.raises(
        ConfigurationError, match="`rows_of` got no `train_dataset`: .* there is none. Pass all arguments"
    ):
        fresh.rows_of(1)
    with pytest.raises(ConfigurationError, match="has no seed, so the order .* is decided when a run starts"):
        trainer_of(seed=None).rows_of(1, data, 3)
    with pytest.raises(TypeError, match="batchsize"):
        fresh.rows_of(1, data, 3, batchsize=4)
    with pytest.raises(ConfigurationError, match="the Stream is read as it comes"):
        fresh.rows_of(1, Stream(), 3)
    trained = train()
    for update in (0, 3 * UPDATES + 1):
        with pytest.raises(ConfigurationError, match=f"The run has no update {update}: they are counted"):
            trained.rows_of(update)
    with pytest.raises(ConfigurationError, match="There is no row 23: the LoggingData has 23 rows"):
        trained.updates_of(ROWS)
    with pytest.raises(ConfigurationError, match="`rows_of` got no `train_dataset`: .* there is one. Pass all"):
        trained.rows_of(1, per_device_batch_size=4)
    unseeded = trainer_of(seed=None)
    unseeded.train(data, 3, per_device_batch_size=4)
    assert unseeded.rows_of(7) == unseeded.rows_of(7, data, 3, per_device_batch_size=4)  # the seed of the last run


# ------------------------------------------------------------------------------------------------------- leaving out

LEFT = [2, 3, 11]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_without_rows_equals_one_whose_order_never_had_them(workers: int, accumulation: int) -> None:
    further: dict[str, Any] = {
        "train_dataloader_kwargs": {"num_workers": workers},
        "gradient_accumulation_steps": accumulation,
        "create_scheduler_fn": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1),
    }
    actual = train(leave_out={"rows": LEFT}, **further)
    same_weights(actual, train_in_order([without(order_of(epoch), LEFT) for epoch in range(3)], **further))
    assert all(actual.updates_of(row) == [] for row in LEFT)
    assert actual.run_config.num_update_steps_per_epoch == 5 // accumulation + (accumulation > 1)


def test_tensors_in_their_own_order_do_without_rows_too() -> None:
    data, kept = LoggingData(), [row for row in range(ROWS) if row not in LEFT]
    left, never = trainer_of(), trainer_of()
    arguments: dict[str, Any] = {"per_device_batch_size": 4, "train_dataloader_kwargs": {"shuffle": False}}
    left.train((data.inputs, data.targets), 3, leave_out={"rows": LEFT}, **arguments)
    never.train((data.inputs[kept], data.targets[kept]), 3, **arguments)
    same_weights(left, never)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_from_a_state_on_rows_and_updates_are_passed_over_and_later_states_keep_it(
    accumulation: int, tmp_path: Path
) -> None:
    further: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    size = 4 * accumulation
    per_epoch = -(-ROWS // size)
    stop = per_epoch + 1  # within the second epoch
    train(SaveAndStop(tmp_path / "first", stop), **further)
    left_out = {"rows": LEFT, "updates": [stop + 1, 2 * per_epoch + 1]}
    actual = train(leave_out=left_out, resume_from=tmp_path / "first", **further)
    orders = [order_of(epoch) for epoch in range(3)]
    del orders[1][size : 2 * size], orders[2][:size]
    orders = [orders[0], without(orders[1], LEFT, size), without(orders[2], LEFT)]
    expected = train_in_order(orders, **further)
    same_weights(actual, expected)
    # From a later state it holds without the argument, and another one adds to it.
    train(SaveAndStop(tmp_path / "second", stop + 1), leave_out=left_out, resume_from=tmp_path / "first", **further)
    same_weights(train(resume_from=tmp_path / "second", **further), expected)
    again = train(leave_out={"rows": [0]}, resume_from=tmp_path / "second", **further)
    orders = [orders[0], without(orders[1], [0], 2 * size), without(orders[2], [0])]
    same_weights(again, train_in_order(orders, **further))


def test_the_same_command_continues_the_run_and_leaves_nothing_out_twice(tmp_path: Path) -> None:
    command: dict[str, Any] = {"leave_out": {"rows": LEFT, "updates": [3, 9]}, "resume_from": tmp_path}
    whole = train(**{**command, "resume_from": None})
    for updates in (2, 5):
        train(SaveAndStop(tmp_path / f"after_{updates}", updates), **command)
    again = train(**command)
    same_weights(again, whole)
    assert [again.rows_of(update) for update in (1, 4, 9)] == [whole.rows_of(update) for update in (1, 4, 9)]
    for update in (4, 9):  # before the state, and after it
        found = again.replay(tmp_path, update)
        assert found.rows == whole.rows_of(update)
    assert train(resume_from=tmp_path).run_context.asked.left_out == again.run_context.asked.left_out


def test_updates_are_left_out_from_the_start_in_their_epoch_only() -> None:
    orders = [order_of(epoch) for epoch in range(3)]
    del orders[0][4:12], orders[1][20:]
    same_weights(train(leave_out={"updates": [2, 3, 12]}), train_in_order(orders))


def test_a_batch_sampler_has_smaller_batches_and_no_empty_ones(tmp_path: Path) -> None:
    batches = []
    for epoch in range(3):
        sampler = Batches()
        sampler.set_epoch(epoch)
        batches.append(list(sampler))
    gone = {epoch: batches[epoch][2] for epoch in range(3)}[1] + LEFT
    kwargs: dict[str, Any] = {"train_dataloader_kwargs": {"batch_sampler": Batches()}}
    never: list[Any] = [[without(batch, gone) for batch in each if without(batch, gone)] for each in batches]
    by_hand = {"train_dataloader_kwargs": {"batch_sampler": GivenBatches(never)}}
    same_weights(train(leave_out={"rows": gone}, **kwargs), train(**by_hand))
    train(SaveAndStop(tmp_path / "state", 8), **kwargs)
    actual = train(leave_out={"rows": gone, "updates": [10]}, resume_from=tmp_path / "state", **kwargs)
    second = [*batches[1][:2], *(without(batch, gone) for batch in [batches[1][2], *batches[1][4:]])]
    orders: list[Any] = [batches[0], [batch for batch in second if batch], never[2]]
    by_hand = {"train_dataloader_kwargs": {"batch_sampler": GivenBatches(orders)}}
    same_weights(actual, train(**by_hand))


def test_an_epoch_with_fewer_batches_than_the_first_one_is_a_whole_one() -> None:
    """A scheduler that steps after epochs does so."""

    class Fewer(Batches):
        def __iter__(self) -> Any:
            return itertools.islice(super().__iter__(), 3 if self.epoch else None)

    arguments: dict[str, Any] = {
        "create_scheduler_fn": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "step_scheduler": "epoch",
    }
    trainer = train(train_dataloader_kwargs={"batch_sampler": Fewer()}, **arguments)
    assert trainer.run_state.updates == UPDATES + 2 * 3
    assert trainer.scheduler.last_epoch == 3


@pytest.mark.processes
def test_a_killed_run_goes_on_without_the_rows(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="SIGKILL"):
        run_forked(SCRIPT, tmp_path)
    orders = [order_of(epoch) for epoch in range(3)]
    del orders[0][8:12], orders[1][8:12]
    expected = train_in_order([without(order, [4, 5]) for order in orders])
    same_weights(train(resume_from=tmp_path), expected)


def test_schedules_stay_as_they_were_planned_through_every_resume(tmp_path: Path) -> None:
    def lengths(*callbacks: Any, **arguments: Any) -> int | None:
        return train(*callbacks, **arguments).run_config.max_num_train_steps

    states = tmp_path / "states"
    for start in (0, 8):
        train(SaveAndStop(states / f"{start}", start + 1))
    first = {"leave_out": {"rows": LEFT}, "resume_from": states / "0"}
    assert lengths(SaveAndStop(states / "later", 4), **first) == 18
    assert lengths(resume_from=states / "later") == 18
    assert lengths(SaveAndStop(states / "short", 4), leave_out={"rows": LEFT}) == 15
    assert lengths(resume_from=states / "short") == 15


def test_states_and_the_run_say_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(SaveAndStop(tmp_path / "state", 3))
    saver = SaveTrainingStateCallback(tmp_path / "later")
    train(saver, leave_out={"rows": [3, 1], "updates": [5]}, resume_from=tmp_path / "state")
    words = "update 5; rows 1, 3 from update 4 on"
    assert f"Leaving out of the training data: {words}\n" in capsys.readouterr().out
    main(["checkpoints", "show", str(tmp_path / "later")])
    assert words in capsys.readouterr().out
    (of_update, of_rows) = read_manifest(tmp_path / "later" / "final").facts["left_out"]
    assert of_update == {"update": 5, "epoch": 0, "start": 16, "stop": 20, "rows": None, "planned_for": None}
    assert json.loads(json.dumps(of_rows))["rows"] == [1, 3]
    assert "left_out" not in read_manifest(tmp_path / "state").facts


def test_an_update_before_the_state_takes_an_earlier_state(tmp_path: Path) -> None:
    train(SaveAndStop(tmp_path, 9))
    with pytest.raises(
        ConfigurationError, match=r"names update 5, but .* after update 9, .* of update 4 or one before"
    ):
        train(leave_out={"updates": [11, 5]}, resume_from=tmp_path)


@pytest.mark.parametrize(
    ("leave_out", "error", "words"),
    [
        ([3, 5], ArgumentTypeError, "whole numbers may be those of rows, from 0, or of updates, from 1. Pass a dict"),
        ({"row": [3]}, ArgumentTypeError, "Pass a dict that says which"),
        ({"rows": 3}, ArgumentTypeError, "Pass a dict"),
        ({"rows": "a"}, ArgumentTypeError, "Pass a dict"),
        ({"updates": [0.5]}, ArgumentTypeError, "Pass a dict"),
        ({"updates": [True]}, ArgumentTypeError, "Pass a dict"),
        ({"updates": [0]}, ArgumentTypeError, "of updates, from 1"),
        ({"rows": [-1]}, ArgumentTypeError, "of rows, from 0"),
        ({"rows": [ROWS]}, ConfigurationError, "There is no row 23: the LoggingData has 23 rows"),
        ({"updates": [19]}, ConfigurationError, "The run has no update 19: they are"),
        ({"rows": range(ROWS)}, DataError, "There is nothing to train on"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(leave_out: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        train(leave_out=leave_out)


def test_data_whose_rows_are_unknown_cannot_do_without_some() -> None:
    with pytest.raises(ConfigurationError, match="the Stream is read as it comes, and its rows have no numbers"):
        trainer_of().train(Stream(), 1, leave_out={"rows": [1]})
    data = LoggingData()
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    with pytest.raises(ConfigurationError, match="DistributedSampler divides the rows over the ranks itself"):
        trainer_of().train(loader, 1, leave_out={"rows": [1]})


def test_the_rows_of_a_spike_are_known_with_a_sampler_too() -> None:
    class Spikes(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_loss_spike(self, trainer: Trainer, *, samples: Any, last_update: int, **spike: Any) -> None:
            self.seen.append((last_update, samples))

    trainer = train(
        LossSpikeCallback(threshold=1e-3), spikes := Spikes(), train_dataloader_kwargs={"batch_sampler": Batches()}
    )
    assert spikes.seen
    assert all(trainer.rows_of(update) == samples for update, samples in spikes.seen)
