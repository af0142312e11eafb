"""Unreadable states are not mistaken for missing ones: our own errors before the first update, no fresh start."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.huggingface import get_last_checkpoint
from pytorch_accelerated.prediction.stored import StoredPredictions
from tests.support.processes import run_forked
from tests.support.reference import regression_data, tiny_trainer


def loop(place: Path) -> Path:
    (place / "loop").symlink_to(place / "loop")
    return place / "loop"


def below_a_file(place: Path) -> Path:
    (place / "file").write_text("x")
    return place / "file" / "states"


ODD: dict[str, Callable[[Path], Path]] = {
    "a link to itself": loop,
    "below a link to itself": lambda place: loop(place) / "states",
    "below a file": below_a_file,
    "a name that is too long": lambda place: place / ("x" * 300),
}
USES: dict[str, Callable[[Path], Any]] = {
    "resume": lambda path: tiny_trainer().train(regression_data(6), 1, resume_from=path),
    "load_training_state": lambda path: tiny_trainer().load_training_state(path),
    "load_checkpoint": lambda path: tiny_trainer().load_checkpoint(path),
    "save_checkpoint": lambda path: tiny_trainer().save_checkpoint(path),
    "save_training_state": lambda path: tiny_trainer().save_training_state(path),
    "stored predictions": StoredPredictions,
    "predict": lambda path: tiny_trainer().predict(regression_data(3), output_path=path),
    "get_last_checkpoint": get_last_checkpoint,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("odd", ODD)
def test_a_path_that_leads_nowhere_is_an_error_of_ours(odd: str, use: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        USES[use](ODD[odd](tmp_path))


SCRIPT = """
import os, sys, tempfile, warnings
from pathlib import Path

import torch
from pytorch_accelerated.states.verify import find_state
from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.huggingface.checkpoints.saving import find_checkpoint
from pytorch_accelerated.prediction.stored import StoredPredictions
from tests.huggingface.runs import make_trainer
from tests.support.reference import regression_data, tiny_trainer


# Another place than pytest's, which other users cannot reach.
with tempfile.TemporaryDirectory() as name:
    place = Path(name)
    place.chmod(0o755)
    trainer = tiny_trainer()
    trainer.train(regression_data(6), 1)
    for state in ("old/step_1", "old/step_2", "new/step_1"):
        trainer.save_training_state(place / state)
    trainer.save_checkpoint(place / "new" / "model.pt")
    trainer.predict(regression_data(3), output_path=place / "predictions")
    make_trainer(place / "out", max_steps=2, save_strategy="steps", save_steps=1).train()
    tiny_trainer().train(regression_data(6), 1, resume_from=place / "old")  # all that is imported late is there now
    cases = {
        "a state": (place / "new/step_1", lambda: find_state(place / "new")),
        "a run": (place / "new/step_1", lambda: tiny_trainer().train(regression_data(6), 1, resume_from=place / "new")),
        "a manifest": (place / "new/step_1/manifest.json", lambda: find_state(place / "new")),
        "the folder": (place / "new", lambda: find_state(place / "new")),
        "a parent of nothing": (place / "new", lambda: find_state(place / "new" / "none")),
        "a file": (place / "new/model.pt", lambda: tiny_trainer().load_checkpoint(place / "new/model.pt")),
        "predictions": (place / "predictions", lambda: StoredPredictions(place / "predictions")),
        "checkpoints": (place / "out", lambda: find_checkpoint(None, place / "out")),
        "saving a state": (place / "new", lambda: trainer.save_training_state(place / "new" / "other")),
    }

    def as_another(work):
        # Nobody may read what has no rights; root may.
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                result = work()
        except CheckpointError as error:
            return type(error).__name__, str(error), []
        finally:
            os.seteuid(user)
        return "no error", result, [str(one.message) for one in told]

    for name, (hidden, work) in cases.items():
        mode = hidden.stat().st_mode
        hidden.chmod(0)
        outcome, text, _ = as_another(work)
        hidden.chmod(mode)
        assert outcome != "no error", (name, text)
        assert "ermission denied" in text or "permissions" in text, (name, text)
        print(name)

    # With another one beside it that can be read, that is taken, and a warning tells of it.
    for hidden, work, taken in (
        (place / "old/step_2", lambda: find_state(place / "old"), place / "old/step_1"),
        (place / "out/checkpoint-2", lambda: find_checkpoint(None, place / "out"), place / "out/checkpoint-1"),
    ):
        hidden.chmod(0)
        outcome, result, told = as_another(work)
        hidden.chmod(0o755)
        assert (outcome, result) == ("no error", taken), (outcome, result)
        assert any(str(hidden) in text for text in told), told
    # What is nobody's business is passed over.
    for name in ("lost+found", ".Trash-0"):
        (place / "none" / name).mkdir(parents=True)
        (place / "none" / name).chmod(0)
    assert as_another(lambda: find_state(place / "none"))[:2] == ("no error", None)
    print(len(cases), "cases")
"""


@pytest.mark.processes
def test_files_of_another_user_are_not_treated_as_missing(tmp_path: Path) -> None:
    output = run_forked(dedent(SCRIPT), tmp_path)
    assert output.stdout.splitlines()[-1] == "9 cases"
