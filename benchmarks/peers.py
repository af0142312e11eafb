"""The other libraries, each used as its documentation says, with our loader, loss and optimizer."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

from benchmarks.ways import HuggingFaceShape, Way
from benchmarks.work import Feed, Job, Parts, inputs_and_targets


class Ignite(Way):
    """Lean: the loss of each step is not read."""

    library = "ignite"

    def __init__(self, *, is_lean: bool = True) -> None:
        super().__init__(is_lean=is_lean)
        from ignite.engine import create_supervised_evaluator, create_supervised_trainer
        from ignite.metrics import Loss

        self._new_trainer: Any = create_supervised_trainer
        self._new_evaluator: Any = create_supervised_evaluator
        self._new_metric = Loss

    def train(self, parts: Parts, feed: Feed) -> None:
        model, loss_func, optimizer = parts
        kwargs = {"output_transform": lambda x, y, y_pred, loss: None} if self.is_lean else {}
        engine = self._new_trainer(model, optimizer, loss_func, **kwargs, **self._columns_kwargs(feed))
        engine.run(feed.loader(shuffle=True), max_epochs=feed.epochs)

    def evaluate(self, parts: Parts, feed: Feed) -> float:
        metrics = {"loss": self._new_metric(parts.loss_func)}
        engine = self._new_evaluator(parts.model, metrics, **self._columns_kwargs(feed))
        return float(engine.run(feed.loader(shuffle=False)).metrics["loss"])

    def _columns_kwargs(self, feed: Feed) -> dict[str, Any]:
        return {"prepare_batch": lambda batch, **_: inputs_and_targets(batch)} if feed.is_of_columns else {}


class Skorch(Way):
    """Lean: no callbacks, nothing printed."""

    library = "skorch"

    def __init__(self, *, is_lean: bool = True) -> None:
        super().__init__(is_lean=is_lean)
        from skorch import NeuralNet

        self._new_net = NeuralNet

    def takes(self, job: Job) -> bool:
        return job.kind != "arrow of tensors"  # a batch must be a pair

    def train(self, parts: Parts, feed: Feed) -> None:
        self._net(parts, feed.loader(shuffle=True), feed.epochs).fit(feed.data, None)

    def evaluate(self, parts: Parts, feed: Feed) -> float:
        loader = feed.loader(shuffle=False)
        net = self._net(parts, loader).initialize()
        net.history.new_epoch()
        net.run_single_epoch(loader, training=False, prefix="valid", step_fn=net.validation_step)
        losses = net.history[-1, "batches", :, ("valid_loss", "valid_batch_size")]
        return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)

    def _net(self, parts: Parts, loader: Any, epochs: int = 1) -> Any:
        return self._new_net(
            parts.model,
            criterion=parts.loss_func,
            optimizer=lambda *args, **kwargs: parts.optimizer,
            max_epochs=epochs,
            train_split=None,
            iterator_train=lambda *args, **kwargs: loader,
            **({"callbacks": "disable", "verbose": 0} if self.is_lean else {}),
        )


class Lightning(Way):
    """Lean: no logger, checkpoints, bar and summary."""

    library = "Lightning"

    def __init__(self, *, is_lean: bool = True) -> None:
        super().__init__(is_lean=is_lean)
        import lightning

        self._lightning = lightning
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._folder = tempfile.TemporaryDirectory()

    def train(self, parts: Parts, feed: Feed) -> None:
        self._trainer(feed.epochs).fit(self._module(parts), feed.loader(shuffle=True))

    def evaluate(self, parts: Parts, feed: Feed) -> float:
        loader = feed.loader(shuffle=False)
        (metrics,) = self._trainer().validate(self._module(parts), loader, verbose=not self.is_lean)
        return float(metrics["loss"])

    def close(self) -> None:
        self._folder.cleanup()

    def _trainer(self, epochs: int = 1) -> Any:
        extras = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        lean = dict.fromkeys(extras, False) if self.is_lean else {}
        folder = self._folder.name
        return self._lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=folder, **lean)

    def _module(self, parts: Parts) -> Any:
        model, loss_func, optimizer = parts

        class Module(self._lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, batch_index: int) -> Any:
                inputs, targets = inputs_and_targets(batch)
                return loss_func(self.model(inputs), targets)

            def validation_step(self, batch: Any, batch_index: int) -> None:
                inputs, targets = inputs_and_targets(batch)
                self.log("loss", loss_func(self.model(inputs), targets), batch_size=len(targets))

            def configure_optimizers(self) -> Any:
                return optimizer

        return Module()


class Transformers(HuggingFaceShape):
    """The library that the Hugging Face API of this one is named after."""

    library = "transformers"
    module = "transformers"


PEERS: tuple[type[Way], ...] = (Ignite, Skorch, Lightning, Transformers)
