"""Every script in examples/, at toy size, started as a user starts it."""

import csv
import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from sklearn.datasets import load_digits

from pytorch_accelerated import set_seed
from tests.chaos.size import in_release
from tests.support.processes import REPOSITORY, Output, run_forked, run_on_ranks, run_script

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"
# All our warnings are UserWarnings: none of them may be the fault of an example. The tables have room to stay tables.
SETTINGS = {"PYTHONWARNINGS": "error::UserWarning", "COLUMNS": "200"}


def run_example(name: str, *args: object, folder: Path, ranks: int = 1) -> Output:
    """Run a script in `folder`, where it leaves its files; only the first of several ranks may print."""
    script = EXAMPLES / f"{name}.py"
    if ranks == 1:
        output = run_forked(script, *args, cwd=folder, env=SETTINGS)
    else:
        output = run_on_ranks(script, ranks, *args, cwd=folder, env=SETTINGS)
    assert not any(output.stdout_of_ranks[1:])
    assert not re.search(r"(pytorch_accelerated|examples)\W.*Warning", output.stderr), output.stderr
    return output


def test_every_script_in_examples_is_run_here():
    run_here = re.findall(r'run_example\(\s*"(\w+)"', Path(__file__).read_text(encoding="utf-8"))
    run_here += re.findall(r'EXAMPLES / "(\w+)\.py"', Path(__file__).read_text(encoding="utf-8"))
    assert {script.stem for script in EXAMPLES.glob("*.py")} == set(run_here)
    gallery = (REPOSITORY / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(\.\./examples/(\w+)\.py\)", gallery)) == set(run_here)


def test_train_digits_recognises_97_percent_of_held_out_digits(tmp_path, train_digits):
    output = run_example("train_digits", folder=tmp_path)
    assert len(_table(output)) == 10
    shown = _number(r"Held-out digits: (\d+) of 300 recognised", output.stdout)
    assert shown >= 0.97 * 300
    assert output.stdout.count(", predicted ") == min(300 - shown, 4)

    model, curves = (Path(_match(rf"^{what}: +(.+)$", output.stdout)) for what in ("Model", "Curves"))
    assert shown == _recognised_by(train_digits, tmp_path / model, seed=0)
    assert (tmp_path / curves).read_bytes().startswith(b"\x89PNG")


@in_release  # the next one trains it, too, and tests/processes/test_launching.py has the launchers
def test_train_mnist_under_accelerate_launch(tmp_path, mnist_root):
    config = tmp_path / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nmixed_precision: 'no'\n"
        "num_machines: 1\nnum_processes: 1\nmachine_rank: 0\n"
    )
    accelerate = Path(sys.executable).with_name("accelerate")
    launch = ["launch", "--config_file", config, EXAMPLES / "train_mnist.py"]
    output = run_script(accelerate, *launch, "--data-dir", mnist_root, "--num-epochs", 1, cwd=tmp_path, env=SETTINGS)
    assert _number(r"Test accuracy: ([\d.]+)%", output.stdout) > 30
    assert (tmp_path / "outputs/mnist/best_model.pt").is_file()


@pytest.mark.processes
def test_train_mnist_on_two_ranks_ends_with_the_best_of_its_models(tmp_path, mnist_root):
    output = run_example("train_mnist", "--data-dir", mnist_root, "--num-epochs", 2, folder=tmp_path, ranks=2)
    assert "(64 x 2 processes)" in output.stdout
    assert _number(r"Test accuracy: ([\d.]+)%", output.stdout) > 60
    checkpoint = torch.load(tmp_path / "outputs/mnist/best_model.pt", weights_only=True)
    losses = [float(row["eval_loss_epoch"]) for row in _table(output)]
    assert checkpoint["eval_loss_epoch"] == pytest.approx(min(losses), rel=1e-3)


