"""What a notebook shows of runs, in a real kernel: its outputs as they are saved."""

import re
from typing import Any

import nbclient
import nbformat
import pytest

from tests.support.processes import REPOSITORY

CELLS = {
    "setup": """
import os, sys, tempfile, time, warnings
sys.modules["ipywidgets"] = None  # as where it is not installed
import torch
from torch import nn
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, MetricsCallback, TrainerCallback
from tests.report.digits import EVAL, TRAIN

class At(TrainerCallback):
    "Does something after the given number of updates, and slows evaluations and predictions down."
    def __init__(self, update, do):
        self.update, self.do = update, do
    def on_train_step_end(self, trainer, **kwargs):
        if trainer.run_state.updates == self.update:
            self.do(trainer)
    def on_eval_step_end(self, trainer, **kwargs):
        time.sleep(0.03)
    on_prediction_step_end = on_eval_step_end

def accuracy(predictions, targets):
    return (predictions.argmax(1) == targets).float().mean()

def new_trainer(update=None, do=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    callbacks = (MetricsCallback({"accuracy": accuracy}), *DEFAULT_CALLBACKS, At(update, do))
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=1)

def fail(trainer):
    raise ValueError("<b>no</b> more")

def interrupt(trainer):
    raise KeyboardInterrupt

def speak(trainer):
    print("hello from a callback")
    warnings.warn("a warning from a callback")
""",
    "train": "trainer = new_trainer(3, speak)\ntrainer.train(TRAIN, 3, EVAL, per_device_batch_size=30)\nNone",
    "hugging face": """
from pytorch_accelerated.huggingface import Trainer as FaceTrainer, TrainingArguments
from tests.huggingface.runs import Regression, Rows
options = {"num_train_epochs": 3, "per_device_train_batch_size": 2, "eval_strategy": "epoch", "logging_steps": 2}
args = TrainingArguments(tempfile.mkdtemp(), report_to="none", save_strategy="no", **options)
FaceTrainer(Regression(), args, train_dataset=Rows(20), eval_dataset=Rows(5)).train()
None""",
    "evaluate": "trainer.evaluate(EVAL, per_device_batch_size=10)\nNone",
    "predict": "trainer.predict(EVAL, per_device_batch_size=10)\nNone",
    "interrupted": "new_trainer(13, interrupt).train(TRAIN, 3, EVAL, per_device_batch_size=30)",
    "signal": """
import signal
new_trainer(13, lambda trainer: os.kill(os.getpid(), signal.SIGINT)).train(TRAIN, 3, EVAL, per_device_batch_size=30)
""",
    "failed": "new_trainer(13, fail).train(TRAIN, 3, EVAL, per_device_batch_size=30)",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of each cell, after the notebook was saved and read again."""
    cells = [nbformat.v4.new_code_cell(code.strip()) for code in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True)
    client.execute(cwd=str(REPOSITORY))
    path = tmp_path_factory.mktemp("notebook") / "run.ipynb"
    nbformat.write(notebook, path)
    saved = nbformat.read(path, as_version=4)
    return {name: cell.outputs for name, cell in zip(CELLS, saved.cells, strict=True)}


def test_the_first_cell_warns_of_nothing(outputs: dict[str, list[Any]]) -> None:
    assert outputs["setup"] == []


def displays(outputs: list[Any]) -> list[str]:
    """The HTML of each display in the output of a cell."""
    return [output.data["text/html"] for output in outputs if output.output_type == "display_data"]


def printed(outputs: list[Any], name: str = "stdout") -> list[str]:
    return "".join(output.text for output in outputs if output.get("name") == name).splitlines()


def rows_of(page: str) -> list[list[str]]:
    """The cells of the table, the header's first."""
    text = page.replace("<wbr>", "")
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]


def is_finished(page: str) -> bool:
    """Whether a page has no bar and nothing that needs a script or more of the page than inline styles."""
    return not re.search(r"#4c8bf5;width|\d left|samples/s|<script|<style|class=", page)


def error_of(outputs: list[Any]) -> str | None:
    return next((output.ename for output in outputs if output.output_type == "error"), None)


def test_a_run_is_saved_as_one_table(outputs):
    (page,) = displays(outputs["train"])
    header, *rows = rows_of(page)
    assert header == ["epoch", "train_loss_epoch", "eval_loss_epoch", "eval_accuracy", "lr", "time"]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert [row[2].endswith("*") for row in rows] == [True, True, True]
    assert page.count("font-weight:bold") == len(header)
    assert {row[4] for row in rows} == {"5.00e-01"}
    (curve,) = re.findall(r"<polyline points='(.*?)'", page)
    heights = [float(place.split(",")[1]) for place in curve.split()]
    assert len(heights) == 30  # one for each update
    assert heights[-1] > heights[0]  # the loss falls, and the vertical axis of pictures points down
    assert is_finished(page)
    assert error_of(outputs["train"]) is None


def test_a_hugging_face_run_has_the_same_display(outputs):
    assert error_of(outputs["hugging face"]) is None
    (page,) = displays(outputs["hugging face"])
    header, *rows = rows_of(page)
    assert header == ["epoch", "step", "loss", "eval_loss", "grad_norm", "lr", "elapsed"]
    assert [row[0] for row in rows if row[3]] == ["1", "2", "3"]
    assert "*" in "".join(row[3] for row in rows)
    assert is_finished(page)
    finished, best = printed(outputs["hugging face"])
    assert finished.startswith("Finished 3 epochs, 30 steps in ")
    assert best.startswith("Best eval_loss ")


def test_what_others_print_stays_visible_and_the_table_is_not_printed_again(outputs):
    first, spoken, last, *_ = printed(outputs["train"])
    assert first == "Training 3 epochs of 10 updates, 30 samples each, on cpu, seed 1"
    assert spoken == "hello from a callback"
    assert last.startswith("Finished 3 epochs, 30 updates")
    assert "UserWarning: a warning from a callback" in "\n".join(printed(outputs["train"], "stderr"))


def test_passes_outside_of_a_run_end_as_a_line(outputs):
    (evaluation,) = displays(outputs["evaluate"])
    (prediction,) = displays(outputs["predict"])
    assert re.search(r"<div>evaluation: 14 batches, [^ ]+</div>", evaluation)
    assert re.search(r"<div>prediction: 14 batches, [^ ]+</div>", prediction)
    assert printed(outputs["evaluate"])[0] == "Evaluating 14 batches of 10 samples, on cpu"
    assert printed(outputs["evaluate"])[1].startswith("evaluation_loss ")


@pytest.mark.parametrize(
    ("cell", "error", "reason"),
    [
        ("interrupted", "KeyboardInterrupt", "Ended by KeyboardInterrupt in epoch 2, after 13 updates"),
        ("signal", "KeyboardInterrupt", "Stopped early: SIGINT"),
        ("failed", "ValueError", "Ended by ValueError in epoch 2, after 13 updates"),
    ],
)
def test_a_run_that_did_not_end_by_itself_keeps_its_table_and_says_why(outputs, cell, error, reason):
    (page,) = displays(outputs[cell])
    assert [row[0] for row in rows_of(page)][:2] == ["epoch", "1"]
    assert reason in page
    assert is_finished(page)
    assert error_of(outputs[cell]) == error
