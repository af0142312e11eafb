"""Each library, used as its documentation says. None is imported before it is asked."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.promises.work import Model, ModelWithLoss, Rows, Task, weights

Weights = dict[str, torch.Tensor]
LEARNING_RATE = 0.1


class Library(Protocol):
    """How a library does a `Task`."""

    def train(self, task: Task) -> Weights:
        """The weights after training, resumed if the task says so."""

    def evaluate(self, task: Task) -> float:
        """The mean loss of the untrained model over all rows."""


class Ours:
    def train(self, task: Task) -> Weights:
        from pytorch_accelerated import Trainer
        from pytorch_accelerated.callbacks import SaveTrainingStateCallback

        model = Model(task)
        callbacks = []
        if task.folder:
            callbacks = [SaveTrainingStateCallback(task.folder, save_every_n_steps=task.save_every, max_checkpoints=1)]
        Trainer(model, nn.CrossEntropyLoss(), optimizer_of(model), callbacks=callbacks, seed=0).train(
            Rows(task),
            num_epochs=task.epochs,
            per_device_batch_size=task.batch_size,
            gradient_accumulation_steps=task.accumulated,
            resume_from=task.folder if task.resumes else None,
            train_dataloader_kwargs={"shuffle": task.shuffles, "num_workers": task.workers},
        )
        return weights(model)

    def evaluate(self, task: Task) -> float:
        from pytorch_accelerated import Trainer

        model = Model(task)
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer_of(model), callbacks=())
        trainer.evaluate(Rows(task), per_device_batch_size=task.batch_size)
        return float(trainer.run_history.get_latest_metric("evaluation_loss"))


class Reference:
    """It has nothing that resumes a run, and no option for the seed of workers."""

    def train(self, task: Task) -> Weights:
        from accelerate.utils import set_seed

        from pytorch_accelerated.trainer import Trainer

        set_seed(0)
        model = Model(task)
        Trainer(model, nn.CrossEntropyLoss(), optimizer_of(model), callbacks=()).train(
            Rows(task),
            num_epochs=task.epochs,
            per_device_batch_size=task.batch_size,
            gradient_accumulation_steps=task.accumulated,
            train_dataloader_kwargs={"shuffle": task.shuffles, "num_workers": task.workers},
        )
        return weights(model)

    def evaluate(self, task: Task) -> float:
        from pytorch_accelerated.trainer import Trainer

        model = Model(task)
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer_of(model), callbacks=())
        trainer.evaluate(Rows(task), per_device_batch_size=task.batch_size, dataloader_kwargs={"num_workers": 0})
        return float(trainer.run_history.get_latest_metric("evaluation_loss"))


class HuggingFaceShape:
    """A trainer with Hugging Face's API, and a model that returns its mean loss.

    Args:
        module: has `Trainer` and `TrainingArguments`.
    """

    def __init__(self, module: str) -> None:
        import importlib

        self._module: Any = importlib.import_module(module)

    def train(self, task: Task) -> Weights:
        model = ModelWithLoss(task)
        saves: dict[str, Any] = {"save_strategy": "no"}
        if task.folder:
            saves = {"save_strategy": "steps", "save_steps": task.save_every, "save_total_limit": 1}
        trainer = self._trainer(
            model,
            task,
            num_train_epochs=task.epochs,
            gradient_accumulation_steps=task.accumulated,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            dataloader_num_workers=task.workers,
            train_sampling_strategy="random" if task.shuffles else "sequential",
            **saves,
        )
        trainer.train(resume_from_checkpoint=task.resumes)
        return weights(model)

    def evaluate(self, task: Task) -> float:
        return float(self._trainer(ModelWithLoss(task), task).evaluate()["eval_loss"])

    def _trainer(self, model: nn.Module, task: Task, **more: Any) -> Any:
        arguments = self._module.TrainingArguments(
            task.folder or "unused",
            per_device_train_batch_size=task.batch_size,
            per_device_eval_batch_size=task.batch_size,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=True,
            seed=0,
            **more,
        )
        rows = Rows(task, as_dicts=True)
        return self._module.Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer_of(model), None)
        )


class Lightning:
    def train(self, task: Task) -> Weights:
        import lightning
        from lightning.pytorch.callbacks import ModelCheckpoint

        lightning.seed_everything(0, workers=True, verbose=False)
        module = self._module(task)
        callbacks: list[Any] = []
        if task.folder:
            callbacks = [ModelCheckpoint(task.folder, every_n_train_steps=task.save_every, save_top_k=1)]
        trainer = self._trainer(
            max_epochs=task.epochs,
            accumulate_grad_batches=task.accumulated,
            callbacks=callbacks,
            enable_checkpointing=bool(callbacks),
        )
        saved = sorted(Path(task.folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime) if task.folder else []
        loader = DataLoader(Rows(task), batch_size=task.batch_size, shuffle=task.shuffles, num_workers=task.workers)
        trainer.fit(module, loader, ckpt_path=saved[-1] if task.resumes else None)
        return weights(module.model)

    def evaluate(self, task: Task) -> float:
        loader = DataLoader(Rows(task), batch_size=task.batch_size)
        (metrics,) = self._trainer(enable_checkpointing=False).validate(self._module(task), loader, verbose=False)
        return float(metrics["loss"])

    def _trainer(self, **more: Any) -> Any:
        import os

        import lightning

        return lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **more,
        )

    def _module(self, task: Task) -> Any:
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = Model(task)

            def training_step(self, batch: Any, batch_index: int) -> Any:
                inputs, labels = batch
                return nn.functional.cross_entropy(self.model(inputs), labels)

            def validation_step(self, batch: Any, batch_index: int) -> None:
                inputs, labels = batch
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.log("loss", loss, batch_size=len(labels), sync_dist=True)

            def configure_optimizers(self) -> Any:
                return optimizer_of(self)

        return Module()


class Ignite:
    """With its deterministic engine, which its documentation asks for where a run shall be resumed."""

    def train(self, task: Task) -> Weights:
        from ignite.engine import Events, create_supervised_trainer
        from ignite.handlers import Checkpoint, DiskSaver
        from ignite.utils import manual_seed

        manual_seed(0)
        model = Model(task)
        optimizer = optimizer_of(model)
        engine = create_supervised_trainer(
            model,
            optimizer,
            nn.CrossEntropyLoss(),
            deterministic=True,
            gradient_accumulation_steps=task.accumulated,
        )
        loader = DataLoader(Rows(task), batch_size=task.batch_size, shuffle=task.shuffles, num_workers=task.workers)
        parts = {"engine": engine, "model": model, "optimizer": optimizer}
        if task.folder:
            saver = Checkpoint(
                parts,
                DiskSaver(task.folder, require_empty=False),
                n_saved=1,
                global_step_transform=lambda *_: engine.state.iteration,
            )
            engine.add_event_handler(Events.ITERATION_COMPLETED(every=task.save_every), saver)
            if task.resumes:
                newest = max(Path(task.folder).glob("*.pt"), key=lambda path: path.stat().st_mtime)
                # Its states of generators need it.
                Checkpoint.load_objects(parts, torch.load(newest, weights_only=False))
        engine.run(loader, max_epochs=task.epochs)
        return weights(model)

    def evaluate(self, task: Task) -> float:
        import ignite.distributed as idist
        from ignite.engine import create_supervised_evaluator
        from ignite.metrics import Loss

        def work(_: int) -> float:
            loader = idist.auto_dataloader(Rows(task), batch_size=task.batch_size * idist.get_world_size())
            model = idist.auto_model(Model(task))
            engine = create_supervised_evaluator(model, {"loss": Loss(nn.CrossEntropyLoss())})
            return float(engine.run(loader).metrics["loss"])

        import os

        backend = "gloo" if "WORLD_SIZE" in os.environ else None
        with idist.Parallel(backend=backend) as parallel:
            found: list[float] = []
            parallel.run(lambda local_rank: found.append(work(local_rank)))
        return found[0]


class Skorch:
    """It saves at the end of epochs, and has no option for accumulation and for several processes."""

    def train(self, task: Task) -> Weights:
        from skorch.callbacks import Checkpoint, LoadInitState

        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        callbacks: list[Any] = []
        if task.folder:
            saver = Checkpoint(dirname=task.folder, monitor=None, load_best=False)
            callbacks = [saver, *([LoadInitState(saver)] if task.resumes else [])]
        net = self._net(task, callbacks=callbacks, max_epochs=task.epochs)
        rows = Rows(task)
        if task.resumes:
            net.initialize()
            net.set_params(max_epochs=task.epochs - len(net.history))
        net.partial_fit(rows, None) if task.resumes else net.fit(rows, None)
        return weights(net.module_)

    def evaluate(self, task: Task) -> float:
        net = self._net(task).initialize()
        net.history.new_epoch()
        net.run_single_epoch(
            net.get_iterator(net.get_dataset(Rows(task))), training=False, prefix="valid", step_fn=net.validation_step
        )
        losses = net.history[-1, "batches", :, ("valid_loss", "valid_batch_size")]
        return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)

    def _net(self, task: Task, **more: Any) -> Any:
        from skorch import NeuralNet

        return NeuralNet(
            functools.partial(Model, task),
            criterion=nn.CrossEntropyLoss,
            optimizer=torch.optim.SGD,
            optimizer__momentum=0.9,
            lr=LEARNING_RATE,
            batch_size=task.batch_size,
            train_split=None,
            iterator_train__shuffle=task.shuffles,
            iterator_train__num_workers=task.workers,
            verbose=0,
            **more,
        )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that all libraries train with."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


LIBRARIES: dict[str, Callable[[], Library]] = {
    "ours": Ours,
    "ours, Hugging Face API": functools.partial(HuggingFaceShape, "pytorch_accelerated.huggingface"),
    "transformers": functools.partial(HuggingFaceShape, "transformers"),
    "Lightning": Lightning,
    "ignite": Ignite,
    "skorch": Skorch,
    "pytorch-accelerated 0.1.61": Reference,
}
