"""Training: losses and steps against what is computed by hand, seeds, determinism and speed."""

import math
import os
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated.huggingface import Trainer, TrainerCallback, TrainOutput
from pytorch_accelerated.huggingface.trainer_utils import enable_full_determinism, speed_metrics
from tests.huggingface.runs import Regression, Rows, losses, make_trainer


def groups(size: int, epochs: int = 1, rows: int = 10) -> list[list[int]]:
    return [list(range(start, min(start + size, rows))) for _ in range(epochs) for start in range(0, rows, size)]


def test_a_stream_that_is_used_up_ends_the_run_with_a_warning(tmp_path: Path) -> None:
    class OnePass(Trainer):
        def get_train_dataloader(self) -> Any:
            rows = Rows(10)
            return iter([{"x": rows.x[group], "labels": rows.labels[group]} for group in groups(2)])

    trainer = make_trainer(tmp_path, kind=OnePass, max_steps=8)
    with pytest.warns(UserWarning, match="nothing more to yield, so the run ends after 5 of 8 steps"):
        output = trainer.train()
    assert output.global_step == 5


def test_batches_may_be_tuples(tmp_path: Path) -> None:
    class OnTuples(Trainer):
        def get_train_dataloader(self) -> Any:
            return [(row["x"][None], row["labels"][None]) for row in (Rows(10)[index] for index in range(10))]

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            return super().compute_loss(model, dict(zip(("x", "labels"), inputs, strict=True)), return_outputs)

    runs = [make_trainer(tmp_path, kind=kind, per_device_train_batch_size=1) for kind in (Trainer, OnTuples)]
    for trainer in runs:
        trainer.train()
    assert losses(runs[0]) == losses(runs[1])


def test_given_optimizers_are_used(tmp_path: Path) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    trainer = make_trainer(tmp_path, parts={"model": model, "optimizers": (optimizer, schedule)}, num_train_epochs=1)
    trainer.train()
    assert (trainer.optimizer, trainer.lr_scheduler) == (optimizer, schedule)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == [0.3, 0.3, 0.15, 0.15, 0.075]


def test_training_again_begins_a_new_history(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    first = trainer.train()
    assert isinstance(first, TrainOutput)
    history = trainer.state.log_history
    assert first.metrics == {name: value for name, value in history[-1].items() if name != "step"}
    trainer.train()
    assert trainer.state.log_history is not history
    assert len(trainer.state.log_history) == len(history)
    assert trainer.state.global_step == 10


def test_model_init_makes_every_training_the_same(tmp_path: Path) -> None:
    def new_model() -> nn.Module:
        linear, model = nn.Linear(2, 1), Regression(dropout=0.5)
        model.linear = linear  # from whatever seed there was
        return model

    torch.manual_seed(5)
    trainer = make_trainer(tmp_path, parts={"model_init": new_model}, train_sampling_strategy="random")
    trainer.train()
    first, first_model = losses(trainer), trainer.model
    torch.manual_seed(99)
    trainer.train()
    assert losses(trainer) == first
    assert trainer.model is not first_model
    trainer.args.seed = 7
    trainer.train()
    assert losses(trainer) != first


def test_the_order_of_rows_follows_from_the_data_seed(tmp_path: Path) -> None:
    def run(**seeds: Any) -> list[float]:
        trainer = make_trainer(tmp_path, train_sampling_strategy="random", **seeds)
        trainer.train()
        return losses(trainer)

    assert run(seed=1, data_seed=5) == run(seed=2, data_seed=5) == run(seed=5)
    assert run(seed=1, data_seed=5) != run(seed=1, data_seed=6)


class SpoiltBy(Trainer):
    """Its losses are NaN in steps after these."""

    steps: Container[int] = range(99)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss * math.nan if self.state.global_step in self.steps else loss


@pytest.mark.parametrize("filters", [True, False])
def test_a_nan_is_never_out_of_sight(filters: bool, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, kind=SpoiltBy, logging_steps=4, logging_nan_inf_filter=filters, num_train_epochs=1.6
    )
    trainer.steps = (1, 2)  # type: ignore[attr-defined]
    usual = make_trainer(tmp_path, num_train_epochs=1.6)
    usual.train()
    if not filters:
        trainer.train()
        assert math.isnan(losses(trainer)[0])
        assert losses(trainer)[1] == pytest.approx(sum(losses(usual)[4:]) / 4)
        return
    with pytest.warns(UserWarning, match="2 of the last 4 losses were NaN or infinite"):
        trainer.train()
    finite = losses(usual)
    assert losses(trainer) == pytest.approx([(finite[0] + finite[3]) / 2, sum(finite[4:]) / 4])
    assert [entry.get("non_finite_losses") for entry in trainer.state.log_history[:2]] == [2, None]


@pytest.mark.parametrize("arguments", [{"logging_strategy": "no"}, {"logging_steps": 500}])
def test_a_nan_that_no_log_covers_is_reported_at_the_end(arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="10 of the last 10 losses were NaN or infinite"):
        output = make_trainer(tmp_path, kind=SpoiltBy, **arguments).train()
    assert math.isnan(output.training_loss)


@pytest.mark.parametrize("counts", [{}, {"num_samples": 64}, {"num_samples": 64, "num_steps": 8, "num_tokens": 640}])
def test_speeds_are_those_of_transformers(counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.trainer_utils import speed_metrics as genuine_metrics

    monkeypatch.setattr(time, "time", lambda: 1002.5)
    assert speed_metrics("eval", 1000.0, **counts) == genuine_metrics("eval", 1000.0, **counts)


def test_memory_is_measured_on_request(tmp_path: Path) -> None:
    megabyte, kept = 2**20, []

    class Grows(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Of more than 32 MB, malloc always takes new memory; less may be where something else was before.
            kept.append(torch.ones(40 * megabyte, dtype=torch.uint8))

    trainer = make_trainer(tmp_path, Grows(), skip_memory_metrics=False, num_train_epochs=2)
    metrics = trainer.train().metrics
    assert 200 * megabyte < metrics["train_mem_cpu_alloc_delta"] < 800 * megabyte
    assert "eval_mem_cpu_alloc_delta" in trainer.evaluate()
    assert "test_mem_cpu_alloc_delta" in trainer.predict(trainer.eval_dataset).metrics  # type: ignore[operator]  # it has some
    assert not [name for name in make_trainer(tmp_path).train().metrics if "_mem_" in name]


def test_full_determinism_seeds_and_refuses_other_algorithms(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    for name in ("deterministic", "benchmark"):  # which have their values again when the test is over
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    before = torch.are_deterministic_algorithms_enabled()
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(before))
    draws = []
    for _ in range(2):
        enable_full_determinism(3)
        draws.append(torch.rand(2).tolist())
    assert draws[0] == draws[1]
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":16:8", ":4096:8")
    enable_full_determinism(3, warn_only=True)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
