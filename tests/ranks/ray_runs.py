"""Runs in train functions of Ray Train, which starts the ranks, all with one Ray. Argument: a folder for results."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import RayTrainCallback, TrainerCallback, ray_checkpoint
from tests.support.digits import digits, digits_trainer

FOLDER = Path(sys.argv[1])
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class DieOnce(TrainerCallback):
    """Kills the last rank after an update, unless the run was resumed."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        is_due = trainer.run_state.updates == 23 and ray.train.get_checkpoint() is None
        if is_due and not trainer.run_context.ranks.is_first:
            os.kill(os.getpid(), signal.SIGKILL)


class SeeSignals(TrainerCallback):
    """Checks that signals are left to Ray, which calls the train function in a thread."""

    def __init__(self) -> None:
        self.before = [signal.getsignal(each) for each in SIGNALS]

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert [signal.getsignal(each) for each in SIGNALS] == self.before


class TakeAway(TrainerCallback):
    """Tells Ray after an update, as a cloud does, that the machine will be taken away; then each takes longer."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == 7 and trainer.run_context.ranks.is_first:
            context = ray.get_runtime_context()
            where = ["--address", context.gcs_address, "--node-id", context.get_node_id()]
            why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
            command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *where, *why]
            subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True)
        time.sleep(0.1 * (trainer.run_state.updates > 7))


class SeenRows(TrainerCallback):
    """The numbers of the rows that this rank trained on."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, **kwargs: Any) -> None:
        self.rows += batch["row"].tolist()


def train_on_worker(config: dict[str, Any]) -> None:
    saving = RayTrainCallback(save_every_n_steps=config["save_every_n_steps"])
    trainer = digits_trainer(*config["callbacks"], SeeSignals(), saving)
    with ray_checkpoint() as state:
        trainer.train(digits(), 3, digits(), per_device_batch_size=16, resume_from=state)
    entries: dict[str, Any] = {"model": trainer.model.state_dict(), "losses": losses(trainer, "eval_loss_epoch")}
    assert not (trainer.run_context.ranks.is_first and Path(saving.save_dir).exists())
    if config["has_shards"]:
        seen = SeenRows()
        trainer = digits_trainer(
            seen, loss_func=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["label"])
        )
        trainer.train(ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=16), 2)
        entries |= {
            "rows": trainer.run_context.ranks.exchange(seen.rows),
            "losses_of_shards": losses(trainer, "train_loss_epoch"),
        }
    if trainer.run_context.ranks.is_first:
        torch.save(entries, FOLDER / f"{config['name']}.pt")


def losses(trainer: Trainer, name: str) -> list[float]:
    return trainer.run_history.get_metric_values(name)


def fit(
    name: str, *callbacks: TrainerCallback, failures: int = 0, save_every_n_steps: int | None = None, **data: Any
) -> None:
    """Train on two workers; their results, and those that Ray knows, are written to files by this name."""
    config = {"name": name, "callbacks": callbacks, "save_every_n_steps": save_every_n_steps, "has_shards": bool(data)}
    may_fail = ray.train.FailureConfig(max_failures=failures)
    result = TorchTrainer(
        train_on_worker,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name=name, storage_path=str(FOLDER), failure_config=may_fail),
        datasets=data,
    ).fit()
    result.metrics_dataframe.to_json(FOLDER / f"{name}.json", orient="records")


os.environ["RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"] = "0.2"
ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100 * 2**20)
pixels, labels = digits()
rows = [{"row": row, "input": pixels[row].numpy(), "label": int(labels[row])} for row in range(len(labels))]
fit("whole", train=ray.data.from_items(rows))
fit("killed", DieOnce(), failures=1, save_every_n_steps=5)
fit("taken", TakeAway())
