"""Writes a portable checkpoint and a training state of a short run, with whichever package is on the path."""

import json
import sys
import warnings
from pathlib import Path

import torch

from pytorch_accelerated.schedulers import CosineLrScheduler, WSDLrScheduler
from tests.differential.scenarios.common import train, trainer, weights_of


def main(folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    facts = {}
    for name, factory in {
        "cosine": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
        "wsd": WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0.5),
        "torch": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }.items():
        made = train(trainer(), num_epochs=3, create_scheduler_fn=factory)
        made.save_checkpoint(str(Path(folder) / f"{name}.pt"), checkpoint_kwargs={"note": name})
        facts[name] = {"weights": weights_of(made.get_model()), "rate": made.optimizer.param_groups[0]["lr"]}
    made.save_training_state(str(Path(folder) / "state"))
    (Path(folder) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
