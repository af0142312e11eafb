"""Runs that receive real signals, each in a separate process, on one rank and on two.

A script. Its argument is an empty folder; it prints one JSON object with the outcomes of every case, by name.
"""

import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers do so when they are used, which would take each process a second
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, StepBasedEvaluationCallback, TrainerCallback
from pytorch_accelerated.errors import SignalExit, StopTrainingError
from pytorch_accelerated.states.publish import StagedFolder
from tests.chaos.size import IS_RELEASE
from tests.support.forks import Fork, Outcome, fork_ranks
from tests.support.histories import state_without_times
from tests.support.reference import regression_data, tiny_trainer
from tests.support.resuming import AugmentedData, digests, everything, run

HOOKS_OF_PASSES = {"evaluate": "calculate_eval_batch_loss", "predict": "calculate_predict_batch_outputs"}
# Where a signal comes: in which call of a hook; and the updates and the position with which the run is saved then.
_PLACES = {
    "in the set-up": ("create_scheduler", 1, 0, "after update 0"),
    "in the first batch": ("calculate_train_batch_loss", 1, 1, "after update 1, with 6 samples of this epoch used"),
    "in the evaluation of the averaged model": ("calculate_eval_batch_loss", 5, 4, "after update 4"),
    "at the end of an epoch": ("training_run_epoch_end", 2, 8, "after update 8"),
}
_MORE_PLACES = {
    "at the start of the run": ("training_run_start", 1, 0, "after update 0"),
    "in an evaluation inside an epoch": (
        *("calculate_eval_batch_loss", 1, 3),
        "after update 3, with 18 samples of this epoch used",
    ),
    "in the last batch of an evaluation inside an epoch": (
        *("calculate_eval_batch_loss", 2, 3),
        "after update 3, with 18 samples of this epoch used",
    ),
    "in an evaluation": ("calculate_eval_batch_loss", 3, 4, "after update 4"),
}
PLACES: dict[str, Any] = _PLACES | _MORE_PLACES if IS_RELEASE else _PLACES
ECHO_SECONDS = 1.1  # after which a second signal is no echo of the first
Action = Callable[[], object]


def at_call(owner: type, name: str, number: int, action: Action) -> None:
    """Do something before the call `number`, from 1, of a method."""
    original, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, method)


def send(name: str = "SIGTERM") -> None:
    os.kill(os.getpid(), getattr(signal, name))


class Report(TrainerCallback):
    """Prints how a run ends."""

    def on_stop_training_error(self, trainer: Trainer, reason: str = "", **kwargs: Any) -> None:
        print(f"stopped after update {trainer.run_state.updates}: {reason}")

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        print(f"on_exception: {type(exception).__name__}")

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        print("on_training_run_end")

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        print("on_evaluation_run_end")


class RandomEvaluation(TrainerCallback):
    """Draws a number for each evaluated batch, as a loss with noise would."""

    def on_eval_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        torch.rand(1)


def print_end(state: dict[str, Any], folder: Path) -> None:
    print("end", *(f"{name} {digest}" for name, digest in digests(state, folder).items()))


# ---------------------------------------------------------------------------------------------------------- on one rank


def train(folder: Path, *extra: TrainerCallback, **arguments: Any) -> None:
    """Everything that has a state: 4 updates an epoch, evaluations of 2 batches after each and after 3, 6, ... updates.

    The averaged model is evaluated after each of them too, where that is at the end of an epoch. Whatever is in
    ``states`` is gone on from.
    """
    states = folder / "states"
    saver = SaveTrainingStateCallback(states, **{"save_every_n_steps": 2, **arguments})
    callbacks = (StepBasedEvaluationCallback(3), RandomEvaluation(), saver, Report(), *extra)
    print_end(everything(*run(folder, *callbacks, resume_from=states)), folder)


