"""In whatever order things are done, they work, and a training state that was loaded is the one that was saved."""

import copy
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import CheckpointError
from tests.chaos.record import record
from tests.chaos.size import size
from tests.support.reference import regression_data, tiny_trainer

DATA = regression_data(10)
EVALUATED = regression_data(4)


class Interrupted(Exception):
    """What user code raised."""


class RaisesOnce(TrainerCallback):
    """Raises in one event of one update, once."""

    def __init__(self, event: str, updates: int, number: int) -> None:
        self.updates, self.is_done, self.number = updates, False, number
        setattr(self, event, self.act)

    @property
    def state_key(self) -> str:
        return f"raises once {self.number}"

    def act(self, trainer: Trainer, **kwargs: Any) -> None:
        if not self.is_done and trainer.run_state.updates >= self.updates:
            self.is_done = True
            raise Interrupted


class Life(RuleBasedStateMachine):
    """What people do with a trainer, in any order."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.trainer = tiny_trainer(seed=1)
        self.callbacks = 0
        self.saved = False

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(epochs=st.integers(1, 2), batch_size=st.integers(1, 4), accumulation=st.integers(1, 3), keeps=st.booleans())
    def train(self, epochs: int, batch_size: int, accumulation: int, keeps: bool) -> None:
        epoch_before = self.trainer.run_history.current_epoch if keeps else 1
        sizes: dict[str, Any] = {"per_device_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        try:
            history = self.trainer.train(DATA, epochs, EVALUATED, reset_run_history=not keeps, **sizes)
        except Interrupted:
            return
        updates = epochs * -(-10 // (batch_size * accumulation))
        assert self.trainer.run_state.updates == updates
        assert history.current_epoch == epoch_before + epochs
        for name in ("train_loss_epoch", "eval_loss_epoch"):
            assert len(history.get_metric_values(name)) >= epochs

    @rule()
    def evaluate(self) -> None:
        before = copy.deepcopy(self.trainer.model.state_dict())
        try:
            metrics = self.trainer.evaluate(EVALUATED)
        except Interrupted:
            return
        inputs, targets = EVALUATED
        self.trainer.model.eval()
        with torch.no_grad():
            loss = nn.functional.mse_loss(self.trainer.model(inputs), targets).item()
        assert math.isclose(metrics["evaluation_loss"], loss, rel_tol=1e-12)
        assert all(torch.equal(value, before[name]) for name, value in self.trainer.model.state_dict().items())

    @rule(batch_size=st.integers(1, 5))
    def predict(self, batch_size: int) -> None:
        predictions = self.trainer.predict(EVALUATED, batch_size)
        with torch.no_grad():
            expected = self.trainer.model.eval()(EVALUATED[0])
        torch.testing.assert_close(predictions, expected, rtol=1e-12, atol=1e-12)

    @rule()
    def save(self) -> None:
        self.trainer.save_training_state(Path(self.folder.name) / "state")
        self.weights = copy.deepcopy(self.trainer.model.state_dict())
        self.updates = self.trainer.run_state.updates
        self.saved = True

    @precondition(lambda self: self.saved)
    @rule()
    def load(self) -> None:
        self.trainer.load_training_state(Path(self.folder.name) / "state")
        assert all(torch.equal(value, self.weights[name]) for name, value in self.trainer.model.state_dict().items())
        assert self.trainer.run_state.updates == self.updates

    @rule(
        event=st.sampled_from(["on_train_step_end", "on_optimizer_step_end", "on_eval_step_end", "on_train_epoch_end"]),
        updates=st.integers(0, 12),
    )
    def raise_somewhere(self, event: str, updates: int) -> None:
        self.callbacks += 1
        self.trainer.callback_handler.add_callback(RaisesOnce(event, updates, self.callbacks))

    @rule()
    def load_nothing(self) -> None:
        try:
            self.trainer.load_training_state(Path(self.folder.name) / "nothing")
        except CheckpointError:
            return
        raise AssertionError("there was nothing to load")

    @invariant()
    def counts_fit(self) -> None:
        if not hasattr(self, "trainer"):
            return
        state = self.trainer.run_state
        assert 0 <= state.updates_in_epoch <= state.updates
        assert state.skipped_updates == 0
        assert not self.trainer.run_context.control.is_at_work
        assert not isinstance(self.trainer.optimizer, list)
        assert all(
            record.epoch <= self.trainer.run_history.current_epoch for record in self.trainer.run_history.records
        )


def test_common_calls_of_a_trainer_work_in_any_order():
    machine = Life.TestCase
    machine.settings = settings(
        max_examples=size(8, 400),
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
        database=None,
    )
    machine("runTest").runTest()
    record("sequences of calls", {"sequences": size(8, 400), "broken promises": 0})
