"""A run that is written as a plain script ends with the same bits, and the script needs nothing of this library."""

from __future__ import annotations

import random
import re
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.__main__ import main
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    TrainerCallback,
)
from pytorch_accelerated.data import Mixture
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface import TrainerCallback as HuggingFaceCallback
from pytorch_accelerated.schedulers import CosineLrScheduler
from pytorch_accelerated.trainer import TrainerWithTimmScheduler
from tests.chaos.size import in_release, size, some
from tests.ejecting.comparing import compare, module_of
from tests.ejecting.setups import (
    FACES,
    SETUPS,
    Augmented,
    NoisyTrainer,
    Regressor,
    Run,
    Tagger,
    Texts,
    data,
    face,
    language_model,
    random_face,
    random_setup,
    run,
)
from tests.support.processes import REPOSITORY, run_on_ranks

RANKS = REPOSITORY / "tests" / "ranks"


@pytest.mark.parametrize("make_run", [*SETUPS, *FACES], ids=lambda make_run: make_run.__name__)
def test_a_run_and_its_script_end_with_the_same_bits(make_run: Callable[[], Run], tmp_path: Path) -> None:
    compare(make_run, tmp_path)


def test_a_run_on_two_ranks_and_its_script_on_two_end_with_the_same_bits(tmp_path: Path) -> None:
    run_on_ranks(RANKS / "ejecting.py", 2, tmp_path, size(0, 60))


@pytest.mark.parametrize("seed", some(range(1), range(100)))
def test_a_random_run_of_the_hugging_face_trainer_and_its_script_end_with_the_same_bits(
    seed: int, tmp_path: Path
) -> None:
    compare(partial(random_face, seed), tmp_path)


@in_release
def test_a_language_model_of_transformers_and_its_script_end_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    compare(language_model, tmp_path)


@in_release
def test_three_ranks_have_the_bits_of_their_script(tmp_path: Path) -> None:
    run_on_ranks(RANKS / "ejecting.py", 3, tmp_path, 60)


@pytest.mark.parametrize("seed", some(range(8), range(200)))
def test_a_random_run_and_its_script_end_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    compare(partial(random_setup, seed), tmp_path)


class FaceCallback(HuggingFaceCallback):
    """May do anything."""


class Tokens:
    """Has a special token."""

    pad_token_id = 3


class Configured(Tagger):
    """Has no special token."""

    config = types.SimpleNamespace(pad_token_id=None)


NUM_EPOCHS: Any = TrainerPlaceholderValues.NUM_EPOCHS
SCALE = torch.tensor(2.0)
TWICE = [EarlyStoppingCallback(), EarlyStoppingCallback(watch_metric="train_loss_epoch")]


class Hooked(Trainer):
    """A trainer whose hook each test replaces."""


def reads_the_history(self: Any, batch: Any) -> Any:
    return {"loss": self.run_history.get_latest_metric("train_loss_epoch"), "batch_size": 1}


def counts_late(self: Any, batch: Any) -> Any:
    return {"loss": self.model(batch[0]).mean(), "batch_size": 1, "num_items_in_batch": 1}


def uses_a_tensor(self: Any, batch: Any) -> Any:
    return {"loss": SCALE * self.model(batch[0]).mean(), "batch_size": len(batch[0])}


def uses_this_library(self: Any, batch: Any) -> Any:
    return {"loss": self.model(batch[0]).mean(), "batch_size": len(TensorDataset(*batch)), "of": CosineLrScheduler}


def train_epoch_start(self: Any) -> None:
    """Named as another hook, and harmless."""


def seed_of(batch: Any) -> float:
    """Has the name of a function of the script."""
    return float(len(batch))


def uses_a_taken_name(self: Any, batch: Any) -> Any:
    return {"loss": self.model(batch[0]).mean() / seed_of(batch), "batch_size": len(batch[0])}


