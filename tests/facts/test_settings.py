"""What `Trainer.train` was asked to do, as one checked object. tests/training/test_bad_input.py has what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.settings import TrainSettings, parse_duration


@pytest.mark.parametrize(
    ("duration", "seconds"), [(90, 90.0), (np.float32(2), 2.0), ("01:02:03", 3723.0), ("100:00:00", 360000.0)]
)
def test_a_duration_is_a_number_of_seconds_or_hours_minutes_and_seconds(duration: Any, seconds: float):
    assert TrainSettings(num_epochs=1, max_duration=duration).max_seconds == seconds


@pytest.mark.parametrize("duration", ["1:00", "00:60:00", "1h", "-1:00:00", "", None, True, [1], "1.5"])
def test_anything_else_is_not_a_duration(duration: Any):
    with pytest.raises(ConfigurationError, match="HH:MM:SS"):
        parse_duration(duration)


def test_numbers_of_numpy_become_pythons():
    settings = TrainSettings(
        num_epochs=np.int64(3), per_device_batch_size=np.uint8(4), gradient_clip_value=np.float32(0.5)
    )
    assert settings == TrainSettings(num_epochs=3, per_device_batch_size=4, gradient_clip_value=0.5)
    assert {type(value) for value in dataclasses.astuple(settings)} == {int, float, str, bool, type(None)}
