"""What evaluating returns, and what metrics are computed from."""

from typing import Any

import numpy as np
import pytest

from pytorch_accelerated.huggingface.evaluation.outputs import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
)


@pytest.mark.fact("Evaluation: EvalPrediction iterates and indexes over its available elements (inputs at 2)")
@pytest.mark.parametrize("extras", [{}, {"inputs": "in"}, {"losses": "out"}, {"inputs": "in", "losses": "out"}])
def test_a_prediction_iterates_and_indexes_like_that_of_transformers(extras: dict[str, Any]) -> None:
    from transformers import EvalPrediction as GenuinePrediction

    arrays: Any = np.zeros(2), np.ones(2)
    ours, theirs = EvalPrediction(*arrays, **extras), GenuinePrediction(*arrays, **extras)
    assert list(map(id, ours)) == list(map(id, theirs))
    assert [id(ours[index]) for index in range(len(list(ours)))] == list(map(id, theirs))
    with pytest.raises(IndexError):
        ours[len(list(ours))]
    assert (ours.predictions, ours.label_ids) == arrays
    assert (ours.inputs, ours.losses) == (extras.get("inputs"), extras.get("losses"))


@pytest.mark.fact("Evaluation: PredictionOutput, EvalLoopOutput and TrainOutput are named tuples")
def test_outputs_have_the_fields_of_those_of_transformers() -> None:
    from transformers import trainer_utils as genuine

    for ours in (EvalLoopOutput, PredictionOutput, TrainOutput):
        assert ours._fields == getattr(genuine, ours.__name__)._fields