def train_small(*callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    trainer = tiny_trainer(Report(), *callbacks, seed=3)
    trainer.train(regression_data(24), 2, regression_data(8), 4, **arguments)
    return trainer


class Cases:
    """Runs cases in folders below `parent`, and keeps their outcomes."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.outcomes: dict[str, list[Outcome]] = {}

    def run(self, name: str, *works: Callable[[Path], object]) -> None:
        """Processes that do their works one after the other, in one folder."""
        folder = self.parent / name.replace(" ", "_")
        folder.mkdir()
        logged = ((functools.partial(work, folder), folder / f"log_{number}") for number, work in enumerate(works))
        self.outcomes[name] = [Fork(work, log).wait() for work, log in logged]

    def run_on_ranks(self, name: str, *works: Callable[[Path], object]) -> None:
        """The same on two ranks: the outcomes of the first work's, then those of the second's."""
        folder = self.parent / name.replace(" ", "_")
        folder.mkdir()
        self.outcomes[name] = [
            fork.wait()
            for number, work in enumerate(works)
            for fork in fork_ranks(functools.partial(work, folder), 2, folder / f"log_{number}")
        ]


def main() -> None:
    cases = Cases(Path(sys.argv[1]))
    cases.run("undisturbed", train)
    cases.run("SIGTERM", disturbed("calculate_train_batch_loss", 3), train)
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        cases.run(name, disturbed("calculate_train_batch_loss", 3, name))
    for name, (hook, number, _, _) in PLACES.items():
        cases.run(name, disturbed(hook, number), train)
    cases.run("in a user callback", in_a_callback)
    cases.run("in a prediction by a callback", in_a_prediction_by_a_callback)
    for method in HOOKS_OF_PASSES:
        cases.run(f"in {method}", functools.partial(in_a_pass, method))
        cases.run_on_ranks(f"one rank of two in {method}", functools.partial(one_rank_in_a_pass, method))
    for second in ("SIGINT", "SIGTERM"):
        cases.run(f"a second {second} during the save", functools.partial(second_during_save, second), train)
    cases.run("an echo", functools.partial(second_during_save, "SIGTERM", after_seconds=0), train)
    cases.run("a SIGTERM after SIGUSR1", functools.partial(second_during_save, "SIGTERM", first="SIGUSR1"))
    cases.run("handlers", handlers_before_and_after)
    cases.run("own handler", own_handlers)
    cases.run("handler set during the run", handler_set_during_the_run)
    cases.run("in a thread", in_a_thread)
    cases.run("a fork", fork_that_is_ended)

    cases.run("undisturbed with workers", functools.partial(train_with_workers, num_workers=0))
    cases.run("SIGTERM to workers too", functools.partial(signal_to_workers_too, "SIGTERM"), train_with_workers)
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        cases.run(f"{name} to workers too", functools.partial(signal_to_workers_too, name))

    cases.run_on_ranks("undisturbed ranks", train_on_ranks)
    cases.run_on_ranks(
        "one rank of two in a hook", one_rank_disturbed(Trainer, "backward_step", 5, "SIGINT"), train_on_ranks
    )
    cases.run_on_ranks("one rank of two", one_rank_disturbed(torch.optim.SGD, "step", 4), train_on_ranks)
    in_evaluation = one_rank_disturbed(Trainer, "calculate_eval_batch_loss", 9)
    cases.run_on_ranks("one rank of two in an evaluation", in_evaluation, train_on_ranks)
    cases.run_on_ranks("out of time", out_of_time, train_on_ranks)
    print(json.dumps({name: [dataclasses.asdict(one) for one in found] for name, found in cases.outcomes.items()}))


def disturbed(hook: str, number: int, name: str = "SIGTERM") -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        at_call(Trainer, hook, number, functools.partial(send, name))
        train(folder)

    return work


def in_a_callback(folder: Path) -> None:
    class Slow(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, step: int, **kwargs: Any) -> None:
            if step == 1:
                send()
                time.sleep(0.05)  # which a signal does not cut short
                print("done")

    train_small(Slow(), SaveTrainingStateCallback(folder / "states"))


def in_a_prediction_by_a_callback(folder: Path) -> None:
    class Predict(TrainerCallback):
        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            print(f"{len(trainer.predict(regression_data(9)[0], 2))} predictions")

    at_call(Trainer, "calculate_predict_batch_outputs", 2, send)
    train_small(Predict())


def in_a_pass(method: str, folder: Path) -> None:
    trainer = train_small()
    hook = HOOKS_OF_PASSES[method]
    at_call(Trainer, hook, 2, send)
    at_call(Trainer, hook, 3, lambda: print("went on"))
    arguments = {"output_path": folder / "predictions"} if method == "predict" else {}
    try:
        getattr(trainer, method)(regression_data(24), 4, **arguments)
    finally:
        print(f"left: {[path.name for path in folder.iterdir()]}")


class SlowData(AugmentedData):
    """Its workers cannot run ahead."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return super().__getitem__(index)


def train_with_workers(folder: Path, num_workers: int = 2) -> None:
    trainer = tiny_trainer(SaveTrainingStateCallback(folder / "states"), Report(), seed=3)
    loading = {"num_workers": num_workers}
    resume_from = folder / "states"
    trainer.train(SlowData(48), 2, None, 2, None, 12, train_dataloader_kwargs=loading, resume_from=resume_from)
    print_end({"model": trainer.model.state_dict(), "history": state_without_times(trainer.run_history)}, folder)


def signal_to_workers_too(name: str, folder: Path) -> None:
    """As a terminal or a batch system sends it, while the update still needs many batches."""
    os.setpgid(0, 0)
    at_call(Trainer, "backward_step", 2, lambda: os.killpg(0, getattr(signal, name)))
    train_with_workers(folder)


def second_during_save(
    second: str, folder: Path, *, first: str = "SIGTERM", after_seconds: float = ECHO_SECONDS
) -> None:
    def send_second() -> None:
        time.sleep(after_seconds)
        send(second)
        print("still here")

    at_call(Trainer, "calculate_train_batch_loss", 5, functools.partial(send, first))  # in the third update
    at_call(StagedFolder, "commit", 2, send_second)  # after the state of the second
    train(folder)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]


