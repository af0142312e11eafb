import copy
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.errors import UnknownMetricError
from pytorch_accelerated.record.history import InMemoryRunHistory, RunHistory
from pytorch_accelerated.record.step_records import StepRecord, usual_interval
from pytorch_accelerated.record.values import MetricRecord
from tests.support.processes import run_script


class MinimalHistory(RunHistory):
    """A user's history with only the abstract methods, and without ``super().__init__()``."""

    def __init__(self):
        self.stored = []

    def get_metric_names(self):
        return list(dict.fromkeys(name for name, _ in self.stored))

    def get_metric_values(self, name):
        return [value for stored_name, value in self.stored if stored_name == name]

    def get_latest_metric(self, name):
        return self.get_metric_values(name)[-1]

    def update_metric(self, name, value):  # type: ignore[override]  # as scripts have it, without `shown`
        self.stored.append((self.metric_name_prefix + name, value))

    def reset(self):
        self.stored.clear()


class DoublingHistory(InMemoryRunHistory):
    """Calls the method it overrides, once under the same name and once under another."""

    def update_metric(self, name, value):  # type: ignore[override]  # as scripts have it, without `shown`
        super().update_metric(name, value)
        super().update_metric(f"twice_{name}", 2 * value)


@pytest.fixture(params=[InMemoryRunHistory, MinimalHistory])
def history(request):
    return request.param()


def record_two_epochs(history):
    for epoch in (1, 2):
        history.updates_done = 10 * epoch
        history.update_metric("train_loss_epoch", 1 / epoch)
        history.update_metric("eval_loss_epoch", 2 / epoch)
        history._increment_epoch()


def test_each_value_is_recorded_with_its_epoch_and_update(history):
    record_two_epochs(history)
    assert history.records == (
        MetricRecord("train_loss_epoch", 1.0, epoch=1, update=10),
        MetricRecord("eval_loss_epoch", 2.0, epoch=1, update=10),
        MetricRecord("train_loss_epoch", 0.5, epoch=2, update=20),
        MetricRecord("eval_loss_epoch", 1.0, epoch=2, update=20),
    )


def test_reading_an_unknown_metric_creates_nothing_and_names_what_there_is():  # rough edge 19
    history = InMemoryRunHistory()
    with pytest.raises(ValueError, match="'loss' has no value. Nothing has been recorded yet"):
        history.get_latest_metric("loss")
    history.update_metric("train_loss", 1)
    history.update_metric("eval_loss", 1)
    with pytest.raises(UnknownMetricError, match="'loss' has no value. Known metrics: 'train_loss', 'eval_loss'"):
        history.get_latest_metric("loss")
    assert history.get_metric_values("loss") == []
    assert history.get_metric_names() == {"train_loss", "eval_loss"}


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        Fraction(2),
        np.float32(2),
        np.int64(2),
        np.array(2.0),
        torch.tensor(2),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.tensor(2.0, requires_grad=True),
    ],
)
def test_every_kind_of_number_is_stored_as_a_float(history, value):
    history.update_metric("loss", value)
    stored = history.get_latest_metric("loss")
    assert isinstance(value, (int, float, Fraction)) or stored.item() == 2
    assert isinstance(stored, float)
    assert stored == 2
    assert (type(stored) is float) == isinstance(value, (int, float, Fraction))
    assert history.records[0].value == 2


@pytest.mark.parametrize(
    "value",
    [
        "0.5",
        None,
        1j,
        [1.0],
        {"f1": 1.0, "nested": [(1, None)]},
        print,
    ],
)
def test_anything_else_is_kept_as_it_is(history, value):
    history.update_metric("accuracy", value)
    assert history.get_latest_metric("accuracy") == value
    assert type(history.get_latest_metric("accuracy")) is type(value)
    assert not history.records[0].is_scalar


