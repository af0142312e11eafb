"""What `Trainer.train` was asked to do, as one checked object. tests/training/test_bad_input.py has what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.training.settings import TrainSettings, check_positive_count, parse_duration


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        (np.float32(2), 2.0),
        ("00:00:01", 1.0),
        ("01:02:03", 3723.0),
        ("100:00:00", 360000.0),
        ("1:00:00", 3600.0),
    ],
)
def test_a_duration_is_a_number_of_seconds_or_hours_minutes_and_seconds(duration: Any, seconds: float):
    assert parse_duration(duration) == seconds
    assert TrainSettings(num_epochs=1, max_duration=duration).max_seconds == seconds


@pytest.mark.parametrize("duration", ["1:00", "00:60:00", "00:00:60", "1h", "-1:00:00", "", None, True, [1], "1.5"])
def test_anything_else_is_not_a_duration(duration: Any):
    with pytest.raises(ConfigurationError, match="HH:MM:SS"):
        parse_duration(duration)


def test_all_complaints_of_one_kind_come_together_and_wrong_kinds_come_first():
    with pytest.raises(ArgumentTypeError) as kinds:
        TrainSettings(num_epochs="1", per_device_batch_size=0, gradient_clip_norm="x")  # type: ignore[arg-type]
    assert str(kinds.value).count(";") == 1
    assert "per_device_batch_size" not in str(kinds.value)
    with pytest.raises(ConfigurationError) as values:
        TrainSettings(num_epochs=0, per_device_batch_size=0, gradient_clip_norm=-1.0, max_duration="soon")
    assert str(values.value).count(";") == 3


def test_numbers_of_numpy_become_pythons():
    settings = TrainSettings(
        num_epochs=np.int64(3),
        per_device_batch_size=np.uint8(4),
        gradient_clip_value=np.float32(0.5),
    )
    assert settings == TrainSettings(num_epochs=3, per_device_batch_size=4, gradient_clip_value=0.5)
    assert {type(value) for value in dataclasses.astuple(settings)} == {int, float, str, bool, type(None)}


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainSettings(num_epochs=1).num_epochs = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ConfigurationError), (-3, ConfigurationError), (1.0, ArgumentTypeError), (True, ArgumentTypeError)],
)
def test_a_count_is_a_whole_number_of_at_least_1(value: Any, error: type[Exception]):
    check_positive_count("steps", 1)
    check_positive_count("steps", np.int64(1))
    with pytest.raises(error, match=f"`steps` is {value}"):
        check_positive_count("steps", value)
