"""A run over a stream that says where it is, resumed, equals the uninterrupted run and reads nothing again."""

import itertools
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import LimitBatchesCallback, SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import ConfigurationError, InvalidCheckpointError
from tests.chaos.saved_runs import sign
from tests.support.processes import run_on_ranks
from tests.support.reference import regression_data
from tests.support.resuming import AugmentedData, SaveAndStop, assert_same
from tests.support.streaming import (
    SaveEverywhere,
    Stateless,
    Walk,
    WithStepsOnly,
    check_everywhere,
    outcome,
    run,
    stateful,
)

RANKS = Path(__file__).parents[1] / "ranks"
# torchdata calls what torch 2.13 wants nobody to call.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class OwnLoader(StatefulDataLoader):  # type: ignore[misc]
    """An unknown kind of loader that draws from this process's generator when a pass begins."""


SOURCES: dict[str, Callable[[], Any]] = {
    "dataset": Walk,
    "loader": lambda: DataLoader(Walk(), 2),
    "stateful loader": lambda: stateful(Walk()),
    "stateful loader without a state behind it": lambda: stateful(Stateless()),
    "stateful loader of an iterator with a state": lambda: stateful(WithStepsOnly()),
    "two workers": lambda: stateful(Walk(), num_workers=2),
    "loader of one's own": lambda: OwnLoader(Walk(), 2),
    "loader prepared by accelerate": lambda: Accelerator(cpu=True).prepare(DataLoader(Walk(), 2)),
}


class Targets(TrainerCallback):
    """What was trained on, told by its targets, which no noise has changed."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_train_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
        self.rows += batch[1].tolist()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Of a run over a `Walk`, after the second of its 5 updates per epoch."""
    run(Walk(), SaveAndStop(tmp_path / "state", 2))
    return tmp_path / "state"


# ---------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize(
    ("source", "accumulation"), [*zip(SOURCES, itertools.cycle([1, 3])), ("dataset", 3), ("two workers", 1)]
)
def test_a_run_resumed_anywhere_equals_the_uninterrupted_run(source: str, accumulation: int, tmp_path: Path) -> None:
    check_everywhere(SOURCES[source], tmp_path, gradient_accumulation_steps=accumulation)


class CountsSome(Trainer):
    """Counts items, of which the second and the third batch of a pass have none."""

    def count_batch_items(self, batch: Any) -> int:
        (row,) = (regression_data(9)[1] == batch[1][0]).all(1).nonzero()
        return 0 if int(row) in (2, 4) else len(batch[0])


def test_a_stream_that_is_read_again_may_have_batches_without_items(tmp_path: Path) -> None:
    check_everywhere(Stateless, tmp_path, base=CountsSome, gradient_accumulation_steps=2)


@pytest.mark.parametrize("source", ["dataset", "stateful loader of an iterator with a state"])
def test_a_run_with_a_limit_of_updates_resumed_anywhere_equals_the_uninterrupted_run(
    source: str, tmp_path: Path
) -> None:
    check_everywhere(SOURCES[source], tmp_path, num_epochs=None, max_num_train_steps=7)