def test_metrics_in_subclass_and_in_callback_are_the_same(tmp_path):
    in_subclass = run_example("metrics_in_subclass", "--num-epochs", 1, folder=tmp_path)
    in_callback = run_example("metrics_in_callback", "--num-epochs", 1, folder=tmp_path)
    accuracies = [row["eval_accuracy"] for row in _table(in_subclass)]
    assert accuracies == [row["eval_accuracy"] for row in _table(in_callback)]
    assert len(accuracies) == 1
    assert _number(r"^eval_accuracy ([\d.]+)", in_subclass.stdout) == _number(
        r"eval_accuracy ([\d.]+), eval_f1_score", in_callback.stdout
    )
    assert _number(r"held-out digits: ([\d.]+)%", in_subclass.stdout) > 80
    assert _number(r"eval_f1_score ([\d.]+)$", in_callback.stdout) > 0.8


def test_custom_callback_event_reaches_the_callback(tmp_path):
    output = run_example("custom_callback_event", "--num-epochs", 1, folder=tmp_path)
    mistakes = re.findall(r"^  (\d) taken for (\d): (\d+)$", output.stdout, flags=re.MULTILINE)
    assert mistakes
    assert all(label != prediction for label, prediction, _ in mistakes)
    total = _number(r"Mistakes in the last evaluation: (\d+)", output.stdout)
    assert sum(int(count) for _, _, count in mistakes) <= total < 0.2 * 300