def handlers_before_and_after(folder: Path) -> None:
    before = handlers()

    def stop() -> None:
        raise StopTrainingError("enough")

    def fail() -> None:
        raise RuntimeError("broken")

    def show() -> None:
        print(f"during the run: {[now == then for now, then in zip(handlers(), before, strict=True)]}")

    at_call(Trainer, "training_run_start", 1, show)
    for action in (lambda: None, stop, fail, send, functools.partial(send, "SIGINT")):
        at_call(Trainer, "training_run_epoch_end", 1, action)
        try:
            train_small()
        except (RuntimeError, SignalExit, KeyboardInterrupt) as error:
            print(type(error).__name__)
        print(f"restored: {handlers() == before}")


def own_handlers(folder: Path) -> None:
    def own(number: int, frame: Any) -> None:
        print(f"own handler of {signal.Signals(number).name}")

    signal.signal(signal.SIGUSR1, own)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = handlers()
    at_call(Trainer, "training_run_start", 1, functools.partial(send, "SIGUSR1"))
    at_call(Trainer, "training_run_epoch_end", 1, functools.partial(send, "SIGINT"))
    train_small()
    print(f"restored: {handlers() == before}")


def handler_set_during_the_run(folder: Path) -> None:
    def own(number: int, frame: Any) -> None:
        print("own handler")

    at_call(Trainer, "training_run_start", 1, lambda: signal.signal(signal.SIGTERM, own))
    train_small()
    send()


def in_a_thread(folder: Path) -> None:
    at_call(Trainer, "training_run_start", 1, lambda: print(f"default: {handlers()[1] == signal.SIG_DFL}"))
    thread = threading.Thread(target=train_small)
    thread.start()
    thread.join()


def fork_that_is_ended(folder: Path) -> None:
    class Helper(TrainerCallback):
        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            context = multiprocessing.get_context("fork")
            is_up = context.Event()

            def wait_for_end() -> None:
                is_up.set()
                for _ in range(60_000):
                    time.sleep(0.01)  # in one go, it would miss a signal that comes right before it

            helper = context.Process(target=wait_for_end)
            helper.start()
            is_up.wait()
            helper.terminate()
            helper.join()
            print(f"helper: {helper.exitcode}")

    train_small(Helper(), max_num_train_steps=1)


# --------------------------------------------------------------------------------------------------------- on two ranks


def train_on_ranks(folder: Path, *extra: TrainerCallback, **arguments: Any) -> None:
    """10 updates an epoch, and evaluations of 7 rounds; goes on from what is in ``states``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2)).double()
    states = folder / "states"
    saver = SaveTrainingStateCallback(states, max_checkpoints=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    callbacks = [RandomEvaluation(), saver, Report(), *extra]
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=3)
    trainer.train(AugmentedData(120), 2, regression_data(40), 3, None, 2, resume_from=states, **arguments)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run_state": trainer.run_state}
    state |= {"history": state_without_times(trainer.run_history), "torch": torch.default_generator.get_state()}
    print_end(state, folder)


def send_to_second(name: str = "SIGTERM") -> None:
    if os.environ["RANK"] == "1":
        send(name)


def one_rank_disturbed(owner: type, method: str, number: int, name: str = "SIGTERM") -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        at_call(owner, method, number, lambda: send_to_second(name))
        train_on_ranks(folder)

    return work


class Count(TrainerCallback):
    """Counts batches."""

    batches = 0

    def on_eval_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.batches += 1

    def on_prediction_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.batches += 1


def one_rank_in_a_pass(method: str, folder: Path) -> None:
    count = Count()
    trainer = tiny_trainer(Report(), count)
    at_call(Trainer, HOOKS_OF_PASSES[method], 2, send_to_second)
    try:
        getattr(trainer, method)(TensorDataset(*regression_data(4000)), 2)
    finally:
        print(f"batches: {count.batches}")


def out_of_time(folder: Path) -> None:
    class End(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_state.updates == 2:
                trainer.run_context.control.stopping._deadline = 0.0

    train_on_ranks(folder, End(), max_duration=1000)


if __name__ == "__main__":
    main()