@pytest.mark.parametrize("wrapped", [lambda value: value, lambda value: {"curve": [(value,)]}], ids=["alone", "nested"])
def test_later_changes_of_a_tensor_or_array_do_not_change_the_history(history, wrapped):
    def unwrapped(value):
        return value["curve"][0][0] if isinstance(value, dict) else value

    matrix, array = torch.ones(2, 3, requires_grad=True), np.ones(2)
    history.update_metric("matrix", wrapped(matrix * 2))
    history.update_metric("array", wrapped(array))
    counts = torch.zeros(1)
    for _ in range(2):
        counts += 1
        array += 1
        history.update_metric("counts", wrapped(counts))
    (stored,) = map(unwrapped, history.get_metric_values("matrix"))
    assert torch.equal(stored, torch.full((2, 3), 2.0))
    assert not stored.requires_grad
    assert unwrapped(history.get_latest_metric("array")).tolist() == [1, 1]
    assert [unwrapped(value).tolist() for value in history.get_metric_values("counts")] == [[1], [2]]


def test_reset_forgets_everything_but_the_prefix(history):
    history.set_metric_name_prefix("x_")
    record_two_epochs(history)
    history.read_new_records("logger")
    history.reset()
    assert list(history.get_metric_names()) == []
    assert history.records == ()
    assert history.current_epoch == 1
    assert history.metric_name_prefix == "x_"
    history.update_metric("loss", 1)
    assert history.read_new_records("logger") == [MetricRecord("x_loss", 1.0, epoch=1, update=0)]


def test_each_reader_sees_every_value_once(history):
    assert history.read_new_records("printer") == []
    history.update_metric("loss", 1)
    assert [record.value for record in history.read_new_records("printer")] == [1]
    history.update_metric("loss", 1)  # the same value again is news
    history.update_metric("accuracy", 2)
    assert [record.value for record in history.read_new_records("printer")] == [1, 2]
    assert [record.value for record in history.read_new_records("file")] == [1, 1, 2]
    assert history.read_new_records("printer") == []


def test_deleting_a_metric_keeps_the_others_and_the_readers_where_they_are(history):
    record_two_epochs(history)
    history.set_metric_name_prefix("now_")
    history.read_new_records("printer")
    history.update_metric("last", 5)
    history.delete_metric("train_loss_epoch")
    assert list(history.get_metric_names()) == ["eval_loss_epoch", "now_last"]
    assert history.get_metric_values("eval_loss_epoch") == [2.0, 1.0]
    assert [record.update for record in history.records] == [10, 20, 20]
    assert [record.name for record in history.read_new_records("printer")] == ["now_last"]
    assert history.current_epoch == 3
    assert history.metric_name_prefix == "now_"
    with pytest.raises(UnknownMetricError, match="'train_loss_epoch' has no value"):
        history.delete_metric("train_loss_epoch")


@pytest.mark.parametrize("version", ["1.0", "this one", "copy"])
def test_a_saved_history_continues_where_it_stopped(history, version):
    record_two_epochs(history)
    history.add_step_record(step_record(1))
    history.read_new_records("printer")
    history.update_metric("late", math.nan)
    history.update_metric("matrix", {"curve": torch.eye(2)})
    history.set_metric_name_prefix("x_")
    state = copy.deepcopy(history.state_dict())
    if version == "1.0":  # which kept lists
        steps = [[*each[:5], list(each.learning_rates), *each[6:10]] for each in history.step_records]
        state |= {"records": [list(record) for record in history.records], "step_records": steps}

    restored = history.copy() if version == "copy" else type(history)()
    if version != "copy":
        restored.update_metric("forgotten", 1)
        restored.load_state_dict(state)
    assert repr(restored.records) == repr(history.records)  # repr, as NaN is not equal to itself
    assert list(restored.get_metric_names()) == list(history.get_metric_names())
    for each in (history, restored):
        each._increment_epoch()
        each.update_metric("loss", 3)
        assert [record.name for record in each.read_new_records("printer")] == ["late", "matrix", "x_loss"]
        assert each.step_records == (step_record(1),)
    assert restored.records[-1] == history.records[-1] == MetricRecord("x_loss", 3.0, epoch=4, update=20)


def test_a_subclass_that_calls_what_it_overrides_records_each_value_once():
    history = DoublingHistory()
    history.update_metric("loss", 1)
    assert [(record.name, record.value) for record in history.records] == [("loss", 1.0), ("twice_loss", 2.0)]


