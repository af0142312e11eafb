"""Two runs in one `output_dir` would replace, and delete, each other's checkpoints: the second one is refused."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.huggingface import TrainerCallback
from tests.huggingface.runs import make_trainer
from tests.support.processes import REPOSITORY, start

SCRIPT = """
import sys, time
from pathlib import Path

from pytorch_accelerated.huggingface import TrainerCallback
from tests.huggingface.runs import make_trainer

folder = Path(sys.argv[1])


class Waits(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        (folder / "has begun").touch()
        while not (folder / "may go on").exists():
            time.sleep(0.01)


make_trainer(folder / "out", Waits(), max_steps=2, save_strategy="steps", save_steps=1).train()
"""


def saving(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> Any:
    return make_trainer(
        folder / "out",
        *callbacks,
        **{"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **arguments},
    )


def started(folder: Path) -> Any:
    """A process that is in the middle of a run."""
    (folder / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])}
    process = start([sys.executable, str(folder / "script.py"), str(folder)], log=folder / "log", env=env)
    while not (folder / "has begun").exists():
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.01)
    return process


@pytest.mark.processes
@pytest.mark.fact("Differences: A second run in the output_dir of a run that saves is rejected before its first step")
def test_a_second_run_is_refused_until_the_first_is_over_or_dead(tmp_path: Path) -> None:
    first = started(tmp_path)
    trainer = saving(tmp_path)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"process {first.pid} on .* is saving to .*another `output_dir`"):
        trainer.train()
    assert trainer.state.global_step == 0
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)
    saving(tmp_path, save_strategy="no").train()  # nothing of it would be in the way of the other
    (tmp_path / "may go on").touch()
    assert first.wait() == 0, (tmp_path / "log").read_text()
    saving(tmp_path).train()
    for name in ("has begun", "may go on"):
        (tmp_path / name).unlink()
    second = started(tmp_path)
    second.send_signal(signal.SIGKILL)
    second.wait()
    saving(tmp_path).train()
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"checkpoint-1", "checkpoint-2"}
    assert not (tmp_path / "out" / ".lock").exists()


class TrainsAnother(TrainerCallback):
    """Starts a second run in the folder of the first one, in the same process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with pytest.raises(CheckpointError, match="another run of this process"):
            saving(self.folder).train()
        self.refused += 1


def test_a_run_within_a_run_is_refused(tmp_path: Path) -> None:
    callback = TrainsAnother(tmp_path)
    saving(tmp_path, callback).train()
    assert callback.refused == 2
