"""What is asked of each library, and how the answers are compared."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.promises.work import Model, Rows, Task

REPOSITORY = Path(__file__).parents[2]
REFERENCE = REPOSITORY / ".venv" / "reference"
ROUNDING = 1e-5
FLIPS = 100
KILLS = 10
WITHOUT_STATES = "pytorch-accelerated 0.1.61"


class Answer(NamedTuple):
    """What came out for one library.

    Attributes:
        figure: as the table shows it.
        is_kept: whether this is what people take for granted, or None where the library does not offer it.
        error: the end of what a failed process printed, or "".
    """

    figure: str
    is_kept: bool | None
    error: str = ""


class WorkFailed(Exception):
    """A process ended with an error."""


class Asked:
    """Asks one library, in processes of its own.

    Args:
        library: its name in `LIBRARIES`.
        folder: an empty folder for results and checkpoints.
    """

    def __init__(self, library: str, folder: Path) -> None:
        self.library, self.folder = library, folder
        self._results = 0

    def does(self, task: Task, *, ranks: int = 1) -> Any:
        """The result of the task, from one process or from rank 0 of several.

        Raises:
            WorkFailed: if a process ends with an error.
        """
        result = self._new_result()
        ended = subprocess.run(self._command(task, result, ranks), **self._process_kwargs(), check=False)
        if ended.returncode != 0 or not result.is_file():
            raise WorkFailed((ended.stderr or ended.stdout)[-2000:])
        return torch.load(result)

    def dies(self, task: Task) -> None:
        """Start the task, which must kill its process.

        Raises:
            WorkFailed: if it ends in another way.
        """
        ended = subprocess.run(self._command(task, self._new_result(), 1), **self._process_kwargs(), check=False)
        if ended.returncode != -9:
            raise WorkFailed(f"exit status {ended.returncode}: {ended.stderr[-2000:]}")

    def is_killed_in_a_save(self, task: Task) -> None:
        """Start the task, and kill its process in the first save after update `task.mark_at`.

        A save is noticed when a file that it writes has reached a megabyte.
        """
        folder = Path(str(task.folder))
        with subprocess.Popen(self._command(task, self._new_result(), 1), **self._process_kwargs()) as process:
            while process.poll() is None and not Path(str(task.mark)).exists():
                time.sleep(0.001)
            before = _large_files(folder)
            while process.poll() is None and _large_files(folder) <= before:
                pass
            process.kill()
            _, errors = process.communicate()
        if process.returncode != -9:
            raise WorkFailed(f"exit status {process.returncode}: {errors[-2000:]}")

    def _command(self, task: Task, result: Path, ranks: int) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        work = ["-m", "benchmarks.promises.process", self.library, json.dumps(dataclasses.asdict(task)), str(result)]
        return [sys.executable, *launcher, *work]

    def _process_kwargs(self) -> dict[str, Any]:
        is_reference = self.library.startswith("pytorch-accelerated")
        paths = [*([str(REFERENCE)] if is_reference else [str(REPOSITORY / "src")]), str(REPOSITORY)]
        # Standard output and errors may hold more than a pipe does; only what fails is looked at.
        return {
            "cwd": self.folder,
            "env": {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "ACCELERATE_USE_CPU": "true",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            },
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }

    def _new_result(self) -> Path:
        self._results += 1
        return self.folder / f"result-{self._results}.pt"


def _large_files(folder: Path) -> set[tuple[str, int, int]]:
    """Files of over a megabyte: path, inode, and time of the last change."""
    found = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            try:
                facts = os.stat(path)
            except FileNotFoundError:  # renamed in the meantime
                continue
            if facts.st_size > 1_000_000:
                found.add((path, facts.st_ino, facts.st_mtime_ns))
    return found


def accumulation(asked: Asked) -> Answer:
    whole = asked.does(Task(rows=108, batch_size=32))
    parts = asked.does(Task(rows=108, batch_size=8, accumulated=4))
    return _compared(whole, parts)


def evaluation(asked: Asked) -> Answer:
    task = Task("evaluate", rows=101, batch_size=32)
    return _loss_compared(asked.does(task), task)


def evaluation_on_two(asked: Asked) -> Answer:
    task = Task("evaluate", rows=101, batch_size=16)
    return _loss_compared(asked.does(task, ranks=2), task)


def workers(asked: Asked) -> Answer:
    task = Task(rows=200, batch_size=16, epochs=2, shuffles=True, is_augmented=True)
    return _compared(asked.does(task), asked.does(dataclasses.replace(task, workers=2)))


def resuming(asked: Asked) -> Answer:
    # 25 updates an epoch: the last checkpoint before the kill is in the middle of the second epoch.
    task = Task(rows=400, batch_size=16, epochs=3, shuffles=True, dropout=0.2, folder=str(asked.folder / "whole"))
    whole = asked.does(task)
    task = dataclasses.replace(task, folder=str(asked.folder / "killed"))
    asked.dies(dataclasses.replace(task, die_at=43))
    return _compared(whole, asked.does(dataclasses.replace(task, resumes=True)), exactly=True)


def flipped_bits(asked: Asked) -> Answer:
    task = Task(rows=160, batch_size=16, epochs=2, save_every=5, width=256, folder=str(asked.folder / "flips"))
    asked.dies(dataclasses.replace(task, die_at=17))
    found = asked.does(dataclasses.replace(task, what="flip", flips=FLIPS))
    return Answer(f"{found['trained on']} of {FLIPS}", found["trained on"] == 0)


def killed_saves(asked: Asked) -> Answer:
    # 4 updates an epoch: libraries that save at the end of epochs save as often as the others.
    task = Task(rows=64, batch_size=16, epochs=20, save_every=4, width=200_000)
    lost = 0
    for kill in range(KILLS):
        folder = str(asked.folder / f"saves-{kill}")
        killed = dataclasses.replace(task, folder=folder, mark=f"{folder}.mark", mark_at=9 + 4 * (kill % 4) + kill % 3)
        asked.is_killed_in_a_save(killed)
        try:
            asked.does(dataclasses.replace(task, folder=folder, save_every=1000, resumes=True))
        except WorkFailed:
            lost += 1
    return Answer(f"{lost} of {KILLS}", lost == 0)


class Question(NamedTuple):
    """A row of the table.

    Attributes:
        texts: what is asked, in English ("en") and Chinese ("zh").
        answer: finds out.
        without: the libraries that have nothing for it.
    """

    texts: dict[str, str]
    answer: Callable[[Asked], Answer]
    without: tuple[str, ...] = ()


QUESTIONS = {
    "accumulation": Question(
        {
            "en": "4 batches of 8 train like one of 32, also the last, short group",
            "zh": "累积 4 个大小为 8 的批次与一个大小为 32 的批次结果相同，最后不足一组时也一样",
        },
        accumulation,
        ("skorch",),
    ),
    "evaluation": Question(
        {"en": "the loss of an evaluation is the mean over all samples", "zh": "评估的损失是全部样本的平均值"},
        evaluation,
    ),
    "evaluation on two": Question(
        {"en": "... on two processes with an odd number of samples", "zh": "……在两个进程上、样本数为奇数时也一样"},
        evaluation_on_two,
        ("skorch",),
    ),
    "workers": Question(
        {
            "en": "random augmentation is the same with 0 and 2 workers",
            "zh": "0 个和 2 个 worker 进程得到相同的随机增强",
        },
        workers,
    ),
    "resuming": Question(
        {
            "en": "killed within an epoch and resumed, a run ends with the same bits",
            "zh": "在轮次中途被强行终止再恢复的训练，最终结果逐位相同",
        },
        resuming,
        (WITHOUT_STATES,),
    ),
    "flipped bits": Question(
        {
            "en": "runs that trained on from a damaged checkpoint without a word",
            "zh": "从损坏的检查点恢复训练却没有任何提示的次数",
        },
        flipped_bits,
        (WITHOUT_STATES,),
    ),
    "killed saves": Question(
        {
            "en": "kills during a save after which the same command did not resume",
            "zh": "保存时被强行终止后，用同一条命令无法恢复训练的次数",
        },
        killed_saves,
        (WITHOUT_STATES,),
    ),
}


def ask(question: Question, library: str, folder: Path) -> Answer:
    """The library's answer."""
    if library in question.without:
        return Answer("–", None)
    folder.mkdir(parents=True)
    try:
        return question.answer(Asked(library, folder))
    except WorkFailed as error:
        return Answer("fails", False, str(error))


def _compared(one: dict[str, Any], other: dict[str, Any], *, exactly: bool = False) -> Answer:
    one_vector, other_vector = _as_vector(one), _as_vector(other)
    difference = float((one_vector - other_vector).norm() / one_vector.norm())
    if all(torch.equal(value, other[name]) for name, value in one.items()):
        return Answer("same bits" if exactly else "yes", True)
    if difference < ROUNDING:
        return Answer("rounding" if exactly else "yes", not exactly)
    return Answer(f"{difference:.1%} off", False)


def _as_vector(found: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in found.values()])


def _loss_compared(found: float, task: Task) -> Answer:
    rows, model = Rows(task), Model(task).eval()
    with torch.no_grad():
        right = float(torch.nn.functional.cross_entropy(model(rows.inputs), rows.labels))
    difference = abs(found - right) / right
    return Answer("yes", True) if difference < ROUNDING else Answer(f"{difference:.2%} off", False)