def test_custom_logger_writes_every_metric_that_the_table_shows(tmp_path):
    output = run_example("custom_logger", "--num-epochs", 2, folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "outputs/metrics.jsonl").read_text().splitlines()]
    assert [(line.pop("epoch"), line.pop("update")) for line in lines] == [(1, 38), (1, 38), (2, 76), (2, 76)]
    in_table = [
        {name: pytest.approx(float(row[name]), rel=1e-3)}
        for row in _table(output)
        for name in ("train_loss_epoch", "eval_loss_epoch")
    ]
    assert lines == in_table


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_predictions_to_csv_has_each_sample_once(tmp_path, ranks):
    output = run_example("predictions_to_csv", "--num-epochs", 1, folder=tmp_path, ranks=ranks)
    with (tmp_path / "outputs/predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert f"{len(rows)} predictions are in" in output.stdout
    set_seed(42)
    held_out = torch.randperm(1797)[1500:].tolist()
    assert sorted(int(row["index"]) for row in rows) == sorted(held_out)
    targets = load_digits().target
    assert all(int(row["label"]) == targets[int(row["index"])] for row in rows)
    assert all(0.1 <= float(row["probability"]) <= 1 for row in rows)
    assert sum(row["prediction"] == row["label"] for row in rows) > 0.8 * len(rows)


def test_timm_scheduler_follows_its_curve(tmp_path):
    args = ["--model-name", "test_resnet", "--num-epochs", 3, "--batch-size", 64]
    output = run_example("timm_scheduler", *args, folder=tmp_path)
    assert "Training 3 epochs of 19 updates" in output.stdout
    cosine = [1e-5 + (2e-3 - 1e-5) / 2 * (1 + math.cos(math.pi * epoch / 3)) for epoch in (1, 2, 3)]
    assert [row["lr"] for row in _table(output)] == [f"{lr:.2e}" for lr in cosine]
    assert _number(r"held-out digits: ([\d.]+)%", output.stdout) > 30


def test_mixup_ema_trains_on_soft_targets_and_saves_the_average(tmp_path, train_digits):
    output = run_example("mixup_ema", "--num-epochs", 4, folder=tmp_path)
    last = {name: float(value) for name, value in _table(output)[-1].items() if "loss" in name}
    assert last["train_loss_epoch"] > 2 * last["eval_loss_epoch"]  # blended images cannot be told for sure
    assert last["ema_model_eval_loss_epoch"] != last["eval_loss_epoch"]
    recognised = _recognised_by(train_digits, tmp_path / "outputs/ema_model.pt", seed=42)
    shown = _number(r"with the averaged weights: ([\d.]+)%", output.stdout)
    assert shown == pytest.approx(100 * recognised / 300, abs=0.05)
    assert shown > 80


def test_transfer_learning_changes_the_head_first_and_then_everything(tmp_path, monkeypatch):
    args = ["--model-name", "test_resnet", "--num-epochs", 1, "--batch-size", 64]
    output = run_example("transfer_learning", *args, folder=tmp_path)
    transfer_learning = _import_example("transfer_learning", monkeypatch)
    set_seed(42)
    transfer_learning.load_datasets()
    model = transfer_learning.create_model("test_resnet", pretrained=False)

    states = tmp_path / "outputs/transfer_learning"
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    head = {name for name in parameters if name.startswith("fc.")}
    assert head
    assert _changed(parameters, states / "only_head.pt") == head
    assert _changed(parameters, states / "whole_model.pt") == set(parameters)
    trained = re.findall(r"Training ([\d,]+) of ([\d,]+) parameters", output.stdout)
    sizes = [sum(parameters[name].numel() for name in names) for names in (head, parameters)]
    assert trained == [(f"{size:,}", f"{sizes[1]:,}") for size in sizes]
    assert [row["epoch"] for row in _table(output)] == ["1", "2"]
    assert _number(r"held-out digits: ([\d.]+)%", output.stdout) > 30


def test_transformers_model_learns_from_its_own_loss(tmp_path):
    output = run_example("transformers_model", "--num-epochs", 3, folder=tmp_path)
    losses = [float(row["eval_loss_epoch"]) for row in _table(output)]
    assert losses[-1] < losses[0] < 2 * math.log(10)
    assert _number(r"held-out digits: ([\d.]+)%", output.stdout) > 50


@in_release  # resumes are compared at each step in tests/huggingface/test_resume.py
def test_click_through_rate_resumes_as_if_it_had_never_ended_and_predicts(tmp_path):
    whole = run_example("click_through_rate", "--size", 5000, "--num-epochs", 2, folder=tmp_path)
    parted = ["--size", 5000, "--output-dir", "parted"]
    run_example("click_through_rate", *parted, "--num-epochs", 1, folder=tmp_path)
    resumed = run_example("click_through_rate", *parted, "--num-epochs", 2, "--resume", folder=tmp_path)
    predicted = run_example("click_through_rate", *parted, "--predict", folder=tmp_path)

    aucs = _aucs(whole)
    assert set(aucs) == {"seen", "new"}
    assert all(0.7 < found < best for auc, grouped, best in aucs.values() for found in (auc, grouped))
    assert _aucs(resumed) == aucs
    assert "checkpoint-80 are in" in predicted.stdout
    with (tmp_path / "parted/predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1000
    assert min(int(row["user"]) for row in rows) == 150  # the first of the new users
    assert all(0 < float(row["probability"]) < 1 for row in rows)


@pytest.mark.processes
def test_tiny_language_model_learns_the_same_on_one_rank_and_on_two(tmp_path):
    args = ["--size", 150, "--num-epochs", 1]
    alone = run_example("tiny_language_model", *args, "--batch-size", 8, folder=tmp_path)
    together = run_example("tiny_language_model", *args, "--batch-size", 4, folder=tmp_path, ranks=2)
    losses, losses_together = _eval_losses(alone), _eval_losses(together)
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)  # it knows nothing yet
    assert losses[-1] < losses[0] - 1
    # The mean over the rows is that of means over batches, which are other batches on two ranks.
    assert losses_together == pytest.approx(losses, abs=0.02)


@in_release  # a page drives runs, too
def test_drive_runs_keeps_the_best_of_its_rounds_with_a_crash_a_nan_and_a_hang(tmp_path):
    arguments = ["--num-updates", 40, "--folder", "driven", "--seconds-to-update", 15]
    output = run_example("drive_runs", *arguments, folder=tmp_path)
    rounds = json.loads((tmp_path / "driven" / "rounds.json").read_text())
    endings = {each["number"]: each["ending"] for each in rounds}
    assert list(endings) == list(range(1, 21))
    wrong = {number: ending for number, ending in endings.items() if ending != "finished"}
    assert wrong == {6: "failed", 11: "failed", 16: "hung"}
    results = {number: json.loads((tmp_path / f"driven/{number:02}/result.json").read_text()) for number in endings}
    assert results[6]["error"]["type"] == "IndexError"
    assert "A label is out of range" in results[6]["error"]["notes"][0]
    assert results[11]["error"]["type"] == "NonFiniteLossError"
    assert [alert["kind"] for alert in results[11]["alerts"]] == ["non-finite loss"]
    assert (results[16]["status"], results[16]["updates"]) == ("running", 0)
    assert not any(psutil.pid_exists(result["pid"]) for result in results.values())

    kept = [each for each in rounds if each["is_kept"]]
    values = [results[each["number"]]["best"]["value"] for each in kept]
    assert values == sorted(values)
    assert values[-1] == max(results[number]["best"]["value"] for number in endings if endings[number] == "finished")
    assert f"Kept: {kept[-1]['settings']}\n" in output.stdout
    assert Path(_match(r"^Model: (.+)$", output.stdout)).is_file()


def test_digits_to_drive_stops_in_time_and_says_so(tmp_path):
    settings = json.dumps({"seconds_per_row": 0.001})
    run_example("digits_to_drive", settings, "--max-duration", 0.1, "--folder", ".", folder=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("stopped", "`max_duration` (0.1) is over.")
    assert result["updates"] > 1
    assert result["best"] is None  # it had no time for an evaluation


@pytest.mark.processes
def test_ray_train_learns_and_its_checkpoint_is_a_training_state(tmp_path):
    pytest.importorskip("ray")
    output = run_script(EXAMPLES / "ray_train.py", "--num-epochs", 3, cwd=tmp_path, env={"RAY_worker_niceness": "0"})
    accuracy = _number(r"^Epoch 3: accuracy ([\d.]+)%", output.stdout)
    assert accuracy > 80
    assert _number(r"^Loaded from Ray's checkpoint: (\d+) of 297", output.stdout) == round(2.97 * accuracy)


@pytest.fixture
def train_digits(monkeypatch) -> ModuleType:
    return _import_example("train_digits", monkeypatch)


def _import_example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(name)


def _recognised_by(train_digits: Any, checkpoint: Path, *, seed: int) -> int:
    """How many held-out digits a saved model recognises, without a trainer."""
    set_seed(seed)
    _, _, held_out = train_digits.load_datasets()
    model = train_digits.DigitsNet().eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model_state_dict"])
    with torch.no_grad():
        predictions = model(torch.stack([image for image, _ in held_out])).argmax(dim=1)
    return int((predictions == torch.tensor([label for _, label in held_out])).sum())


def _changed(parameters: dict[str, torch.Tensor], checkpoint: Path) -> set[str]:
    """The names of those `parameters` that are different in a checkpoint."""
    saved = torch.load(checkpoint, weights_only=True)["model_state_dict"]
    return {name for name, parameter in parameters.items() if not torch.equal(saved[name], parameter)}


def _table(output: Output) -> list[dict[str, str]]:
    """The rows of the epoch tables, without the stars of new best values."""
    rows, names = [], []
    for line in output.stdout.splitlines():
        cells = [cell.removesuffix("*") for cell in line.split()]
        if cells[:1] == ["epoch"]:
            names = cells
        elif names and cells and cells[0].isdigit() and len(cells) == len(names):
            rows.append(dict(zip(names, cells, strict=True)))
    return rows


def _aucs(output: Output) -> dict[str, list[float]]:
    """AUC, grouped AUC and the best possible AUC of each evaluation set, as the last table shows them."""
    rows = re.findall(r"^ +(seen|new) +[\d.]+% +[\d.]+ +([\d.]+) +([\d.]+) +([\d.]+)$", output.stdout, re.MULTILINE)
    return {name: [float(figure) for figure in figures] for name, *figures in rows}


def _eval_losses(output: Output) -> list[float]:
    return [float(loss) for loss in re.findall(r"^ +\d+ +\d+ +([\d.]+) +[\d.]+$", output.stdout, re.MULTILINE)]


def _match(pattern: str, text: str) -> str:
    match = re.search(pattern, text, flags=re.MULTILINE)
    assert match is not None, f"nothing matches {pattern!r} in:\n{text}"
    return match[1]


def _number(pattern: str, text: str) -> float:
    return float(_match(pattern, text))