class Rows(Dataset[Any]):
    """Rows that are numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(4)


def hooked(method: Callable[..., Any], name: str = "calculate_train_batch_loss") -> Run:
    return run(kind=type("Hooked", (Hooked,), {name: method, "__module__": __name__}))


def replaced() -> Run:
    trainer, arguments = run()
    trainer.calculate_train_batch_loss = lambda batch: {}  # type: ignore[method-assign]
    return trainer, arguments


def trained() -> Run:
    trainer, arguments = run()
    trainer.train(**arguments)
    return trainer, arguments


def drawing_by_itself() -> Run:
    rows = Augmented(*data())
    rows.parts = {"noise": [random.Random(0)]}  # type: ignore[attr-defined]
    return run(train_dataset=Subset(rows, [3, 1, 2]), train_dataloader_kwargs={"num_workers": 1})


def transformed() -> Any:
    rows = pytest.importorskip("datasets").Dataset.from_dict({"tokens": [[1, 2]], "labels": [[1, 2]]})
    return face(parts={"train_dataset": rows.with_transform(lambda batch: batch)})


def face_with(name: str, value: Any) -> Callable[[], Any]:
    """A run of the Hugging Face trainer, with something set on the trainer."""

    def make_run() -> Any:
        trainer, arguments = face()
        setattr(trainer, name, value)
        return trainer, arguments

    return make_run


def on_a_plateau(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return optimizer, ReduceLROnPlateau(optimizer)


def weighing(kind: Any = Trainer, loss: Any = None) -> Run:
    loss = loss or partial(nn.functional.cross_entropy, weight=torch.ones(3))
    return run(kind=kind, loss=loss, train_dataset=data(classes=True))


def scheduled(create_scheduler_fn: Any) -> Callable[[], Run]:
    return partial(run, create_scheduler_fn=create_scheduler_fn)


@pytest.mark.parametrize(
    ("make_run", "reason"),
    [
        (partial(run, callbacks=[TrainerCallback()]), "TrainerCallback may change the run"),
        (partial(run, callbacks=TWICE), "there are two callbacks"),
        (partial(run, callbacks=[SaveBestModelCallback(watch_metric="eval_accuracy")]), "watches 'eval_accuracy'"),
        (partial(run, train_dataset=DataLoader(TensorDataset(*data()))), "the data is a DataLoader"),
        (partial(run, train_dataset=Rows()), "a batch is a Tensor"),
        (partial(run, train_dataset=Mixture([TensorDataset(*data())], [1.0])), "an order or batches of its own"),
        (partial(run, eval_dataset={"one": TensorDataset(*data())}), "the data is a dict"),
        (partial(run, max_duration=3), "`max_duration` is given"),
        (partial(run, train_dataloader_kwargs={"sampler": range(8)}), "'sampler'"),
        (scheduled(lambda optimizer: CosineLrScheduler(optimizer, 3, 1)), "the schedule needs this library"),
        (
            scheduled(partial(lambda optimizer, of: ExponentialLR(optimizer, 1 / of), of=NUM_EPOCHS)),
            "the schedule needs",
        ),
        (scheduled([partial(ExponentialLR, gamma=0.5)]), "not one for each optimizer"),
        (weighing, "a function that weighs"),
        (replaced, "calculate_train_batch_loss was replaced"),
        (trained, "has trained before"),
        (partial(run, kind=TrainerWithTimmScheduler), "TrainerWithTimmScheduler"),
        (partial(hooked, reads_the_history), "uses `self.run_history`"),
        (partial(hooked, counts_late), "returns `num_items_in_batch`"),
        (partial(hooked, uses_a_tensor), "use `SCALE`, a Tensor"),
        (partial(hooked, uses_this_library), "use `CosineLrScheduler` of this library"),
        (partial(hooked, uses_a_taken_name), "use a function `seed_of`, and so does the script"),
        (
            partial(weighing, kind=NoisyTrainer, loss=nn.CrossEntropyLoss(torch.ones(3))),
            "calls ours, whose loss weighs",
        ),
        (partial(run, optimizer=AdamWScheduleFree, max_num_train_steps=8), "an optimizer with modes"),
        (partial(hooked, eval("lambda self, batch: {}")), "has no source that can be copied"),
        (partial(hooked, train_epoch_start, "create_scheduler"), "Hooked overrides create_scheduler"),
        (drawing_by_itself, "its copy of a generator"),
        (partial(run, callbacks=[SaveBestModelCallback("best.pt")], eval_dataset=None), "there is no `eval_dataset`"),
        (partial(run, callbacks=[ModelEmaCallback(0.9)], eval_dataset=None), "without an `eval_dataset`"),
        (partial(run, eval_dataset=TensorDataset(*data(0))), "`eval_dataset` is empty"),
        (face_with("compute_loss", lambda *args, **kwargs: 0), "compute_loss was replaced"),
        (face_with("loss_is_scaled_for_ga", True), "`loss_is_scaled_for_ga` is given"),
        (transformed, "transforms the rows of a batch at once"),
        (partial(face, optimizers=on_a_plateau), "the schedule watches a metric"),
        (partial(face, parts={"eval_dataset": {"one": Texts()}}), "there are several evaluation sets"),
        (partial(face, dataloader_drop_last=True, per_device_train_batch_size=64), "it has no updates"),
        (partial(face, Regressor, parts={"train_dataset": [types.SimpleNamespace(inputs=1)]}), "a row is a Simple"),
        (partial(face, parts={"model_init": Tagger}), "`model_init` is given"),
        (partial(face, parts={"callbacks": [FaceCallback()]}), "FaceCallback may change the run"),
        (partial(face, parts={"processing_class": Tokens()}, kind=Configured), "sets the model's `pad_token_id`"),
        (partial(face, eval_strategy="steps", eval_steps=1), "evaluates within epochs"),
        (partial(face, label_smoothing_factor=0.1), "`label_smoothing_factor` is 0.1"),
        (partial(face, lr_scheduler_type="polynomial"), "`lr_scheduler_type` is 'polynomial'"),
        (partial(face, parts={"optimizer_cls_and_kwargs": (AdamWScheduleFree, {})}), "is a AdamWScheduleFree"),
    ],
)
def test_what_a_script_cannot_do_is_refused_before_anything_is_written(
    make_run: Callable[[], Run], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(mkdtemp(dir=tmp_path.parent)))
    trainer, arguments = make_run()
    with pytest.raises(ConfigurationError, match=reason):
        trainer.eject(tmp_path / "plain.py", **arguments)
    assert not list(tmp_path.iterdir())


def test_a_name_that_nothing_can_import_is_refused(tmp_path: Path) -> None:
    trainer, arguments = run()
    with pytest.raises(ConfigurationError, match="Nothing can import 'plain-run.py'"):
        trainer.eject(tmp_path / "plain-run.py", **arguments)


def blocks_of(page: str, language: str) -> list[str]:
    """The blocks of code of a page."""
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_run_of_the_readme_takes_60_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(blocks_of("README.md", "python")[0].replace("trainer.train(", "trainer.eject('plain.py', "), {})
    assert len(Path("plain.py").read_text(encoding="utf-8").splitlines()) <= 60


def test_the_page_shows_the_script_that_its_run_becomes(tmp_path: Path) -> None:
    page = "docs/how_to/eject.md"
    names: dict[str, Any] = {"__name__": "train"}
    exec(blocks_of(page, "python")[0], names)
    trainer, arguments = names["make_run"]()
    script = trainer.eject(tmp_path / "plain.py", **arguments).read_text(encoding="utf-8")
    (shown,) = blocks_of(page, "{code-block} python")
    assert [line for line in script.splitlines() if "Written by" not in line] == [
        line for line in shown.splitlines() if "Written by" not in line
    ]


SCRIPT = """
import torch
from torch import nn

from pytorch_accelerated import Trainer

def make_run():
    model = nn.Linear(4, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), seed=3)
    return trainer, {"train_dataset": (torch.ones(8, 4), torch.ones(8, 1)), "num_epochs": 2}
"""


HUGGING_FACE = """
from torch import nn

from pytorch_accelerated.huggingface import Trainer, TrainingArguments

def make_run():
    arguments = TrainingArguments("out", use_cpu=True, report_to="none")
    return Trainer(nn.Linear(4, 1), arguments, train_dataset=[{"input": 1}]), {}
"""


def test_the_command_writes_a_file_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("making_a_run.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["eject", "--run", "making_a_run.py:make_run", "plain.py"]) == 0
    assert capsys.readouterr().out.startswith("Wrote plain.py: ")
    assert callable(module_of(Path("plain.py")).train)
    assert main(["eject", "--run", "making_a_run.py:make_run", "plain.py"]) == 2
    assert "plain.py exists" in capsys.readouterr().err
    Path("of_transformers.py").write_text(HUGGING_FACE, encoding="utf-8")
    assert main(["eject", "--run", "of_transformers.py:make_run", "other.py"]) == 0
    assert callable(module_of(Path("other.py")).train)