@pytest.mark.parametrize("cut", [3, 4, 5, 7])  # 5 updates are a pass
def test_a_stream_that_a_limit_has_cut_goes_on_where_it_was(cut: int, tmp_path: Path) -> None:
    def part(limit: int, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
        data = regression_data(4)
        return run(Walk(), *callbacks, eval_dataset=data, num_epochs=None, max_num_train_steps=limit, **arguments)

    part(cut, SaveTrainingStateCallback(tmp_path))
    assert_same(outcome(part(10, process_seed=99, resume_from=tmp_path)), outcome(part(10)))


@pytest.mark.parametrize("source", ["dataset", "two workers"])
def test_a_run_with_shortened_epochs_equals_the_uninterrupted_run(source: str, tmp_path: Path) -> None:
    saver, limit = SaveEverywhere(tmp_path), LimitBatchesCallback(2)
    whole = outcome(run(SOURCES[source](), limit, saver, num_epochs=2))
    for name in saver.saved:
        resumed = run(SOURCES[source](), limit, process_seed=99, num_epochs=2, resume_from=tmp_path / name)
        assert_same(outcome(resumed), whole)


class Divided(IterableDataset[Any]):
    """Rows without a position, divided over workers."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return zip(*(values[first::step] for values in regression_data(12)), strict=True)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_other_workers_than_before_are_refused_within_an_epoch_of_a_stream_without_a_position(
    before: int, after: int, tmp_path: Path
) -> None:
    saver = SaveEverywhere(tmp_path)
    run(Divided(), saver, train_dataloader_kwargs={"num_workers": before})
    others: dict[str, Any] = {"train_dataloader_kwargs": {"num_workers": after}}
    within = rf"saved by 1 process with num_workers={before} \(here 1 with {after}\).*, within an epoch. This distrib"
    with pytest.raises(ConfigurationError, match=within):
        run(Divided(), resume_from=tmp_path / "update_2", **others)
    seen = Targets()
    run(Divided(), seen, resume_from=tmp_path / "epoch_6", **others)  # two epochs are left
    assert sorted(seen.rows) == sorted(regression_data(12)[1].tolist() * 2)


@pytest.mark.processes
def test_runs_on_two_ranks_equal_the_uninterrupted_ones_and_resume_alone_where_they_can(tmp_path: Path) -> None:
    run_on_ranks(RANKS / "streams_resuming.py", 2, tmp_path)
    with pytest.raises(ConfigurationError, match="saved by 2 processes .*, within an epoch. This distributes the"):
        run(Walk(13), resume_from=tmp_path / "sharded" / "update_2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(Walk(), seen := Targets(), resume_from=tmp_path / "cut" / "update_2", num_epochs=1)
        run(Walk(13), resume_from=tmp_path / "sharded" / "epoch_4", num_epochs=2)
    messages = [str(warning.message) for warning in caught]
    assert sum("saved by 2 processes and resumes with 1" in message for message in messages) == 2
    assert sum("starts like a new one" in message for message in messages) == 2
    walk = Walk()
    rows = [targets.tolist() for _, targets in walk]
    assert seen.rows == rows[8:]  # two updates of two batches of two


@pytest.mark.parametrize("source", ["dataset", "loader", "two workers", "stateful loader of an iterator with a state"])
def test_nothing_is_read_again(source: str, tmp_path: Path) -> None:
    run(SOURCES[source](), SaveAndStop(tmp_path / "state", 6))  # the first update of the second epoch
    again = SOURCES[source]()
    run(again, resume_from=tmp_path / "state")
    dataset = getattr(again, "dataset", again)
    assert getattr(dataset, "walk", dataset).read.value == 7 + 9


def test_going_back_after_an_update_that_is_not_finite_goes_back_in_the_stream(tmp_path: Path) -> None:
    class Bad(Walk):
        def __iter__(self) -> Iterator[Any]:
            for inputs, targets in super().__iter__():
                is_first = self.order is not None and len(self.order) == 4
                yield inputs * (float("nan") if is_first else 1), targets

    seen = Targets()
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
    with pytest.warns(UserWarning, match="goes back to"):
        run(Bad(), saver, seen, nonfinite_policy="rollback", num_epochs=1)
    rows = [targets.tolist() for _, targets in Walk()]
    # The update with the bad row, the third one, was tried once, and passed over when the run had gone back.
    assert seen.rows == rows


def test_a_stateful_loader_of_other_data_is_planned_as_any_loader(tmp_path: Path) -> None:
    def loader(kind: Any, workers: int = 0) -> Any:
        return kind(AugmentedData(9), batch_size=2, shuffle=True, num_workers=workers)

    whole = outcome(run(loader(DataLoader)))
    run(loader(stateful), SaveAndStop(tmp_path / "state", 7))
    resumed = run(loader(stateful, workers=1), process_seed=99, resume_from=tmp_path / "state")
    assert_same(outcome(resumed), whole)


# --------------------------------------------------------------------------------------------- where it cannot go on


def test_another_number_of_workers_is_refused_within_an_epoch(tmp_path: Path) -> None:
    run(SOURCES["two workers"](), saver := SaveEverywhere(tmp_path))
    assert {"update_2", "epoch_5"} < set(saver.saved)
    with pytest.raises(
        ConfigurationError, match=r"num_workers=2 .here 1 with 0.*within an epoch.*Resume as it was saved"
    ):
        run(stateful(Walk()), resume_from=tmp_path / "update_2")
    with pytest.warns(UserWarning, match="starts like a new one"):
        run(stateful(Walk()), resume_from=tmp_path / "epoch_5")


def test_a_state_from_before_streams_had_one_can_be_loaded(state: Path) -> None:
    change_stream(state, lambda own: own.pop("stream"))
    with pytest.warns(UserWarning, match="does not say where the Walk was, so the Walk cannot resume.*skips used"):
        run(walk := Walk(), seen := Targets(), resume_from=state, num_epochs=1)
    assert walk.read.value == 9
    assert len(seen.rows) == 5


MISFITS: dict[str, Callable[[Any], Any]] = {
    "the state of another": lambda own: own["stream"].update(state={"os.system": "id"}),
    "samples that are no number": lambda own: own["stream"]["state"]["Walk"].update(samples=[1]),
    "a dataset that lacks something": lambda own: own["stream"]["state"]["Walk"]["dataset"].pop("order"),
}


def change_stream(folder: Path, change: Callable[[Any], Any]) -> None:
    file = folder / "rank_0.json"
    own = json.loads(file.read_text())
    change(own)
    file.write_text(json.dumps(own))
    sign(folder)


@pytest.mark.parametrize("name", MISFITS)
def test_states_that_do_not_fit_the_stream_are_refused_before_anything_changes(name: str, state: Path) -> None:
    change_stream(state, MISFITS[name])
    weights: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Watched(Trainer):
        def create_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
            weights.extend((parameter, parameter.clone()) for parameter in self.get_model().parameters())
            return super().create_train_dataloader(*args, **kwargs)

    with pytest.raises(InvalidCheckpointError):
        run(Walk(), base=Watched, resume_from=state)
    assert weights
    assert all(torch.equal(now, before) for now, before in weights)


def test_a_worker_that_does_not_take_its_state_is_known_before_anything_changes(tmp_path: Path) -> None:
    make = SOURCES["two workers"]
    run(make(), SaveAndStop(tmp_path / "state", 2))
    shutil.copytree(tmp_path / "state", tmp_path / "other")

    def spoil(own: Any) -> None:
        snapshot = own["stream"]["state"]["StatefulDataLoader"]["_snapshot"]
        snapshot["_worker_snapshots"]["worker_1"]["dataset_state"]["samples"] = "x"

    change_stream(tmp_path / "other", spoil)
    with pytest.raises(InvalidCheckpointError, match="The StatefulDataLoader cannot load its state .*TypeError"):
        run(make(), resume_from=tmp_path / "other")
    run(make(), resume_from=tmp_path / "state", num_epochs=1)


def test_a_state_that_needs_arguments_is_none(tmp_path: Path) -> None:
    class NeedsToBeTold(Stateless):
        def state_dict(self, samples: int, workers: int) -> dict[str, Any]:
            raise AssertionError(f"asked after {samples} of {workers}")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(f"given {state}")

    check_everywhere(NeedsToBeTold, tmp_path, num_epochs=1)
