"""Trains a run twice, with the library and with the script that it is written as, and compares all bits."""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.ranks import Optimizers
from tests.ejecting.setups import Run

MOST_LINES = 200


def module_of(path: Path) -> types.ModuleType:
    """The ejected script, as if it had been imported; it has nothing of ours."""
    text = path.read_text(encoding="utf-8")
    assert "pytorch_accelerated" not in text
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= 125
    module = types.ModuleType(path.stem)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def train_plainly(script: Path, trainer: Any, arguments: dict[str, Any]) -> Any:
    """The model that the script has trained, with the parts of a new trainer."""
    train = module_of(script).train
    optimizer: Any = trainer.optimizer
    if isinstance(optimizer, Optimizers):
        optimizer = dict(optimizer.by_name)
    given = {**vars(trainer), **arguments, "model": trainer.model, "optimizer": optimizer, "optimizers": optimizer}
    return train(**{name: given[name] for name in inspect.signature(train).parameters})


def numbers_in(path: Path) -> dict[str, Any]:
    state = torch.load(path)
    return {name: each.tolist() for name, each in state.get("model_state_dict", state).items()}


def recorded(trainer: Any, history: Any, name: str) -> list[float]:
    """What the library has recorded for a loss that the script prints at the end of each epoch."""
    if isinstance(trainer, Trainer):
        return list(history.get_metric_values(f"{name.replace('average', 'ema_model_eval')}_epoch"))
    name = name.removeprefix("train_")
    return [log[name] for log in trainer.state.log_history if name in log]


def compare(make_run: Callable[[], Run], folder: Path) -> None:
    """Weights, losses, averages, and what is drawn next are the same. On several ranks, each calls it."""
    for name in ("ours", "plain"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "ours")
        trainer, arguments = make_run()
        script = trainer.eject(folder / "script.py", **arguments)
        try:
            history = trainer.train(**arguments)
        except DataError:  # an update without a target that counts
            with pytest.raises(ValueError, match="No target of an update counts"):
                train_plainly(script, *make_run())
            return
        drawn = [float(torch.rand(())), random.random(), np.random.rand()]

        patch.chdir(folder / "plain")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            model = train_plainly(script, *make_run())
        assert [float(torch.rand(())), random.random(), np.random.rand()] == drawn
        weights = {name: each.tolist() for name, each in model.state_dict().items()}
        assert weights == {name: each.tolist() for name, each in trainer.model.state_dict().items()}
        printed = [dict(re.findall(r"(\w+_loss) ([^,\s]+)", line)) for line in out.getvalue().splitlines()]
        if dist.is_initialized() and dist.get_rank() > 0:
            assert not printed
            return
        for name in printed[0]:
            found, expected = (float(each[name]) for each in printed), recorded(trainer, history, name)
            assert list(map(repr, found)) == list(map(repr, expected)), name  # NaN, too
        if Path("average.pt").exists():
            assert numbers_in(Path("average.pt")) == numbers_in(folder / "ours" / "average.pt")
