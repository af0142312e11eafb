"""Trains with each technique and judges what comes out."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import nn

from benchmarks.find_lr import Result, judge
from benchmarks.techniques.applied import ALL, Job, Technique
from benchmarks.techniques.tasks import Task
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import OptunaCallback
from pytorch_accelerated.extras.activations import checkpoint_activations

TRIALS = 10


def trained(task: Task, technique: Technique, lr: float, seed: int) -> Result:
    """Train with a technique, and judge what comes out."""
    rows, held_out = task.rows(seed)
    with tempfile.TemporaryDirectory() as folder:
        model = technique.train(Job(task, seed, lr, task.model(seed), rows, Path(folder)))
        return judge(Trainer(model, nn.CrossEntropyLoss(), None, callbacks=()), held_out)


def best_rate(task: Task, technique: Technique, seeds: Sequence[int]) -> float:
    def accuracy(lr: float) -> float:
        return statistics.fmean(trained(task, technique, lr, seed).accuracy for seed in seeds)

    return max(task.rates, key=accuracy)


def measure(task: Task, name: str, lr: float | None, seeds: Sequence[int], tuning: Sequence[int]) -> dict[str, Any]:
    """Rate and results of a technique, which has the rate `lr` unless it has one of its own."""
    technique = ALL[name]
    if technique.own_rate or lr is None:
        lr = best_rate(task, technique, tuning)
    results = [trained(task, technique, lr, seed) for seed in seeds]
    accuracy = statistics.fmean(result.accuracy for result in results)
    print(f"{task.name}: {name}, rate {lr:g}, accuracy {accuracy:.2%}", flush=True)
    return {"rate": lr, "results": [result._asdict() for result in results]}


def measure_checkpointing(task: Task, seeds: Sequence[int]) -> dict[str, float]:
    """Time and activations with `checkpoint_activations`, divided by those without. Weights must be the same."""
    times, memory = [], []
    for seed in seeds:
        weights, seconds, bytes_ = [], [], []
        for is_checkpointed in (False, True):
            rows, model = task.rows(seed)[0], task.model(seed)
            if is_checkpointed:
                checkpoint_activations(model, "TransformerEncoderLayer")
            job = Job(task, seed, task.rates[1], model, rows)
            facts = job.trainer().summary(rows, per_device_batch_size=task.batch_size)
            bytes_.append(facts.activation_bytes)
            begun = time.thread_time()
            weights.append(job.train().state_dict())
            seconds.append(time.thread_time() - begun)
        assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items()), seed
        times.append(seconds[1] / seconds[0])
        memory.append(bytes_[1] / bytes_[0])
    return {"time": statistics.median(times), "memory": statistics.median(memory)}


def measure_pruning(task: Task, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The same trials of learning rate and width with and without pruning, a study of each kind for every seed."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: optuna.Trial, seed: int) -> float:
        width = trial.suggest_int("width", 8, 128, log=True)
        lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        rows, held_out = task.rows(seed)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        job = Job(task, seed, lr, model, rows)
        trainer = job.trainer(None, OptunaCallback(trial))
        job.finish(trainer, eval_dataset=held_out, eval_per_device_batch_size=len(held_out[0]))
        return float(trainer.run_history.get_latest_metric("eval_loss_epoch"))

    studies = []
    for seed in seeds:
        found: dict[str, Any] = {}
        for name, pruner in {"all": optuna.pruners.NopPruner(), "pruned": optuna.pruners.MedianPruner(4, 1)}.items():
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed), pruner=pruner)
            study.optimize(functools.partial(objective, seed=seed), n_trials=TRIALS)
            epochs = sum(len(trial.intermediate_values) for trial in study.trials)
            found[name] = {"best": study.best_value, "trial": study.best_trial.number, "epochs": epochs}
        studies.append(found)
    return studies
