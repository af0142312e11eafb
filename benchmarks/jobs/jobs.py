"""The jobs: what a script must show at its end, and how it is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"


class Start(NamedTuple):
    """How a script is run.

    Attributes:
        before: what stands before it on the command line, after the interpreter.
        after: what stands after it.
        is_killed_first: whether it is started twice, because the first process dies.
        then: a command of Python's that follows.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    is_killed_first: bool = False
    then: tuple[str, ...] = ()


class Job(NamedTuple):
    """A job.

    Attributes:
        title: what the table calls it.
        peers: the libraries that it is compared with, by the endings of the scripts' names.
        figure: what every script prints last.
        at_least: the value at which the job is done.
        files: texts to write into the folder in which a script runs, by name of script and of file.
        starts: by name of script, if it needs more than the interpreter.
        expected: what a script must also print.
        check: looks at the folder afterwards; an error fails the row.
        note: what the table adds.
    """

    title: str
    peers: tuple[str, ...]
    figure: str
    at_least: float
    files: dict[str, dict[str, str]] = {}
    starts: dict[str, Start] = {}
    expected: str = ""
    check: Callable[[str, Path], None] | None = None
    note: str = ""


LIBRARIES = {
    "ours": "ours",
    "fastai": "fastai",
    "keras": "Keras",
    "lightning": "Lightning",
    "transformers": "transformers",
    "skorch": "skorch",
    "pytorch": "a loop by hand",
}


def _has_read_fewer_rows(script: str, folder: Path) -> None:
    """Six epochs are 7,200 rows, and three were complete before the crash. Some rows are read for a look."""
    rows = int((folder / "rows_read.txt").read_text(encoding="utf-8"))
    if rows > 3 * 1200 + 100:
        raise ValueError(f"the second process read {rows} rows: it did not resume after the third epoch")


def _has_compared(script: str, folder: Path) -> None:
    if script.endswith("_ours") and not (folder / "compare.html").exists():
        raise ValueError("there is no page that compares the runs")


RESUMING = Start(is_killed_first=True)
JOBS = {
    "images": Job(
        "classify pictures in a folder, with augmentation",
        ("fastai",),
        "accuracy",
        0.9,
        note="torchvision's 5 lines that read and augment count as data; fastai has 2 for that",
    ),
    "tabular": Job(
        "a table with categories and gaps",
        ("fastai",),
        "accuracy",
        0.88,
        note="scikit-learn's 15 lines for gaps and categories count as data; fastai does that itself",
    ),
    "regression": Job("regression, with R2", ("keras",), "R2", 0.3),
    "classification": Job("classification, with accuracy, F1 and AUC by name", ("keras",), "f1", 0.9),
    "fine_tune": Job("fine-tune: the head first, then all by layer-wise rates", ("fastai",), "accuracy", 0.75),
    "one_cycle": Job("one cycle, with the rate of the finder", ("fastai",), "accuracy", 0.88),
    "k_fold": Job("k folds, with out-of-fold predictions", ("skorch",), "accuracy", 0.95),
    "sweep": Job(
        "a hyperparameter sweep with pruning",
        ("keras", "lightning", "transformers"),
        "accuracy",
        0.88,
        expected=" pruned. ",  # what Optuna says of a trial
    ),
    "gan": Job("a GAN, with two optimizers", ("lightning",), "likeness", 0.6),
    "configuration": Job(
        "settings from a file and the command line",
        ("lightning",),
        "accuracy",
        0.88,
        files={
            "configuration_ours": {"run.yaml": "width: 64\nlr: 0.001\nepochs: 5\n"},
            "configuration_lightning": {
                "run.yaml": "model:\n  width: 64\n  lr: 0.001\ntrainer:\n  max_epochs: 5\n",
            },
        },
        starts={
            "configuration_ours": Start(after=("--config", "run.yaml", "--lr", "0.01")),
            "configuration_lightning": Start(after=("fit", "--config", "run.yaml", "--model.lr", "0.01")),
        },
        expected="settings: 64 0.01 32 5",
    ),
    "muon": Job("Muon for hidden matrices, AdamW for the rest", ("keras", "pytorch"), "accuracy", 0.88),
    "ema": Job("a moving average of the weights (EMA)", ("keras", "lightning"), "accuracy", 0.88),
    "swa": Job("the mean of the last epochs (SWA)", ("lightning",), "accuracy", 0.88),
    "early_stopping": Job("early stopping, and the best model", ("fastai", "keras"), "accuracy", 0.88),
    "resume": Job(
        "resume after a crash",
        ("keras", "lightning"),
        "accuracy",
        0.88,
        starts=dict.fromkeys(("resume_ours", "resume_keras", "resume_lightning"), RESUMING),
        check=_has_read_fewer_rows,
    ),
    "accumulation": Job("accumulation, clipping and bf16", ("fastai", "keras", "lightning"), "accuracy", 0.88),
    "processes": Job(
        "two processes",
        ("lightning",),
        "accuracy",
        0.88,
        starts={"processes_ours": Start(before=("-m", "torch.distributed.run", "--nproc-per-node", "2"))},
        expected="2 processes",  # both say so
        note="ours is started by torchrun, Lightning starts its processes itself",
    ),
    "probabilities": Job("probabilities for new rows, in their order", ("keras",), "accuracy", 0.88),
    "onnx": Job("export to ONNX", ("keras",), "accuracy", 0.88),
    "tensorboard": Job("curves in TensorBoard", ("fastai", "lightning"), "accuracy", 0.88),
    "freeze": Job("freeze layers, and unfreeze them later", ("fastai",), "accuracy", 0.88),
    "custom_loss": Job("a loss that looks at the inputs", ("lightning",), "accuracy", 0.88),
    "class_weights": Job("class weights for a rare class", ("keras",), "balanced accuracy", 0.8),
    "confusion": Job("the confusion matrix and the worst rows", ("fastai",), "accuracy", 0.88),
    "compare": Job(
        "two runs to compare",
        ("lightning",),
        "runs",
        2,
        starts={
            "compare_ours": Start(then=("-m", "pytorch_accelerated", "compare", "runs/0.001.html", "runs/0.01.html"))
        },
        check=_has_compared,
        note="then `python -m pytorch_accelerated compare`, or `tensorboard --logdir runs`",
    ),
}


def scripts_of(name: str) -> list[str]:
    """The scripts of a job, ours first."""
    return [f"{name}_{side}" for side in ("ours", *JOBS[name].peers)]
