"""States of every released format can still be read, to the bit, and runs resume from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.states.layout import FORMAT
from pytorch_accelerated.states.state_folder import read_state
from pytorch_accelerated.states.verify import verify
from tests.checkpointing import independent_reader
from tests.checkpointing.make_golden import EPOCHS, EXTRA, GOLDEN, UPDATES_AT_SAVE, contents, create_trainer, train
from tests.checkpointing.same_state import assert_same_state
from tests.support.reference import assert_same_parameters

FOLDERS = sorted(path for path in GOLDEN.iterdir() if path.is_dir())


def test_there_is_a_golden_state_of_every_format():
    assert [path.name for path in FOLDERS] == [f"format_{number}" for number in range(1, FORMAT + 1)], (
        "the format has changed: run `python -m tests.checkpointing.make_golden` once, and keep the older folders"
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_golden_state_loads_with_exactly_the_values_that_were_saved(folder: Path) -> None:
    verify(folder)
    trainer = create_trainer()
    train(trainer, max_num_train_steps=1)  # makes the scheduler, and other values to be replaced
    extra = trainer.load_training_state(folder)
    expected = json.loads(folder.with_suffix(".json").read_text())
    newer: dict[str, Any] = {"step_records": [], "step_read_positions": {}, "names_not_shown": []}
    expected["history"] = {**newer, **expected["history"]}
    assert contents(trainer) == expected
    assert_same_state({name: extra[name] for name in EXTRA}, EXTRA)
    assert extra["current_epoch"] == trainer.run_history.current_epoch
    assert trainer.run_state.updates == UPDATES_AT_SAVE


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_run_resumes_from_a_golden_state_as_if_it_had_never_stopped(folder: Path) -> None:
    whole, resumed = create_trainer(), create_trainer()
    train(whole)
    train(resumed, resume_from=folder)
    assert resumed.run_state == whole.run_state
    assert resumed.run_state.epochs == EPOCHS
    saved = json.loads(folder.with_suffix(".json").read_text())["history"]["records"]
    records = [list(record) for record in resumed.run_history.records]
    assert records[: len(saved)] == saved
    assert [record[0] for record in records] == [record.name for record in whole.run_history.records]
    assert_same_parameters(resumed.model, whole.model)  # to rounding: the state was made with another torch


def test_a_reader_made_from_the_document_finds_the_same_values() -> None:
    (folder,) = (path for path in FOLDERS if path.name == "format_1")
    expected = json.loads(folder.with_suffix(".json").read_text())
    facts, parts = independent_reader.read_state(folder)
    ours_facts, ours = read_state(folder)
    assert facts == ours_facts
    assert parts.keys() == ours.keys()
    found = {name: parts[name] for name in ("model", "optimizer", "scheduler")}
    found |= {name: parts["run"][name] for name in ("history", "run_state")}
    assert json.loads(json.dumps(found)) == expected
    assert parts["rank_0"]["generators"]["torch"] == ours["rank_0"]["generators"]["torch"].tolist()
    tensors = {name: tensor.tolist() for name, tensor in EXTRA["tensors"].items()}
    assert parts["extra"] == {**EXTRA, "tensors": tensors}
