"""Models of PEFT: a checkpoint holds the adapter and what a resume needs, not the frozen base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import Regression, StopAt, everything, losses, make_trainer
from tests.huggingface.test_against_transformers import run, sentences
from tests.huggingface.texts import tiny_language_model
from tests.support.resuming import assert_same

peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapted(*, scale: float = 1.0, **settings: Any) -> Any:
    """A language model with LoRA, the same each time but for the scale of its base."""
    base = tiny_language_model()
    with torch.no_grad():
        base.transformer.wte.weight.mul_(scale)
    torch.manual_seed(5)
    config = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_dropout": 0.3, **settings}
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))


def train(folder: Path, *callbacks: Any, resume: Any = None, model: Any = None, **arguments: Any) -> Trainer:
    trainer = make_trainer(
        folder,
        *callbacks,
        parts={
            "model": adapted() if model is None else model,
            "train_dataset": sentences(10),
            "eval_dataset": sentences(4),
        },
        **{"learning_rate": 0.01, "train_sampling_strategy": "random", **arguments},
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt"))


def test_a_checkpoint_does_not_hold_the_base(tmp_path: Path) -> None:
    trainer = train(tmp_path, StopAt(3))
    folder = tmp_path / "checkpoint-3"
    numbers = trainer.get_num_trainable_parameters()
    assert set(load_file(folder / "model.safetensors")) == {
        name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
    }
    assert (folder / "adapter_config.json").is_file()
    assert len(load_file(folder / "adapter_model.safetensors")) == 2
    few_names_and_generators = 40_000
    assert size_of(folder) < 4 * 4 * numbers + few_names_and_generators  # twice the adapter, and two moments of it


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["ln_f"]}], ids=["lora", "and a trained norm"])
def test_a_resume_is_exact(settings: Any, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", model=adapted(**settings))
    train(tmp_path / "parts", StopAt(4), model=adapted(**settings))
    resumed = train(tmp_path / "parts", resume=True, model=adapted(**settings))
    assert losses(resumed) == losses(whole)
    assert_same(everything(resumed)["model"], everything(whole)["model"])


@pytest.mark.filterwarnings("ignore:.*torch.load.*:FutureWarning")
@pytest.mark.parametrize(("first", "second"), [("ours", "theirs"), ("theirs", "ours")])
def test_each_resumes_from_the_checkpoint_of_the_other(first: str, second: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "learning_rate": 0.01}

    def parts() -> dict[str, Any]:
        return {"model": adapted(lora_dropout=0.0), "train_dataset": sentences(10), "eval_dataset": sentences(4)}

    whole = run(first, tmp_path / "first", parts=parts(), **arguments)
    resumed = run(
        second, tmp_path / "second", parts=parts(), resume=str(tmp_path / "first" / "checkpoint-4"), **arguments
    )
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("only_model", [False, True])
def test_the_best_adapter_is_loaded_at_the_end(only_model: bool, tmp_path: Path) -> None:
    best: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 1.0,
    }
    trainer = train(tmp_path, save_only_model=only_model, **best)
    assert trainer.state.best_global_step != trainer.state.global_step
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


def test_another_base_is_warned_about(tmp_path: Path) -> None:
    train(tmp_path, StopAt(4))
    with pytest.warns(UserWarning, match="The frozen base of this PeftModelForCausalLM has other weights"):
        train(tmp_path, resume=True, model=adapted(scale=1.5))


def test_an_adapter_of_a_model_that_takes_no_number_is_not_told_one(tmp_path: Path) -> None:
    """PEFT's own forward takes any keyword."""
    torch.manual_seed(0)
    model = peft.get_peft_model(Regression(), peft.LoraConfig(target_modules=["linear"]))
    trainer = make_trainer(tmp_path, parts={"model": model}, label_names=["labels"], gradient_accumulation_steps=2)
    assert not trainer.model_accepts_loss_kwargs
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