def test_the_table_has_a_row_for_each_moment_and_a_column_for_each_metric(history):
    pytest.importorskip("pandas")
    record_two_epochs(history)
    history.updates_done = 25
    history.update_metric("intermediate_eval_loss", 0.25)
    table = history.to_dataframe()
    assert list(table.columns) == ["train_loss_epoch", "eval_loss_epoch", "intermediate_eval_loss"]
    assert table.index.names == ["epoch", "update"]
    assert list(table.index) == [(1, 10), (2, 20), (3, 25)]
    assert list(table["train_loss_epoch"].dropna()) == [1.0, 0.5]
    assert table.loc[(3, 25), "intermediate_eval_loss"] == 0.25
    assert table["eval_loss_epoch"].isna().tolist() == [False, False, True]


def drawn(figure):
    """The contents of a figure: by panel, the lines with their names, positions and values."""
    return {
        axes.get_title(loc="left"): {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()
        }
        for axes in figure.axes
    }


def test_the_plot_has_a_panel_for_each_quantity_with_losses_first():
    pytest.importorskip("matplotlib")
    history = InMemoryRunHistory()
    for epoch in (1, 2):
        for name in ["train_accuracy", "eval_accuracy", "train_loss_epoch", "eval_loss_epoch", "learning_rate"]:
            history.update_metric(name, epoch / 2)
        history.set_metric_name_prefix("ema_model_")
        history.update_metric("eval_loss_epoch", 3)
        history.set_metric_name_prefix()
        history._increment_epoch()
    figure: Any = history.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")  # it shows itself in a notebook
    panels = drawn(figure)
    assert drawn(pickle.loads(pickle.dumps(figure))) == panels
    assert {title: list(lines) for title, lines in panels.items()} == {
        "loss": ["train_loss_epoch", "eval_loss_epoch", "ema_model_eval_loss_epoch"],
        "accuracy": ["train_accuracy", "eval_accuracy"],
        "learning rate": ["learning_rate"],
    }
    assert list(panels)[0] == "loss"
    assert panels["accuracy"]["eval_accuracy"] == ([1, 2], [0.5, 1.0])


def test_plotting_needs_no_pyplot_and_importing_needs_no_matplotlib(tmp_path):
    pytest.importorskip("matplotlib")
    run_script(
        """
import sys
from pytorch_accelerated.record.history import InMemoryRunHistory
assert not {"matplotlib", "pandas"} & sys.modules.keys()
history = InMemoryRunHistory()
history.update_metric("loss", 1)
history.plot(path=sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
""",
        tmp_path / "history.svg",
    )
    assert "svg" in (tmp_path / "history.svg").read_text(encoding="utf-8")


def test_nothing_to_plot_is_an_error():
    pytest.importorskip("matplotlib")
    history = InMemoryRunHistory()
    with pytest.raises(UnknownMetricError, match="nothing to plot"):
        history.plot()


def step_record(update: int, epoch: int = 1) -> StepRecord:
    return StepRecord(epoch, update, 8 * update, 0.5 * update, 1 / update, (0.1, 0.01), None, 16.0, 0.25, None)


def test_each_reader_gets_every_step_record_once() -> None:
    history = MinimalHistory()
    assert not history.step_records
    first, second = step_record(1), step_record(2)
    history.add_step_record(first)
    assert history.read_new_step_records("file") == [first]
    history.add_step_record(second)
    assert history.read_new_step_records("file") == [second]
    assert history.read_new_step_records("file") == []
    assert history.read_new_step_records("tracker") == [first, second]
    assert history.step_records == (first, second)
    assert history.read_new_records("file") == []
    history.reset()
    assert not history.step_records
    assert history.read_new_step_records("file") == []


def test_the_usual_interval_gives_a_short_run_a_curve_and_a_long_one_some_thousand_points():
    assert [usual_interval(updates) for updates in (0, 1, 20, 255, 256, 512, 1024, 8191)] == [1, 1, 1, 1, 2, 4, 8, 8]
    for updates in (8192, 10_000, 123_456, 10**7):
        assert 1024 <= updates / usual_interval(updates) < 2048
