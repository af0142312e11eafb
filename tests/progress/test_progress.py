"""The displays of progress, without a trainer."""

from collections.abc import Iterator, Mapping

import pytest
import tqdm
from hypothesis import example, given
from hypothesis import strategies as st

from pytorch_accelerated.progress.bars import BarDisplay, LineDisplay, Progress, Snapshot, bar_format, new_display
from pytorch_accelerated.progress.text import GrowingTable, format_number
from tests.support.terminal import in_a_terminal


class Clock:
    """Says the time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class RecordingDisplay:
    """Keeps what it is told to show, and asks for more every second."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.is_closed = False

    def start(self, now: float) -> float:
        return now + 1

    def show(self, snapshot: Snapshot, now: float) -> float:
        self.snapshots.append(snapshot)
        return now + 1

    def close(self, done: int) -> None:
        self.is_closed = True


def snapshot(facts: Mapping[str, str] | None = None, **changes: object) -> Snapshot:
    values: dict[str, object] = {
        "label": "epoch 3/10",
        "done": 450,
        "total": 1000,
        "seconds": 12.0,
        "batches_per_second": 36.5,
        "samples_per_batch": 32,
        "facts": {"loss": "0.4321", "lr": "1.00e-03"} if facts is None else facts,
    }
    return Snapshot(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_bar_is_left() -> Iterator[None]:
    yield
    assert not tqdm.tqdm._instances


# Counting


def run_batches(progress: Progress, clock: Clock, count: int, *, seconds_each: float) -> None:
    for _ in range(count):
        clock.now += seconds_each
        progress.advance()


def test_slow_batches_are_shown_every_second_with_speed_and_time_left():
    clock, display = Clock(), RecordingDisplay()
    progress = Progress("epoch 1/1", 100, display, samples_per_batch=8, clock=clock)
    run_batches(progress, clock, 10, seconds_each=0.5)
    assert [seen.done for seen in display.snapshots] == [2, 4, 6, 8, 10]
    last = display.snapshots[-1]
    assert (last.seconds, last.batches_per_second) == (5.0, 2.0)
    assert (last.time_left, last.throughput, last.percentage) == ("00:45", "16.0 samples/s", "10%")


# Lines


def line_times(
    clock: Clock, display: LineDisplay, lines: list[str], *, seconds: int, label: str, has_length: bool = False
) -> list[float]:
    """Run a pass of `seconds` with a batch each second; returns when lines appeared."""
    times = []
    progress = Progress(label, seconds if has_length else None, display, clock=clock)
    for _ in range(seconds):
        clock.now += 1
        count = len(lines)
        progress.advance()
        if len(lines) > count:
            times.append(clock.now - 1000)
    progress.close()
    return times


def test_lines_come_after_10_seconds_and_then_ever_more_rarely():
    lines: list[str] = []
    times = line_times(Clock(), LineDisplay(lines.append), lines, seconds=1200, label="epoch 1/10")
    assert times[:3] == [10, 40, 70]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 60


# Bars


def drawn(seen: Snapshot, columns: int) -> str:
    """The line that tqdm makes of a snapshot."""
    text = bar_format(seen, columns)
    return str(tqdm.tqdm.format_meter(seen.done, seen.total, seen.seconds, ncols=columns, bar_format=text, ascii=True))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (100, "450/1000 [00:12<00:15, 1168 samples/s, loss=0.4321, lr=1.00e-03]"),
        (75, "[00:12<00:15, 1168 samples/s, loss=0.4321]"),
        (60, "[00:12<00:15, loss=0.4321]"),
    ],
)
def test_a_bar_gives_up_words_before_it_becomes_too_short_to_read(columns, words):
    line = drawn(snapshot(), columns)
    assert (len(line), line[:17], line.partition("| ")[2]) == (columns, "epoch 3/10  45%|#", words)


@given(columns=st.integers(1, 200), label=st.text(min_size=1, max_size=30), total=st.none() | st.integers(450, 10**9))
def test_a_bar_never_overflows_its_line(columns, label, total):
    assert len(drawn(snapshot(label="{" + label.replace("\x1b", "") + "}", total=total), columns)) <= columns


def shown(clock: Clock, label: str = "epoch 1/2", total: int | None = 100) -> Progress:
    """A pass whose bar is on the screen."""
    progress = Progress(label, total, BarDisplay(), read_facts=lambda: {"loss": "0.5000"}, clock=clock)
    run_batches(progress, clock, 10, seconds_each=0.25)
    return progress


def test_bars_start_no_thread(monkeypatch):
    monkeypatch.setattr(tqdm.tqdm, "monitor", None)
    with in_a_terminal():
        shown(Clock()).close()
    assert tqdm.tqdm.monitor is None


# Where the output goes


def test_no_terminal_or_a_dumb_one_gets_lines_that_share_their_pace(monkeypatch):
    lines = LineDisplay(print)
    assert new_display(lines) is lines
    monkeypatch.setenv("TERM", "dumb")
    with in_a_terminal():
        assert new_display(lines) is lines


# Numbers and tables


@given(st.floats(1e-99, 1e99), st.sampled_from([1, -1]))
@example(999.96, 1)
@example(9999999.6, -1)
def test_a_formatted_number_is_narrow_and_right_to_four_digits(size, sign):
    text = format_number(sign * size)
    assert len(text) <= 10
    assert float(text) == pytest.approx(sign * size, rel=0.0005001)


ROW = {"epoch": "1", "train_loss_epoch": "0.4321", "eval_loss_epoch": "0.5123", "lr": "1.00e-03", "time": "7.9s"}


def add_rows(table: GrowingTable, *rows: dict[str, str]) -> list[str]:
    return [line for row in rows for line in table.add_row(row).splitlines()]


def table(columns: int = 80) -> GrowingTable:
    return GrowingTable(minor_names=("lr", "time"), columns=columns)


def test_a_new_column_brings_a_new_header_and_stays():
    lines = add_rows(table(), ROW, {**ROW, "accuracy": "0.9123"}, {**ROW, "epoch": "3"})
    assert lines[3:] == [
        "",
        "epoch  train_loss_epoch  eval_loss_epoch  accuracy        lr   time",
        "-----  ----------------  ---------------  --------  --------  -----",
        "    1            0.4321           0.5123    0.9123  1.00e-03   7.9s",
        "    3            0.4321           0.5123            1.00e-03   7.9s",
    ]


@given(
    columns=st.integers(30, 200),
    rows=st.lists(st.dictionaries(st.sampled_from(["train_loss_epoch", "f1", "lr", "a/bCd"]), st.just("1.000e-05"))),
)
def test_a_table_never_overflows_the_screen_and_keeps_its_columns_aligned(columns, rows):
    lines = add_rows(GrowingTable(("lr",), columns=columns), *[{"epoch": "1", **row} for row in rows])
    assert all(len(line) <= columns for line in lines)
    for rule, below in zip(lines, lines[1:], strict=False):
        if rule.startswith("-----"):
            starts = [i for i, mark in enumerate(rule) if mark == " "]
            assert all(below[i : i + 1] in ("", " ") for i in starts)
