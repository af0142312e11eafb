"""Runs on two ranks, of which the first one writes: each passes a different name and looks for both."""

import sys
from pathlib import Path

import torch

from tests.huggingface.runs import make_trainer

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
print("done")
