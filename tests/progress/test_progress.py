"""The displays of progress, without a trainer."""

import contextlib
import io
import logging
import math
import os
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tqdm
from hypothesis import example, given
from hypothesis import strategies as st

from pytorch_accelerated.progress.display import BarDisplay, LineDisplay, above_bars, bar_format, display_factory
from pytorch_accelerated.progress.formats import format_number
from pytorch_accelerated.progress.progress import Progress
from pytorch_accelerated.progress.snapshot import Snapshot
from pytorch_accelerated.progress.table import GrowingTable, block
from tests.support.terminal import Terminal, in_a_terminal


class Clock:
    """Says the time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.times_read = 0

    def __call__(self) -> float:
        self.times_read += 1
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

    def redraw(self) -> None:
        pass

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


def test_the_clock_is_read_rarely_while_batches_are_quick():
    clock, display = Clock(), RecordingDisplay()
    progress = Progress("epoch 1/1", None, display, clock=clock)
    run_batches(progress, clock, 64_000, seconds_each=1e-5)
    assert progress.done == 64_000
    assert clock.times_read < 1100  # once in 64 batches, and a few at the start


def test_batches_that_become_slow_are_noticed_within_64_of_them():
    clock, display = Clock(), RecordingDisplay()
    progress = Progress("epoch 1/1", None, display, clock=clock)
    run_batches(progress, clock, 10_000, seconds_each=1e-5)
    run_batches(progress, clock, 64, seconds_each=10)
    shown_before = len(display.snapshots)
    run_batches(progress, clock, 5, seconds_each=10)
    assert len(display.snapshots) == shown_before + 5


def test_facts_are_read_once_a_second_however_often_the_display_is_refreshed():
    clock = Clock()
    reads: list[float] = []

    class ImpatientDisplay(RecordingDisplay):
        def show(self, snapshot: Snapshot, now: float) -> float:
            super().show(snapshot, now)
            return now

    def read_facts() -> dict[str, str]:
        reads.append(clock.now)
        return {"loss": str(len(reads))}

    display = ImpatientDisplay()
    progress = Progress("epoch 1/1", 100, display, read_facts=read_facts, clock=clock)
    run_batches(progress, clock, 40, seconds_each=0.125)
    assert len(display.snapshots) == 33  # all of the 5 seconds but the first
    assert reads == [1001, 1002, 1003, 1004, 1005]
    assert display.snapshots[-1].facts == {"loss": "5"}


def test_batches_done_before_a_resume_count_as_progress_but_not_as_speed():
    clock, display = Clock(), RecordingDisplay()
    progress = Progress("epoch 1/1", 100, display, done=50, clock=clock)
    run_batches(progress, clock, 4, seconds_each=0.5)
    assert display.snapshots[-1].done == 54
    assert display.snapshots[-1].batches_per_second == 2
    assert display.snapshots[-1].time_left == "00:23"


def test_the_speed_follows_a_change_of_pace():
    clock, display = Clock(), RecordingDisplay()
    progress = Progress("epoch 1/1", 1000, display, clock=clock)
    run_batches(progress, clock, 10, seconds_each=10)
    run_batches(progress, clock, 200, seconds_each=1)
    assert display.snapshots[-1].batches_per_second == 1


def test_a_pass_closes_its_display_also_after_an_exception():
    display = RecordingDisplay()
    with pytest.raises(KeyError), Progress("epoch 1/1", 10, display):
        raise KeyError
    assert display.is_closed


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


def test_a_quick_pass_prints_no_line():
    lines: list[str] = []
    line_times(Clock(), LineDisplay(lines.append), lines, seconds=9, label="epoch 1/10")
    assert lines == []


def test_lines_come_after_10_seconds_and_then_ever_more_rarely():
    lines: list[str] = []
    times = line_times(Clock(), LineDisplay(lines.append), lines, seconds=1200, label="epoch 1/10")
    assert times[:3] == [10, 40, 70]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 60


def test_a_pass_that_is_about_to_end_prints_no_line():
    clock = Clock()
    lines: list[str] = []
    display = LineDisplay(lines.append)
    assert line_times(clock, display, lines, seconds=19, label="epoch 1/2", has_length=True) == []
    assert line_times(clock, display, lines, seconds=45, label="epoch 2/2", has_length=True) == [29]


def test_a_run_of_days_still_prints_a_line_every_10_minutes():
    lines: list[str] = []
    times = line_times(Clock(), LineDisplay(lines.append), lines, seconds=50_000, label="epoch 1/1")
    assert times[-1] - times[-2] == 600


def test_many_short_epochs_print_at_most_one_line_in_30_seconds():
    clock = Clock()
    lines: list[str] = []
    display = LineDisplay(lines.append)
    times = []
    for epoch in range(1, 101):
        times += line_times(clock, display, lines, seconds=12, label=f"epoch {epoch}/100")
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert times[0] == 10
    assert min(gaps) >= 30


def test_a_pass_inside_another_does_not_bring_more_lines():
    clock = Clock()
    lines: list[str] = []
    display = LineDisplay(lines.append)
    outer = Progress("epoch 1/1", None, display, clock=clock)
    run_batches(outer, clock, 9, seconds_each=1)
    times = line_times(clock, display, lines, seconds=11, label="evaluation")
    assert times == [19]
    run_batches(outer, clock, 10, seconds_each=1)
    assert len(lines) == 1


def test_a_line_has_everything_in_words():
    lines: list[str] = []
    display = LineDisplay(lines.append)
    display.show(snapshot(), now=10)
    display.show(snapshot(total=None, samples_per_batch=None), now=1000)
    assert lines == [
        "epoch 3/10: 45% (450/1000), 00:12 elapsed, 00:15 left, 1168 samples/s, loss 0.4321, lr 1.00e-03",
        "epoch 3/10: 450 batches, 00:12 elapsed, 36.5 batches/s, loss 0.4321, lr 1.00e-03",
    ]


# Bars


def drawn(seen: Snapshot, columns: int) -> str:
    """The line that tqdm makes of a snapshot."""
    text = bar_format(seen, columns)
    return str(tqdm.tqdm.format_meter(seen.done, seen.total, seen.seconds, ncols=columns, bar_format=text, ascii=True))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (100, "450/1000 [00:12<00:15, 1168 samples/s, loss=0.4321, lr=1.00e-03]"),
        (80, "[00:12<00:15, 1168 samples/s, loss=0.4321, lr=1.00e-03]"),
        (75, "[00:12<00:15, 1168 samples/s, loss=0.4321]"),
        (60, "[00:12<00:15, loss=0.4321]"),
    ],
)
def test_a_bar_gives_up_words_before_it_becomes_too_short_to_read(columns, words):
    line = drawn(snapshot(), columns)
    assert len(line) == columns
    assert line.startswith("epoch 3/10  45%|#")
    assert line.endswith(f"| {words}")


def test_in_40_columns_the_words_stand_alone():
    assert drawn(snapshot(), 40) == "epoch 3/10  45% 00:15 left, loss=0.4321"


def test_a_stream_is_counted_without_a_bar():
    assert drawn(snapshot(total=None), 100) == (
        "epoch 3/10 450 batches [00:12, 1168 samples/s, loss=0.4321, lr=1.00e-03]"
    )


@given(columns=st.integers(1, 200), label=st.text(min_size=1, max_size=30), total=st.none() | st.integers(450, 10**9))
def test_a_bar_never_overflows_its_line(columns, label, total):
    assert len(drawn(snapshot(label="{" + label.replace("\x1b", "") + "}", total=total), columns)) <= columns


def shown(clock: Clock, label: str = "epoch 1/2", total: int | None = 100) -> Progress:
    """A pass whose bar is on the screen."""
    progress = Progress(label, total, BarDisplay(), read_facts=lambda: {"loss": "0.5000"}, clock=clock)
    run_batches(progress, clock, 10, seconds_each=0.25)
    return progress


def test_a_bar_is_on_the_terminal_until_its_pass_is_over():
    with in_a_terminal(80) as terminal:
        progress = shown(Clock())
        [line] = terminal.screen
        assert line.startswith("epoch 1/2  10%|")
        assert line.endswith("| 10/100 [00:02<00:22, 4.00 batches/s, loss=0.5000]")
        progress.close()
        assert terminal.screen == []


def test_a_quick_pass_draws_no_bar():
    clock = Clock()
    with in_a_terminal() as terminal:
        with Progress("epoch 1/1", 10, BarDisplay(), clock=clock) as progress:
            run_batches(progress, clock, 10, seconds_each=0.01)
        assert terminal.received == ""


def test_a_bar_inside_another_disappears_alone():
    clock = Clock()
    with in_a_terminal(80) as terminal:
        outer = shown(clock)
        inner = shown(clock, label="evaluation", total=20)
        assert [line.split()[0] for line in terminal.screen] == ["epoch", "evaluation"]
        inner.close()
        assert [line.split()[0] for line in terminal.screen] == ["epoch"]
        outer.close()
        assert terminal.screen == []


def test_output_printed_while_a_bar_is_shown_appears_above_it():
    with in_a_terminal(80) as terminal:
        progress = shown(Clock())
        with above_bars():
            print("a row")
        first, second = terminal.screen
        assert first == "a row"
        assert second.startswith("epoch 1/2")
        progress.close()
        assert terminal.screen == ["a row"]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """One that nobody else listens to."""
    logger = logging.getLogger("tests.progress")
    logger.propagate = False
    yield logger
    logger.handlers.clear()
    logger.propagate = True


def first_words(terminal: Terminal) -> list[str]:
    return [line.split()[0] for line in terminal.screen]


def test_lines_of_a_log_stand_above_the_bars(logger):
    with in_a_terminal(80) as terminal:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        logger.addHandler(handler)
        clock = Clock()
        outer, inner = shown(clock), shown(clock, label="evaluation", total=20)
        logger.warning("first")
        assert terminal.screen == ["WARNING first"]
        run_batches(inner, clock, 1, seconds_each=0.02)  # long before the bar has news
        assert first_words(terminal) == ["WARNING", "epoch", "evaluation"]
        logger.warning("second")
        inner.close()
        assert first_words(terminal) == ["WARNING", "WARNING", "epoch"]
        logger.warning("third")
        outer.close()
        logger.warning("fourth")
        assert terminal.screen == ["WARNING first", "WARNING second", "WARNING third", "WARNING fourth"]
        assert not handler.filters


def test_output_of_log_handlers_is_the_same_with_a_bar(logger):
    with in_a_terminal(80) as terminal:
        details, errors = logging.StreamHandler(), logging.StreamHandler()
        logger.setLevel(logging.DEBUG)
        details.setLevel(logging.INFO)
        details.addFilter(lambda record: record.levelno < logging.ERROR)
        errors.setLevel(logging.ERROR)
        errors.setFormatter(logging.Formatter("error: %(message)s"))
        logger.addHandler(details)
        logger.addHandler(errors)
        with shown(Clock()):
            logger.debug("a detail")
            logger.info("information")
            logger.error("a mistake")
        assert terminal.screen == ["information", "error: a mistake"]


def test_a_log_without_handlers_appears_above_the_bars_too():
    logger = logging.Logger("without parents, which could have handlers")
    with in_a_terminal(80) as terminal:
        progress = shown(Clock())
        logger.warning("nobody set up logging")
        logger.info("a detail")
        progress._display.redraw()
        first, second = terminal.screen
        progress.close()
    assert first == "nobody set up logging"
    assert second.startswith("epoch 1/2")
    assert logging.lastResort is not None
    assert not logging.lastResort.filters


def test_warnings_stand_above_the_bars():
    before = warnings.showwarning
    with in_a_terminal(80) as terminal, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = print_warning
        progress = shown(Clock())
        warnings.warn("look at this", stacklevel=1)
        progress._display.redraw()
        first, second = terminal.screen
        progress.close()
        assert warnings.showwarning is print_warning
    assert first == "UserWarning: look at this"
    assert second.startswith("epoch 1/2")
    assert warnings.showwarning is before


def print_warning(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
    print(f"{category.__name__}: {message}", file=sys.stderr)


def test_warnings_are_recorded_as_ever_while_a_bar_is_shown():
    with in_a_terminal(80) as terminal:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            progress = shown(Clock())
            warnings.warn("look at this", stacklevel=1)
        progress.close()
        assert terminal.screen == []
    assert [str(warning.message) for warning in recorded] == ["look at this"]


def test_a_log_that_goes_to_a_file_or_is_redirected_meanwhile_stays_there(logger, tmp_path):
    elsewhere = io.StringIO()
    with in_a_terminal(80) as terminal:
        to_file, redirected = logging.FileHandler(tmp_path / "log"), logging.StreamHandler()
        logger.addHandler(to_file)
        logger.addHandler(redirected)
        progress = shown(Clock())
        redirected.setStream(elsewhere)
        logger.warning("not for the screen")
        progress._display.redraw()
        assert [line.split()[0] for line in terminal.screen] == ["epoch"]
        progress.close()
        assert terminal.screen == []
    to_file.close()
    assert (tmp_path / "log").read_text() == elsewhere.getvalue() == "not for the screen\n"


def test_a_line_from_a_loader_process_is_printed_on_its_own(logger):
    with in_a_terminal(80) as terminal:
        logger.addHandler(logging.StreamHandler())
        progress = shown(Clock())
        child = os.fork()
        if not child:
            logger.warning("from a loader process")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert terminal.screen == ["from a loader process"]
        progress.close()


def test_handlers_are_as_before_when_an_exception_ends_the_pass(logger):
    with in_a_terminal(80) as terminal:
        handler, before = logging.StreamHandler(), warnings.showwarning
        logger.addHandler(handler)
        with contextlib.suppress(RuntimeError), shown(Clock()):
            assert handler.filters
            assert warnings.showwarning is not before
            raise RuntimeError
        assert not handler.filters
        assert warnings.showwarning is before
        assert terminal.screen == []


def test_bars_start_no_thread(monkeypatch):
    monkeypatch.setattr(tqdm.tqdm, "monitor", None)
    with in_a_terminal():
        shown(Clock()).close()
    assert tqdm.tqdm.monitor is None


# Where the output goes


def test_a_terminal_gets_a_bar_for_each_pass(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with in_a_terminal():
        new_display = display_factory(print)
        first, second = new_display(), new_display()
    assert isinstance(first, BarDisplay)
    assert isinstance(second, BarDisplay)
    assert first is not second


def test_no_terminal_or_a_dumb_one_gets_lines_that_share_their_pace(monkeypatch):
    new_display = display_factory(print)
    assert isinstance(new_display(), LineDisplay)
    assert new_display() is new_display()
    monkeypatch.setenv("TERM", "dumb")
    with in_a_terminal():
        assert isinstance(display_factory(print)(), LineDisplay)


def test_a_program_without_an_error_stream_gets_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(display_factory(print)(), LineDisplay)


# Numbers and tables


@given(st.floats(1e-99, 1e99), st.sampled_from([1, -1]))
@example(999.96, 1)
@example(9999999.6, -1)
def test_a_formatted_number_is_narrow_and_right_to_four_digits(size, sign):
    text = format_number(sign * size)
    assert len(text) <= 10
    assert float(text) == pytest.approx(sign * size, rel=0.0005001)


def test_special_numbers_have_their_usual_names():
    assert [format_number(value) for value in (0.0, math.nan, math.inf, -math.inf)] == ["0.000", "nan", "inf", "-inf"]


ROW = {"epoch": "1", "train_loss_epoch": "0.4321", "eval_loss_epoch": "0.5123", "lr": "1.00e-03", "time": "7.9s"}


def add_rows(table: GrowingTable, *rows: dict[str, str]) -> list[str]:
    return [line for row in rows for line in table.add_row(row).splitlines()]


def table(columns: int = 80) -> GrowingTable:
    return GrowingTable(minor_names=("lr", "time"), columns=columns)


def test_a_header_is_printed_above_the_first_row_only():
    assert add_rows(table(), ROW, {**ROW, "epoch": "10", "time": "59:59"}) == [
        "epoch  train_loss_epoch  eval_loss_epoch        lr   time",
        "-----  ----------------  ---------------  --------  -----",
        "    1            0.4321           0.5123  1.00e-03   7.9s",
        "   10            0.4321           0.5123  1.00e-03  59:59",
    ]


def test_a_long_table_repeats_its_header_every_30_rows():
    lines = add_rows(table(), *[{**ROW, "epoch": str(epoch)} for epoch in range(1, 62)])
    assert [i for i, line in enumerate(lines) if line.startswith("epoch")] == [0, 33, 66]
    assert lines[32:34] == ["", lines[0]]


def test_a_new_column_brings_a_new_header_and_stays():
    lines = add_rows(table(), ROW, {**ROW, "accuracy": "0.9123"}, {**ROW, "epoch": "3"})
    assert lines[3:] == [
        "",
        "epoch  train_loss_epoch  eval_loss_epoch  accuracy        lr   time",
        "-----  ----------------  ---------------  --------  --------  -----",
        "    1            0.4321           0.5123    0.9123  1.00e-03   7.9s",
        "    3            0.4321           0.5123            1.00e-03   7.9s",
    ]


def test_a_value_too_wide_for_its_column_widens_it():
    lines = add_rows(table(), {"epoch": "1", "f1": "0.9123"}, {"epoch": "2", "f1": "1.000e-05"})
    assert lines[-3:] == ["epoch         f1", "-----  ---------", "    2  1.000e-05"]


def test_values_of_the_usual_sizes_leave_their_column_as_wide_as_it_is():
    values = (1.0, 0.995, -0.5, 12.5, 123.45, 12345.6, 1234567, 0.0)
    lines = add_rows(table(), *({"epoch": "1", "r2": format_number(value), "time": "7.9s"} for value in values))
    assert lines[:4] == [
        "epoch       r2   time",
        "-----  -------  -----",
        "    1    1.000   7.9s",
        "    1   0.9950   7.9s",
    ]
    assert len(lines) == 2 + len(values)


def test_in_a_narrow_terminal_the_names_are_wrapped():
    assert add_rows(table(60), {**ROW, "MulticlassAccuracy": "0.9123"}) == [
        "           train_  eval_loss_  Multiclass",
        "epoch  loss_epoch       epoch    Accuracy        lr   time",
        "-----  ----------  ----------  ----------  --------  -----",
        "    1      0.4321      0.5123      0.9123  1.00e-03   7.9s",
    ]


def test_in_40_columns_a_table_does_without_learning_rate_and_time():
    assert add_rows(table(40), {**ROW, "accuracy": "0.9123"}) == [
        "           train_  eval_loss_",
        "epoch  loss_epoch       epoch  accuracy",
        "-----  ----------  ----------  --------",
        "    1      0.4321      0.5123    0.9123",
    ]


def test_with_too_many_metrics_a_row_becomes_a_block():
    metrics = {f"validation_metric_{i}": f"0.{i}000" for i in range(5)}
    assert add_rows(table(60), {"epoch": "7", **metrics, "time": "7.9s"}) == [
        "epoch 7",
        "  validation_metric_0 0.0000  validation_metric_1 0.1000",
        "  validation_metric_2 0.2000  validation_metric_3 0.3000",
        "  validation_metric_4 0.4000  time                  7.9s",
    ]


def test_a_few_metrics_fit_into_one_line():
    assert block({"evaluation_loss": "0.4330", "accuracy": "0.9213"}, columns=80) == [
        "evaluation_loss 0.4330, accuracy 0.9213"
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


# Notebooks


class NotebookShell:
    """What IPython's shell looks like inside a notebook kernel."""

    config: dict[str, dict[str, str]] = {"IPKernelApp": {}}


def enter_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = NotebookShell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)


def test_a_terminal_session_of_ipython_is_not_a_notebook(monkeypatch):
    enter_notebook(monkeypatch)
    monkeypatch.setattr(NotebookShell, "config", {"TerminalIPythonApp": {}})
    assert isinstance(display_factory(print)(), LineDisplay)
