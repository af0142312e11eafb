"""``python -m pytorch_accelerated checkpoints``, as somebody in front of a terminal, or a script, uses it."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.saved_runs import files_below
from tests.checkpointing.writing import write_state
from tests.support.tool import run_tool

LOSSES = [0.5, 0.1, 0.4, 0.2, 0.3]  # of step_1, step_2, ...


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """Five states of 10 updates each, and other things."""
    folder = tmp_path / "states"
    for number, loss in enumerate(LOSSES, start=1):
        save(folder / f"step_{number}", 10 * number, loss)
    write_state(folder / "predictions", {"predictions_format": 1, "rows": 0}, {})
    (folder / "notes.txt").write_text("mine")
    return folder


def save(folder: Path, updates: int, loss: float) -> None:
    records = [["train_loss", 9.0, 1, 1], ["loss", 7.0, 1, 1], ["loss", loss, updates // 10, updates]]
    records.append(["accuracy", loss, updates // 10, updates])
    history = {"records": records, "updates_done": updates, "current_epoch": updates // 10}
    history |= {"read_positions": {}, "metric_name_prefix": ""}
    facts = {"updates": updates, "epochs": updates // 10, "ranks": 2, "versions": {"torch": "2.13", "python": "3.11"}}
    write_state(folder, facts, {"model": {"a": torch.ones(5), "b": torch.ones(1)}, "run": {"history": history}})


def run(command: str, *arguments: object) -> int:
    return run_tool("checkpoints", command, *arguments)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """The lines printed since the last call."""
    return lambda: capsys.readouterr().out.splitlines()


def words(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


# list


def test_states_are_listed_from_old_to_new(states, told):
    save(states / "step_2", 20, 0.1)  # again
    assert run("list", states) == 0
    header, *rows = words(told())
    assert header == ["name", "saved", "updates", "epochs", "ranks", "size", "manifest"]
    assert [row[0] for row in rows] == ["step_1", "step_3", "step_4", "step_5", "step_2"]
    size = sum(path.stat().st_size for path in (states / "step_2").iterdir() if path.name != "manifest.json")
    name, _, _, updates, epochs, ranks, *size_told, manifest = rows[-1]
    assert (name, updates, epochs, ranks, size_told, manifest) == ("step_2", "20", "2", "2", [str(size), "B"], "ok")


# verify


def test_epochs_count_the_part_of_the_current_one(tmp_path, told):
    facts = {"updates": 5, "epochs": 2, "ranks": 1, "data": {"train": {"rows": 8}}}
    for name, samples in {"a": 0, "b": 6, "c": 8}.items():
        write_state(tmp_path / name, {**facts, "samples_in_epoch": samples}, {"model": {}})
    write_state(tmp_path / "d", {**facts, "samples_in_epoch": 3, "data": {}}, {"model": {}})  # a stream
    assert run("list", tmp_path) == 0
    assert [line[4] for line in words(told())[1:]] == ["2", "2.75", "2", "2"]


def test_weights_of_a_model_are_no_damaged_state(states, told):
    weights = next(states.glob("*/model.safetensors"))
    for folder in (states / "weights", states):  # as a script leaves them beside its states
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(weights.read_bytes())
    assert run("verify", states) == 0
    assert "damaged" not in " ".join(told())
    assert run("verify", states / "weights") != 0


def test_every_damaged_file_is_named(states, told, asked):
    assert asked("verify", states)["valid"] == 5
    (states / "step_2" / "model.json").write_text("{}")
    (states / "step_2" / "run.safetensors").unlink()
    (states / "step_4" / "manifest.json").write_text("{")
    assert run("verify", states) == 1
    lines = told()
    assert [line.split()[1] for line in lines if line.startswith("damaged")] == ["step_4", "step_2"]
    found = asked("verify", states, code=1)
    complaints = {each["name"]: "\n".join(each["complaints"]) for each in found["states"] if each["complaints"]}
    for file in ("step_2/model.json", "step_2/run.safetensors", "step_4/manifest.json"):
        assert sum(str(states / file) in line for line in lines) == 1
        assert complaints[Path(file).parent.name].count(str(states / file)) == 1
    assert (lines[-1], found["valid"], len(complaints)) == ("3 of 5 valid", 3, 2)
    assert run("list", states) == 0
    assert [row[0] for row in words(told()) if row[-1] == "damaged"] == ["step_4"]
    assert run("verify", states / "step_2") == 1
    assert run("verify", states / "step_1") == 0


# show


def test_the_newest_state_is_shown_with_its_facts_parts_and_last_metrics(states, told):
    assert run("show", states) == 0
    lines = told()
    assert lines[0] == str(states / "step_5")
    rows = words(lines)
    assert ["updates", "50"] in rows
    assert ["versions", "torch", "2.13,", "python", "3.11"] in rows
    sizes = {
        name: sum(path.stat().st_size for path in (states / "step_5").glob(f"{name}.*")) for name in ("model", "run")
    }
    assert ["model", "2", str(sizes["model"]), "B"] in rows
    assert ["run", "0", str(sizes["run"]), "B"] in rows
    assert ["train_loss", "9.0", "1", "1"] in rows
    assert ["loss", "0.3", "5", "50"] in rows
    assert run("show", states / "step_2") == 0
    assert ["loss", "0.1", "2", "20"] in words(told())


# prune


def left(states: Path) -> set[str]:
    return {path.name for path in states.iterdir()} - {"notes.txt", "predictions"}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (["--keep-last", 2], {4, 5}),
        (["--keep-last", 1, "--keep-best", 2, "--metric", "loss"], {2, 4, 5}),
        (["--keep-last", 1, "--keep-best", 1, "--metric", "loss", "--greater-is-better"], {1, 5}),
        (["--keep-last", 1, "--keep-best", 1, "--metric", "accuracy"], {1, 5}),
        (["--keep-last", 9], {1, 2, 3, 4, 5}),
    ],
)
def test_states_held_by_a_rule_are_kept_and_the_rest_deleted(rules, expected, states, told):
    assert run("prune", states, *rules, "--yes") == 0
    assert left(states) == {f"step_{number}" for number in expected}
    assert (states / "notes.txt").read_text() == "mine"
    assert run("verify", states / "step_5") == 0
    assert (states / "predictions" / "manifest.json").is_file()


@pytest.mark.parametrize(("answer", "code", "expected"), [("y", 0, 1), ("yes", 0, 1), ("", 1, 5), ("n", 1, 5)])
def test_prune_shows_what_would_go_and_asks(answer, code, expected, states, told, monkeypatch):
    asked: list[str] = []

    def reply(question: str) -> str:
        asked.append(question)
        return str(answer)

    monkeypatch.setattr("builtins.input", reply)
    assert run("prune", states, "--keep-last", 1) == code
    assert len(left(states)) == expected
    rows = words(told())
    verdicts = {row[0]: row[-1] for row in rows if row[0].startswith("step_")}
    assert verdicts == {"step_5": "keep", **{f"step_{number}": "delete" for number in range(1, 5)}}
    assert len(asked) == 1
    assert asked[0].startswith("Delete 4 of 5 training states, ")


def test_damaged_states_count_for_no_rule_and_are_left_alone(states, told):
    """Else the damaged newest would be kept in place of the newest valid one."""
    (states / "step_5" / "model.safetensors").write_bytes(b"x")
    (states / "step_3" / "manifest.json").write_text("{")
    assert run("prune", states, "--keep-last", 1, "--keep-best", 1, "--metric", "loss", "--yes") == 0
    assert left(states) == {"step_2", "step_3", "step_4", "step_5"}
    verdicts = {row[0]: row[4:] for row in words(told())}
    assert "alone" in verdicts["step_5"]
    assert "alone" in verdicts["step_3"]


# For programs.


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Any:
    """The object that a command prints with ``--json``, and nothing else."""

    def ask(command: str, *arguments: object, code: int = 0) -> Any:
        assert run(command, *arguments, "--json") == code
        printed = capsys.readouterr()
        assert printed.err == ""
        found = json.loads(printed.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert (found.pop("format"), found.pop("command")) == (1, f"checkpoints {command}")
        return found

    return ask


def size_of(state: Path) -> int:
    return sum(path.stat().st_size for path in state.iterdir() if path.name != "manifest.json")


def test_states_are_listed_for_programs(states, asked):
    (states / "step_3" / "manifest.json").write_text("{")
    damaged, first, *_, last = asked("list", states)["states"]
    saved = (states / "step_1" / "manifest.json").stat().st_mtime
    values = {"updates": 10, "epochs": 1, "ranks": 2, "complaint": None}
    path = states / "step_1"
    assert first == {"name": "step_1", "path": str(path), "saved": saved, "size_bytes": size_of(path), **values}
    assert last["name"] == "step_5"
    assert (damaged["name"], damaged["size_bytes"], damaged["updates"]) == ("step_3", None, None)
    assert "manifest.json is not JSON" in damaged["complaint"]
    assert asked("list", states.parent) == {"states": []}


def test_a_state_is_shown_for_programs(tmp_path, asked):
    save(tmp_path / "step_1", 10, float("nan"))
    found = asked("show", tmp_path)
    assert (found["name"], found["updates"], found["size_bytes"]) == ("step_1", 10, size_of(tmp_path / "step_1"))
    assert found["facts"]["versions"] == {"torch": "2.13", "python": "3.11"}
    assert [(part["name"], part["tensors"]) for part in found["parts"]] == [("model", 2), ("run", 0)]
    assert sum(part["size_bytes"] for part in found["parts"]) == found["size_bytes"]
    assert {"name": "loss", "value": "nan", "epoch": 1, "update": 10} in found["metrics"]


def test_states_are_deleted_for_programs_that_say_yes(states, asked):
    error = asked("prune", states, "--keep-last", 2, code=2)["error"]
    assert error["type"] == "ConfigurationError"
    assert error["message"].startswith("Delete 3 of 5 training states, ")
    assert error["message"].endswith("? There is nobody to answer that. Pass --yes to delete without asking.")
    assert len(left(states)) == 5
    freed = sum(size_of(states / f"step_{number}") for number in (1, 2, 3))
    found = asked("prune", states, "--keep-last", 2, "--yes")
    assert [each["verdict"] for each in found["states"]] == ["delete"] * 3 + ["keep"] * 2
    assert (found["deleted"], found["deleted_bytes"]) == (3, freed)
    assert left(states) == {"step_4", "step_5"}


def test_states_are_averaged_for_programs(states, tmp_path, asked):
    output = tmp_path / "mean.pt"
    found = asked("average", states, "--last", 2, "--output", output)
    assert found == {"output": str(output), "states": ["step_4", "step_5"]}
    assert output.is_file()


# Mistakes.

MISTAKES: dict[str, tuple[list[str], str]] = {
    "a missing folder": (["list", "{}/nowhere"], "There is no training state in '{}/nowhere'. Check the path."),
    "a file": (["verify", "{}/notes.txt"], "There is no training state in '{}/notes.txt'. Check the path."),
    "nothing to verify": (["verify", "{}/empty"], "There is no training state in '{}/empty'."),
    "nothing to show": (["show", "{}/empty"], "There is no training state in '{}/empty'."),
    "a state that cannot be read": (["show", "{}/broken"], "manifest.json is not JSON"),
    "none kept": (["prune", "{}", "--keep-last", "0"], "So few states cannot be kept: last=0."),
    "the best of what": (["prune", "{}", "--keep-last", "1", "--keep-best", "1"], "--keep-best and --metric together"),
    "a misspelt metric": (
        ["prune", "{}", "--keep-last", "1", "--keep-best", "1", "--metric", "lost", "--yes"],
        "has a value of 'lost' for its own model. Metrics there: accuracy, loss, train_loss.",
    ),
    "a state to prune": (["prune", "{}/step_1", "--keep-last", "1"], "Give the folder that holds the states."),
    "nobody to ask": (["prune", "{}", "--keep-last", "1"], "Pass --yes to delete without asking."),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_an_error_in_one_line(arguments, message, states, capsys, monkeypatch):
    (states / "empty").mkdir()
    (states / "broken").mkdir()
    (states / "broken" / "manifest.json").write_text("{")
    before = files_below(states)

    def no_answer(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", no_answer)
    assert run(arguments[0], *(argument.format(states) for argument in arguments[1:])) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("error: ")
    assert message.format(states) in line
    assert run(arguments[0], *(argument.format(states) for argument in arguments[1:]), "--json") == 2
    printed = capsys.readouterr()
    assert printed.err == ""
    assert message.format(states) in json.loads(printed.out)["error"]["message"]
    assert files_below(states) == before


# How it looks.


def test_names_and_facts_cannot_move_the_cursor(states, told):
    write_state(states / "step\x1b[2J", {"updates": 60, "note\x1b[31m": "\x1b]0;title\x07" + "x" * 1000}, {"a": 1})
    for command in ("list", "verify", "show"):
        run(command, states)
    text = "\n".join(told())
    assert "\x1b" not in text
    assert "step\\x1b[2J" in text
    assert "note\\x1b[31m" in text
    assert max(map(len, text.splitlines())) < 300


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_names_that_the_screen_lacks_are_escaped(encoding, tmp_path, monkeypatch):
    save(tmp_path / "模型" / "точность", 10, 1.0)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    monkeypatch.setattr("builtins.input", lambda: "n")
    folder = tmp_path / "模型"
    assert [run(command, folder) for command in ("list", "verify", "show")] == [0, 0, 0]
    assert run("prune", folder, "--keep-last", 1) == 0
    assert run_tool("compare", folder / "точность", "--output", tmp_path / "模型.html") == 0
    assert run("list", tmp_path / "нет") == 2
    printed, errors = (stream.buffer.getvalue().decode(encoding) for stream in (sys.stdout, sys.stderr))  # type: ignore[union-attr]
    assert printed.count(r"\u0442\u043e\u0447\u043d") == 4
    assert r"Comparison: " in printed
    assert r"\u6a21\u578b.html" in printed
    assert r"\u043d\u0435\u0442" in errors
