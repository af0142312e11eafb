"""The package `pytorch-accelerated` from the registry. It has our import name, so it runs in a separate process.

The worker uses this environment's torch and accelerate, and a folder with the package that comes first on its path.
Jobs and outcomes are sent through pipes, so its rounds alternate with those of all other ways.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import operator
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.data import ReadyBatches
from benchmarks.ways import Outcome, Way
from benchmarks.work import Feed, Job, Parts, inputs_and_targets

REQUIREMENT = "pytorch-accelerated==0.1.61"
REPOSITORY = Path(__file__).parents[1]
# `make clean` removes it together with the project's environment.
FOLDER = REPOSITORY / ".venv" / "reference"


class ReferenceInWorker(Way):
    """Lean: no callbacks, and no loader processes unless the job asks for some.

    It needs a torch DataLoader, even for ready batches.
    """

    library = REQUIREMENT.replace("==", " ")

    def __init__(self, *, is_lean: bool = True) -> None:
        super().__init__(is_lean=is_lean)
        import pytorch_accelerated
        from pytorch_accelerated.trainer import Trainer

        if not Path(str(pytorch_accelerated.__file__)).is_relative_to(FOLDER):
            raise RuntimeError(f"{pytorch_accelerated.__file__} is not {REQUIREMENT}. Delete {FOLDER} and try again.")

        class TrainerOfReadyBatches(Trainer):
            def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
                return ready_loader(self.train_dataset)

            def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Any = None) -> Any:
                return ready_loader(self.eval_dataset)

        class TrainerOnColumns(Trainer):
            def calculate_train_batch_loss(self, batch: Any) -> Any:
                return super().calculate_train_batch_loss(inputs_and_targets(batch))

            def calculate_eval_batch_loss(self, batch: Any) -> Any:
                return super().calculate_eval_batch_loss(inputs_and_targets(batch))

        self._new_trainer, self._new_trainer_of_ready_batches = Trainer, TrainerOfReadyBatches
        self._new_trainer_on_columns = TrainerOnColumns

    def train(self, parts: Parts, feed: Feed) -> None:
        self._trainer(parts, feed).train(
            feed.data,
            num_epochs=feed.epochs,
            per_device_batch_size=feed.batch_size,
            train_dataloader_kwargs=self._loader_kwargs(feed),
            collate_fn=feed.collate_fn,
        )

    def evaluate(self, parts: Parts, feed: Feed) -> float:
        trainer = self._trainer(parts, feed)
        trainer.evaluate(
            feed.data,
            per_device_batch_size=feed.batch_size,
            dataloader_kwargs=self._loader_kwargs(feed),
            collate_fn=feed.collate_fn,
        )
        return float(trainer.run_history.get_latest_metric("evaluation_loss"))

    def _trainer(self, parts: Parts, feed: Feed) -> Any:
        new_trainer = self._new_trainer_on_columns if feed.is_of_columns else self._new_trainer
        if isinstance(feed.data, ReadyBatches):
            new_trainer = self._new_trainer_of_ready_batches
        return new_trainer(*parts, **({"callbacks": ()} if self.is_lean else {}))

    def _loader_kwargs(self, feed: Feed) -> dict[str, Any] | None:
        workers = 0 if feed.workers is None and self.is_lean else feed.workers
        return None if workers is None else {"num_workers": workers}


def ready_loader(batches: ReadyBatches) -> DataLoader[Any]:
    """The thinnest DataLoader around `batches`."""
    return DataLoader(list(batches), batch_size=1, collate_fn=operator.itemgetter(0))


class Reference(Way):
    """`ReferenceInWorker`, called from outside."""

    library = ReferenceInWorker.library

    def __init__(self, *, is_lean: bool = True) -> None:
        super().__init__(is_lean=is_lean)
        self._worker = _worker()

    def takes(self, job: Job) -> bool:
        return job.kind != "stream"  # data must have a length

    def run(self, job: Job) -> Outcome:
        requests, replies = self._worker.stdin, self._worker.stdout
        assert requests is not None
        assert replies is not None
        pickle.dump((self.is_lean, job), requests)
        requests.flush()
        try:
            return Outcome(*pickle.load(replies))
        except EOFError:
            raise RuntimeError(f"The process of {self.library} has died at {job}; the reason is above.") from None

    def fresh_environment(self) -> dict[str, str]:
        return _environment()


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(REPOSITORY)])}


@functools.cache
def _worker() -> subprocess.Popen[bytes]:
    """The only worker, started at the first call."""
    install()
    command = [sys.executable, "-m", "benchmarks.reference"]
    environment = {**os.environ, **_environment()}
    worker = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(worker.kill)
    return worker


def install() -> None:
    """Install the package where only the worker sees it; torch and accelerate are those of this environment.

    Raises:
        ImportError: if that fails; the message has pip's output.
    """
    name, _, version = REQUIREMENT.partition("==")
    found = [distribution.version for distribution in importlib.metadata.distributions(name=name, path=[str(FOLDER)])]
    if found == [version]:
        return
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(FOLDER), REQUIREMENT]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        raise ImportError(f"pip could not install {REQUIREMENT}: {process.stderr.strip()}")


def main() -> None:
    """Run job after job until the pipe is closed."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the library's output must not mix with the replies
    way = functools.cache(ReferenceInWorker)
    while True:
        try:
            is_lean, job = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(tuple(way(is_lean=is_lean).run(job)), replies)
        replies.flush()


if __name__ == "__main__":
    main()
