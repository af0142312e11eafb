"""The displays of progress, without a trainer."""

from collections.abc import Iterator

import pytest
import tqdm
from hypothesis import example, given
from hypothesis import strategies as st

from pytorch_accelerated.record.bars import LineDisplay, Progress, bar_format, new_display
from pytorch_accelerated.record.text import GrowingTable, format_number
from tests.support.terminal import in_a_terminal


@pytest.fixture(autouse=True)
def _no_bar_is_left() -> Iterator[None]:
    yield
    assert not tqdm.tqdm._instances


# Lines


def test_lines_come_after_10_seconds_and_then_ever_more_rarely():
    now = 1000.0
    seen: list[tuple[float, str]] = []
    display = LineDisplay(lambda line: seen.append((now - 1000, line)))
    progress = Progress("epoch 1/10", 2400, display, samples_per_batch=8, clock=lambda: now)
    for _ in range(2400):
        now += 0.5
        progress.advance()
    progress.close()
    times = [time for time, _ in seen]
    assert seen[0][1] == "epoch 1/10: 0% (20/2400), 00:10 elapsed, 19:50 left, 16.0 samples/s"
    assert times[:3] == [10, 40, 70]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 60


# Bars


@given(columns=st.integers(1, 200), label=st.text(min_size=1, max_size=30), total=st.none() | st.integers(450, 10**9))
def test_a_bar_never_overflows_its_line(columns, label, total):
    label = "{" + label.replace("\x1b", "") + "}"
    progress = Progress(label, total, LineDisplay(print), samples_per_batch=32, done=450)
    progress.seconds, progress.batches_per_second = 12.0, 36.5
    progress.facts = {"loss": "0.4321", "lr": "1.00e-03"}
    text = bar_format(progress, columns)
    line = tqdm.tqdm.format_meter(450, total, 12.0, ncols=columns, bar_format=text, ascii=True)
    assert len(str(line)) <= columns


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
