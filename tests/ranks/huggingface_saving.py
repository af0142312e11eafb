"""Runs on two ranks, of which the first one writes: each passes a different name and looks for both."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pytorch_accelerated.huggingface import TrainerCallback
from tests.huggingface.runs import StopAt, make_trainer
from tests.support.resuming import assert_same
from tests.support.states import verify

folder = Path(sys.argv[1])
trainer = make_trainer(folder / "run", per_device_train_batch_size=1, save_strategy="steps", save_steps=5)
assert trainer.args.world_size == 2
rank = trainer.args.process_index
trainer.train()
trainer.save_model(str(folder / f"model-{rank}"))
trainer.save_metrics(f"rank-{rank}", {"rank": rank})
trainer.log_metrics(f"rank-{rank}", {"rank": rank})
if rank == 1:
    trainer.args.output_dir = str(folder / "nowhere")
trainer.save_state()
trainer._engine._ranks.wait()
assert [path.name for path in folder.glob("model-*")] == ["model-0"]
assert {path.name for path in (folder / "model-0").iterdir()} >= {"model.safetensors", "training_args.bin"}
written = ["all_results.json", "rank-0_results.json", "trainer_state.json"]
assert sorted(path.name for path in (folder / "run").glob("*.json")) == written
assert not (folder / "nowhere").exists()

# Nothing in a checkpoint of several ranks needs to be executed either.
checkpoint = folder / "run" / "checkpoint-5"
states = sorted(path.name for path in checkpoint.glob("*.pt*"))
assert states == ["optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"]
for name in (*states, "training_args.bin"):
    assert torch.load(checkpoint / name, weights_only=True)


class Notes(TrainerCallback):
    """Each rank writes into the checkpoint, the first one over its model."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (saved / f"note_{rank}.txt").write_text("mine")
        if rank == 0:
            save_file({"half": kwargs["model"].linear.weight.detach().half()}, saved / "model.safetensors")


whole, first = (
    make_trainer(folder / name, *callbacks, per_device_train_batch_size=1)
    for name, callbacks in (("whole", []), ("noted", [Notes(), StopAt(3)]))
)
whole.train()
first.train()
manifest = verify(folder / "noted" / "checkpoint-3")
assert {"note_0.txt", "note_1.txt", "training_weights.safetensors"} <= {entry.name for entry in manifest.files}
resumed = make_trainer(folder / "noted", per_device_train_batch_size=1)
resumed.train(resume_from_checkpoint=True)
assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
print("done")
