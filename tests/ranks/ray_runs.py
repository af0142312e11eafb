"""Runs in train functions of Ray Train, which starts the ranks, all with one Ray. Argument: a folder for results."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import RayTrainCallback, TrainerCallback, ray_checkpoint
from tests.chaos.size import some
from tests.support.reference import regression_data, sgd, tiny_model, tiny_trainer

FOLDER = Path(sys.argv[1])
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ROWS = regression_data(640)
DEATHS = some([36], [3, 9, 17, 22, 30, 36, 41, 47, 53, 59])


class Die(TrainerCallback):
    """Kills the last rank after each of some updates, once."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        death = FOLDER / f"death_{trainer.run_state.updates}"
        if trainer.run_state.updates in DEATHS and not (trainer._ranks.is_first or death.exists()):
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class TakeAway(TrainerCallback):
    """Tells Ray after an update, as a cloud does, that the machine will be taken away, and waits until it knows."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == 7:
            if trainer._ranks.is_first:
                context = ray.get_runtime_context()
                where = ["--address", context.gcs_address, "--node-id", context.get_node_id()]
                why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
                command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *where, *why]
                subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True)
            while ray.train.get_preemption_info() is None:
                time.sleep(0.1)


class SeeRows(TrainerCallback):
    """The rows of this rank. Checks that signals are left to Ray, which calls the train function in a thread."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.handlers = [signal.getsignal(each) for each in SIGNALS]

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, **kwargs: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert [signal.getsignal(each) for each in SIGNALS] == self.handlers
        self.rows += batch["row"].tolist() if "row" in batch else []


def train_on_worker(config: dict[str, Any]) -> None:
    saving, seen = RayTrainCallback(save_every_n_steps=16), SeeRows()
    trainer = tiny_trainer(*config["callbacks"], seen, saving, seed=3)
    with ray_checkpoint() as state:
        trainer.train(ROWS, 3, ROWS, per_device_batch_size=16, resume_from=state)
    result: dict[str, Any] = {"model": trainer.model.state_dict(), "is_resumed": state is not None}
    assert not (trainer._ranks.is_first and Path(saving.save_dir).exists())
    if config["name"] == "whole":
        model, loss_func = tiny_model(), lambda outputs, batch: nn.functional.mse_loss(outputs, batch["target"])
        trainer = Trainer(model, loss_func, sgd(model), callbacks=[seen])
        shard = ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=16)
        result["losses"] = trainer.train(shard, 2).get_metric_values("train_loss_epoch")
        result["rows"] = trainer._ranks.exchange(seen.rows)
    if trainer._ranks.is_first:
        torch.save(result, FOLDER / f"{config['name']}.pt")


def fit(name: str, *callbacks: TrainerCallback, failures: int = 0, keep: int | None = None) -> None:
    """Train on two workers, and write their results, and what Ray was told, to files by this name."""
    rows = [{"row": row, "input": ROWS[0][row].numpy(), "target": ROWS[1][row].numpy()} for row in range(640)]
    result = TorchTrainer(
        train_on_worker,
        train_loop_config={"name": name, "callbacks": callbacks},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name,
            storage_path=str(FOLDER),
            failure_config=FailureConfig(failures),
            checkpoint_config=CheckpointConfig(
                num_to_keep=keep,
                checkpoint_score_attribute=None if keep is None else "eval_loss_epoch",  # it also orders the reports
                checkpoint_score_order="min",
            ),
        ),
        datasets={"train": ray.data.from_items(rows)},
    ).fit()
    assert not [*Path(tempfile.gettempdir()).glob("states_for_ray_*")]
    result.metrics_dataframe.to_json(FOLDER / f"{name}.json", orient="records")


os.environ |= {"RAY_worker_niceness": "0", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2"}
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "300"  # on a busy machine
ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100 * 2**20)
fit("whole")
fit("killed", Die(), failures=len(DEATHS))
fit("best", keep=2)
fit("taken", TakeAway())  # the last: it takes away the only machine
