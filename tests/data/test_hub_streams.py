"""Runs over streams of `datasets`, resumed, equal the uninterrupted ones, and leave the stream as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.data.streams import is_exact_hub_stream
from tests.data.hub import EXACT, HUB_STREAMS, as_pairs, plain
from tests.support.resuming import SaveAndStop, assert_same
from tests.support.streaming import check_everywhere, outcome, run, stateful

# torchdata calls what torch 2.13 wants nobody to call.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

LOADERS: dict[str, Callable[[Any], Any]] = {
    "loader": lambda stream: DataLoader(stream, 2, collate_fn=as_pairs),
    "two workers": lambda stream: DataLoader(stream, 2, collate_fn=as_pairs, num_workers=2),
    "stateful loader": lambda stream: stateful(stream, collate_fn=as_pairs),
    "stateful loader with two workers": lambda stream: stateful(stream, collate_fn=as_pairs, num_workers=2),
    "workers that stay": lambda stream: stateful(stream, collate_fn=as_pairs, num_workers=2, persistent_workers=True),
}


class Peek(TrainerCallback):
    """Looks at the beginning of a stream now and then, as an evaluation would."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        next(iter(self.stream))


@pytest.mark.parametrize("name", HUB_STREAMS)
@pytest.mark.parametrize("kind", ["loader", "stateful loader"])
def test_a_run_resumed_anywhere_equals_the_uninterrupted_run(kind: str, name: str, tmp_path: Path) -> None:
    stream = HUB_STREAMS[name]()  # the same for all runs: none must leave anything behind in it
    check_everywhere(lambda: LOADERS[kind](stream), tmp_path, num_epochs=2)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("two workers", "rows with noise"),
        ("two workers", "noise in batches"),
        ("stateful loader with two workers", "a shuffle buffer with noise"),
        ("workers that stay", "rows with noise"),
    ],
)
def test_a_run_with_workers_resumed_within_an_epoch_equals_the_uninterrupted_run(
    kind: str, name: str, tmp_path: Path
) -> None:
    stream = HUB_STREAMS[name]()
    whole = outcome(run(LOADERS[kind](stream), num_epochs=2))
    run(LOADERS[kind](stream), SaveAndStop(tmp_path / "state", 8), num_epochs=2)  # of 6 in each epoch
    resumed = run(LOADERS[kind](stream), process_seed=99, num_epochs=2, resume_from=tmp_path / "state")
    assert_same(outcome(resumed), whole)


@pytest.mark.parametrize("kind", ["loader", "stateful loader"])
def test_a_stream_that_others_read_meanwhile_resumes_exactly(kind: str, tmp_path: Path) -> None:
    stream = plain()
    whole = outcome(run(LOADERS[kind](stream), num_epochs=2))
    run(LOADERS[kind](stream), Peek(stream), SaveAndStop(tmp_path / "state", 7), num_epochs=2)
    resumed = run(LOADERS[kind](stream), Peek(stream), num_epochs=2, resume_from=tmp_path / "state")
    assert_same(outcome(resumed), whole)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("name", ["rows", "a shuffle buffer"])
def test_a_resumed_run_leaves_the_stream_as_it_was(name: str, stops: bool, tmp_path: Path) -> None:
    stream = HUB_STREAMS[name]()
    before = {epoch: read(stream, epoch) for epoch in range(3)}
    run(LOADERS["loader"](stream), SaveAndStop(tmp_path / "state", 7))  # the second of the second epoch
    stopping = [SaveAndStop(tmp_path / "later", 8)] if stops else []
    run(LOADERS["loader"](stream), *stopping, resume_from=tmp_path / "state")
    assert {epoch: read(stream, epoch) for epoch in range(3)} == before


def read(stream: Any, epoch: int) -> list[Any]:
    stream.set_epoch(epoch)
    return list(stream)


@pytest.mark.parametrize("kind", ["loader", "stateful loader"])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_only_exact_streams_are_not_read_again(kind: str, is_shuffled: bool, tmp_path: Path) -> None:
    seen: list[Any] = []

    def watched(row: Any) -> Any:
        seen.append(row)
        return row

    stream = plain().map(watched)
    stream = stream.shuffle(seed=0, buffer_size=3) if is_shuffled else stream
    run(LOADERS[kind](stream), SaveAndStop(tmp_path / "state", 3), num_epochs=1)
    seen.clear()
    run(LOADERS[kind](stream), num_epochs=1, resume_from=tmp_path / "state")
    assert len(seen) == (10 if is_shuffled else 4)


@pytest.mark.parametrize("name", HUB_STREAMS)
def test_it_is_known_which_streams_say_exactly_where_they_are(name: str) -> None:
    assert is_exact_hub_stream(HUB_STREAMS[name]()) == (name in EXACT)


def test_a_stream_with_an_unknown_part_is_not_relied_upon() -> None:
    class Unknown:
        pass

    stream = plain()
    stream._ex_iterable.ex_iterable = Unknown()
    assert not is_exact_hub_stream(stream)
