"""The search for arguments, and optimizers by name that have modes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pytorch_accelerated.errors import ConfigurationError
from tests.chaos.size import some
from tests.huggingface.runs import Regression, make_trainer

optuna = pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-2, 10.0]), "weight_decay": 0}


def test_the_best_arguments_are_found_and_the_given_ones_are_back(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"model_init": Regression}, eval_strategy="epoch")
    before = trainer.args
    sampler = optuna.samplers.GridSampler({"learning_rate": [1e-2, 10.0]})
    best = trainer.hyperparameter_search(space, n_trials=2, sampler=sampler)
    assert best.hyperparameters == {"learning_rate": 0.01}
    assert trainer.args.learning_rate == before.learning_rate
    worst = make_trainer(tmp_path / "worst", learning_rate=10.0, weight_decay=0)
    worst.train()
    assert best.objective < worst.evaluate()["eval_loss"]


def test_several_objectives_give_all_runs_that_no_other_one_beats(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"model_init": Regression}, eval_strategy="epoch")
    sampler = optuna.samplers.GridSampler({"learning_rate": [1e-2, 10.0]})

    def both(metrics: dict[str, float]) -> tuple[float, float]:
        return metrics["eval_loss"], trainer.args.learning_rate

    best = trainer.hyperparameter_search(space, both, n_trials=2, direction=["minimize", "maximize"], sampler=sampler)
    assert sorted(run.hyperparameters["learning_rate"] for run in best) == [0.01, 10.0]
    assert all(run.objective[1] == run.hyperparameters["learning_rate"] for run in best)
    only = trainer.hyperparameter_search(space, both, n_trials=2, direction=["minimize"] * 2, sampler=sampler)
    assert [run.hyperparameters for run in only] == [{"learning_rate": 0.01}]


def test_a_pruned_trial_ends_early(tmp_path: Path) -> None:
    steps = []

    def objective(metrics: dict[str, float]) -> float:
        steps.append(metrics["epoch"])
        return metrics["eval_loss"]

    parts = {"model_init": Regression}
    trainer = make_trainer(tmp_path, parts=parts, eval_strategy="epoch", num_train_epochs=4)
    study = optuna.pruners.ThresholdPruner(upper=1e-12)
    with pytest.raises(ValueError, match="No trials are completed"):
        trainer.hyperparameter_search(space, objective, n_trials=1, pruner=study)
    assert steps == [1.0]


def test_what_cannot_be_searched_says_why(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigurationError, match="Pass `model_init`"):
        trainer.hyperparameter_search()
    with pytest.raises(ConfigurationError, match="only 'optuna'"):
        trainer.hyperparameter_search(backend="ray")
    searching = make_trainer(tmp_path, parts={"model_init": Regression})
    with pytest.raises(ConfigurationError, match="'rate', which is not an argument"):
        searching.hyperparameter_search(lambda trial: {"rate": 1.0}, n_trials=1)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.layers(x)
        return (outputs,) if labels is None else (((outputs - labels) ** 2).mean(), outputs)


@pytest.mark.parametrize("optim", [f"schedule_free_{name}" for name in some(("adamw",), ("adamw", "sgd", "radam"))])
def test_schedule_free_optimizers_evaluate_and_save_the_weights_that_count(optim: str, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    settings: dict[str, Any] = {"optim": optim, "learning_rate": 0.05, "lr_scheduler_type": "constant"}
    model = Deep()
    trainer = make_trainer(
        tmp_path, parts={"model": model}, save_strategy="steps", save_steps=2, num_train_epochs=2, **settings
    )
    trainer.train()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    for state in sorted(tmp_path.glob("checkpoint-*"))[::2]:
        again = make_trainer(tmp_path / "again" / state.name, parts={"model": Deep()}, num_train_epochs=2, **settings)
        again.train(resume_from_checkpoint=str(state))
        for name, value in again.model.state_dict().items():
            assert torch.equal(value, whole[name]), (state, name)
    trainer.save_model(str(tmp_path / "model"))
    loss = trainer.evaluate()["eval_loss"]
    other = Deep()
    other.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    assert make_trainer(tmp_path / "other", parts={"model": other}).evaluate()["eval_loss"] == pytest.approx(loss)
