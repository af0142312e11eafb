"""What scripts do around a training with DeepSpeed, on some ranks: evaluate, resume, predict, load the best, save."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface import Trainer, TrainingArguments
from tests.huggingface.runs import Rows, StopAt, without_speed
from tests.ranks.huggingface_deepspeed import ARGUMENTS, Deep, with_stage

folder = Path(sys.argv[1])
ROWS = Rows(30)  # the last update of an epoch is short, and one of its batches as well


def make(name: str, config: dict[str, Any], *callbacks: Any, **arguments: Any) -> Any:
    given = {**ARGUMENTS, "deepspeed": config, **arguments}
    args = TrainingArguments(str(folder / name), **given)
    trainer = Trainer(Deep(), args, train_dataset=ROWS, eval_dataset=Rows(8), callbacks=list(callbacks))
    trainer.callback_handler.callbacks.pop()  # which prints the logs
    return trainer


for stage, bf16 in ((0, False), (1, False), (2, False), (2, True), (3, False), (3, True)):
    name, config = f"{stage} {bf16}", with_stage(stage)
    whole = make(name, config, bf16=bf16)
    before = whole.evaluate()["eval_loss"]
    whole.train()
    history = without_speed(whole.state.log_history)
    after = whole.evaluate()["eval_loss"]
    assert after < before
    assert whole.predict(Rows(8)).metrics["test_loss"] == after
    whole.save_model(str(folder / name / "model"))
    whole.accelerator.wait_for_everyone()
    saved = Deep()
    saved.load_state_dict(load_file(folder / name / "model" / "model.safetensors"))
    with torch.no_grad():
        loss = float(saved(Rows(8).x, Rows(8).labels)["loss"])
    assert loss == pytest.approx(after, rel=1e-2 if bf16 else 1e-6)

    # A resumed run equals the whole one to the bit.
    make(f"{name} cut", config, StopAt(5), bf16=bf16, save_steps=5).train()
    resumed = make(f"{name} cut", config, bf16=bf16)
    resumed.train(resume_from_checkpoint=True)
    assert without_speed(resumed.state.log_history)[:-1] == history[:-1]  # the last is about this call alone

    best = make(f"{name} best", config, bf16=bf16, save_strategy="epoch", load_best_model_at_end=True)
    best.train()
    assert best.evaluate()["eval_loss"] == pytest.approx(best.state.best_metric, rel=1e-2 if bf16 else 1e-6)
    best.train()  # again, with the optimizer that it has

for section, complaint in (
    ({"optimizer": {"type": "Nope"}}, "DeepSpeed refuses its config.*Nope is not a supported"),
    ({"scheduler": {"type": "Nope"}}, "scheduler.type: 'Nope': give one of LRRangeTest, OneCycle, WarmupLR"),
    ({"scheduler": {"type": "WarmupLR", "params": {"nope": 1}}}, "'nope': 1}, which WarmupLR refuses"),
    ({"zero_optimization": {"stage": 2, "nope": 1}}, "DeepSpeed refuses its config.*nope"),
):
    with pytest.raises(ConfigurationError, match=f"(?s){complaint}"):
        make("wrong", {**with_stage(2), **section}).train()
print("done")
