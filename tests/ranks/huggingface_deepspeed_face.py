"""What scripts do around a training with DeepSpeed, on some ranks: evaluate, resume, predict, load the best, save."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pytorch_accelerated.errors import ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.huggingface import Trainer, TrainingArguments
from tests.huggingface.runs import Rows, StopAt, without_speed
from tests.huggingface.test_deepspeed import ADAMW
from tests.ranks.huggingface_deepspeed import ARGUMENTS, FP16, Deep, with_stage
from tests.support.zero import allow_float16_on_the_cpu

folder, device = Path(sys.argv[1]), sys.argv[2]
allow_float16_on_the_cpu()
ROWS = Rows(30)  # the last update of an epoch is short, and one of its batches as well


def make(name: str, config: dict[str, Any], *callbacks: Any, **arguments: Any) -> Any:
    given = {**ARGUMENTS, "use_cpu": device == "cpu", "deepspeed": config, **arguments}
    args = TrainingArguments(str(folder / name), **given)
    trainer = Trainer(Deep(), args, train_dataset=ROWS, eval_dataset=Rows(8), callbacks=list(callbacks))
    trainer.callback_handler.callbacks.pop()  # which prints the logs
    return trainer


for stage, *kinds in ((0,), (1,), (2,), (2, "bf16"), (2, "fp16"), (3,), (3, "bf16"), (3, "fp16")):
    # Nothing says how large the buckets should be, so DeepSpeed's default does.
    zero = {"stage": stage, "reduce_bucket_size": "auto", "overlap_comm": "auto"}
    name, config = f"{stage} {kinds}", with_stage(stage, fp16=FP16, zero_optimization=zero)
    tolerance = 1e-2 if kinds else 1e-6
    precision: dict[str, Any] = dict.fromkeys(kinds, True)
    whole = make(name, config, **precision)
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
    assert loss == pytest.approx(after, rel=tolerance)

    # A resumed run equals the whole one to the bit.
    make(f"{name} cut", config, StopAt(5), **precision, save_steps=5).train()
    resumed = make(f"{name} cut", config, **precision)
    resumed.train(resume_from_checkpoint=True)
    assert without_speed(resumed.state.log_history)[:-1] == history[:-1]  # the last is about this call alone

    best = make(f"{name} best", config, **precision, save_strategy="epoch", load_best_model_at_end=True)
    best.train()
    assert best.evaluate()["eval_loss"] == pytest.approx(best.state.best_metric, rel=tolerance)
    best.train()  # again, with the optimizer that it has

for section, complaint in (
    ({"optimizer": {"type": "Nope"}}, "DeepSpeed refuses its config.*Nope is not a supported"),
    ({"optimizer": {"type": "AdamW", "params": {"nope": 1}}}, "DeepSpeed refuses its config.*argument 'nope'"),
    ({"optimizer": {"type": "Muon"}}, "DeepSpeed has made another optimizer of this Muon.*Use AdamW or SGD"),
    ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, "DeepSpeed refuses its config.*MiCS"),
    ({"scheduler": {"type": "Nope"}}, "scheduler 'Nope' with .*It has LRRangeTest, OneCycle, WarmupLR"),
    ({"scheduler": {"type": "WarmupLR", "params": {"nope": 1}}}, "scheduler 'WarmupLR' with .*argument 'nope'"),
    ({"zero_optimization": {"stage": 4}}, "stage.*4"),
    ({"zero_optimization": {"stage": "two"}}, "stage.*two"),
    ({"zero_optimization": {"stage": 2, "nope": 1}}, "DeepSpeed refuses its config.*nope"),
):
    with pytest.raises(ConfigurationError, match=f"(?s){complaint}"):
        make("wrong", {**with_stage(2), **section}).train()

# An optimizer that moved between the arguments and the config has other groups.
OF_CONFIG = {**ADAMW, "params": {**ADAMW["params"], "torch_adam": True}}  # DeepSpeed's own is compiled at the first use
make("moved", with_stage(2)).train()
with pytest.raises(InvalidCheckpointError, match="saved without an `optimizer` in DeepSpeed's config, remove it"):
    make("moved", with_stage(2, optimizer=OF_CONFIG)).train(resume_from_checkpoint=True)
print("done")
