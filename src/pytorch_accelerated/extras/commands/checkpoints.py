"""The commands that inspect and clean up training states."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pytorch_accelerated.data import LeftOut
from pytorch_accelerated.errors import CheckpointError, ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.extras.commands.command import Outcome, add_command, print_line, print_table
from pytorch_accelerated.record.text import format_bytes, printable
from pytorch_accelerated.states import (
    Retention,
    judged_states,
    layout,
    part_names,
    read_metric_records,
    read_state,
    save_portable,
    verify,
)
from pytorch_accelerated.states.publish import remove_state
from pytorch_accelerated.tracking import greater_is_better, role_and_quantity

_SHOWN_CHARACTERS = 100


def add_to(topics: Any) -> None:
    """Add ``checkpoints`` and its commands to the topics of the command line."""
    parser = topics.add_parser("checkpoints", help="inspect and clean up folders of training states")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], Outcome], help: str) -> argparse.ArgumentParser:
        command = add_command(commands, name, run, help)
        command.add_argument("folder", type=Path, metavar="FOLDER", help="a training state, or a folder of several")
        return command

    add("list", _list, "list the training states, oldest first")
    add("verify", _verify, "read every byte and name each damaged file; exits with 0 only if there is none")
    add("show", _show, "show the contents of a training state, or of the newest of several")
    prune = add("prune", _prune, "delete training states, except those that any rule keeps, and the newest valid one")
    prune.add_argument("--keep-last", type=int, required=True, metavar="N", help="keep the N newest")
    prune.add_argument("--keep-best", type=int, metavar="K", help="keep the K with the best values of --metric")
    prune.add_argument("--metric", metavar="NAME", help="a name in the run history, such as eval_loss_epoch")
    known = "the greatest values of --metric are the best, as for a name such as eval_accuracy"
    prune.add_argument("--greater-is-better", action="store_true", help=known)
    prune.add_argument("--yes", action="store_true", help="delete without asking")
    average = add("average", _average, "write the mean of the weights of the newest training states to a file")
    average.add_argument("--last", type=int, default=5, metavar="N", help="of how many; default: 5")
    average.add_argument("--output", type=Path, default=Path("average.pt"), metavar="FILE", help="the file to write")


class _Found(NamedTuple):
    """A training state found on disk. If its manifest cannot be read, that is empty, and `complaint` says why."""

    folder: Path
    manifest: layout.Manifest = layout.Manifest(-1, {}, ())
    complaint: str = ""

    @property
    def seconds(self) -> float:
        """When its manifest was written, which is the last step of a save: seconds since 1970."""
        path = self.folder / layout.MANIFEST_NAME
        return (path if path.is_file() else self.folder).lstat().st_mtime

    @property
    def saved(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seconds))

    @property
    def size(self) -> str:
        return "?" if self.complaint else format_bytes(_bytes(self.manifest.files))

    def fact(self, name: str) -> str:
        """One of its facts as one line of limited length; ``?`` if unknown.

        Of the epochs, the finished ones, with the part of the current one where that is known.
        """
        facts = self.manifest.facts
        value, rows = facts.get(name, "?"), (facts.get("data", {}).get("train") or {}).get("rows")
        text = ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)
        if name == "left_out":
            text = "; ".join(str(LeftOut(**one)) for one in value)
        if name == "branch_of":
            text = "; ".join(f"{one['trunk']} after update {one['update']}" for one in reversed(value))
        if name == "epochs" and rows and "samples_in_epoch" in facts:
            text = f"{value + facts['samples_in_epoch'] % rows / rows:.2f}".removesuffix(".00")
        shown = printable(text)
        return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."

    def values(self, **more: Any) -> dict[str, Any]:
        """What programs get to know of it, and `more`."""
        size_bytes = None if self.complaint else _bytes(self.manifest.files)
        values = {"name": self.folder.name, "path": self.folder, "saved": self.seconds, "size_bytes": size_bytes}
        return {**values, **{name: self.manifest.facts.get(name) for name in ("updates", "epochs", "ranks")}, **more}


def _bytes(files: Iterable[layout.FileEntry]) -> int:
    return sum(entry.size_bytes for entry in files)


def _states_in(place: Path, *, at_least_one: bool = True) -> list[_Found]:
    """The training state at `place`, or all states in it: first those that cannot be read, then the others by age."""
    states, at_least_one = [], at_least_one or not place.is_dir()
    for folder in [place] if verify.looks_like_state(place) else verify.state_folders(place):
        try:
            states.append(_Found(folder, verify.read_manifest(folder)))
        except InvalidCheckpointError as error:
            states.append(_Found(folder, complaint=str(error)))
    states = [one for one in states if layout.PREDICTIONS_FORMAT not in one.manifest.facts]
    if at_least_one and not states:
        raise CheckpointError(f"There is no training state in {str(place)!r}. Check the path.")
    return sorted(states, key=lambda one: one.manifest.serial)


def _list(options: argparse.Namespace) -> Outcome:
    states = _states_in(options.folder, at_least_one=False)
    outcome = Outcome({"states": [one.values(complaint=one.complaint or None) for one in states]})
    if not states:
        print_line(f"No training states in {options.folder}.")
        return outcome
    rows = [
        (one.folder.name, one.saved, one.fact("updates"), one.fact("epochs"), one.fact("ranks"), one.size)
        + ("damaged" if one.complaint else "ok",)
        for one in states
    ]
    numbers = ("updates", "epochs", "ranks", "size")
    print_table(("name", "saved", *numbers, "manifest"), rows, numbers=numbers)
    return outcome


def _verify(options: argparse.Namespace) -> Outcome:
    states = _states_in(options.folder)
    found = []
    for one in states:
        complaints = [one.complaint] if one.complaint else verify.find_damage(one.folder, one.manifest)
        found.append({"name": one.folder.name, "path": one.folder, "complaints": complaints})
        print_line(f"{'damaged' if complaints else 'ok':<7}  {one.folder.name}")
        for complaint in complaints:
            print_line(f"         {complaint}")
    number_valid = sum(not each["complaints"] for each in found)
    print_line(f"{number_valid} of {len(states)} valid")
    return Outcome({"states": found, "valid": number_valid}, exit_code=int(number_valid < len(states)))


def _show(options: argparse.Namespace) -> Outcome:
    """Show the newest state. Checksums of files are not compared."""
    state = _states_in(options.folder)[-1]
    folder, manifest = state.folder, state.manifest
    if state.complaint:
        raise InvalidCheckpointError(state.complaint)
    facts = [("saved", state.saved), ("size", f"{state.size} in {len(manifest.files)} files")]
    facts += [(str(name), state.fact(name)) for name, value in manifest.facts.items() if value != {}]
    names = part_names(manifest)
    sizes = {name: [one for one in manifest.files if one.name.rpartition(".")[0] == name] for name in names}
    files_by_part = [(name, f"{name}.safetensors", files) for name, files in sizes.items()]
    shards = filter(lambda entry: layout.SHARDS_FILE.fullmatch(entry.name), manifest.files)
    files_by_part += [(f"pieces in {entry.name}", entry.name, [entry]) for entry in shards]
    parts = [(name, len(verify.tensors_of_file(folder / file)), _bytes(files)) for name, file, files in files_by_part]
    latest = {record.name: record for record in read_metric_records(folder)} if "run" in names else {}
    metrics = [(record.name, repr(record.value), str(record.epoch), str(record.update)) for record in latest.values()]
    print_line(str(folder))
    print_line()
    print_table(("fact", "value"), facts)
    print_line()
    rows = [(name, str(tensors), format_bytes(size)) for name, tensors, size in parts]
    print_table(("part", "tensors", "size"), rows, numbers=("tensors", "size"))
    if metrics:
        print_line()
        print_table(("metric", "last value", "epoch", "update"), metrics, numbers=("epoch", "update"))
    values = [dict(zip(("name", "tensors", "size_bytes"), part, strict=True)) for part in parts]
    last_values = [record._asdict() for record in latest.values()]
    return Outcome(state.values(facts=manifest.facts, parts=values, metrics=last_values))


def _average(options: argparse.Namespace) -> Outcome:
    """Write a file for `Trainer.load_checkpoint`. Integers come from the newest state."""
    found = [one for one in _states_in(options.folder) if not one.complaint and "updates" in one.manifest.facts]
    by_update = {one.manifest.facts["updates"]: one for one in found}  # the last epoch is often saved as `final`, too
    states = list(by_update.values())[-options.last :] if options.last > 0 else []
    if len(states) < 2:
        raise CheckpointError(
            f"Averaging takes two training states or more; {str(options.folder)!r} has {len(states)}. Save some with "
            "SaveTrainingStateCallback(..., save_every_n_epochs=1)."
        )
    sums: dict[str, torch.Tensor] = {}
    newest: dict[str, torch.Tensor] = {}
    for one in states:
        newest = read_state(one.folder, ["model"])[1]["model"]
        for name, value in newest.items():
            if value.is_floating_point():
                sums[name] = sums.get(name, torch.zeros_like(value, dtype=torch.float64)) + value
    means = {name: (total / len(states)).to(newest[name].dtype) for name, total in sums.items()}
    save_portable(options.output, {"model_state_dict": {**newest, **means}})
    names = [one.folder.name for one in states]
    print_line(f"Wrote the mean of {', '.join(names)} to {options.output}")
    return Outcome({"output": options.output, "states": names})


def _prune(options: argparse.Namespace) -> Outcome:
    """Delete all *valid* states that the rules do not keep. Damaged ones, and those that no run has saved, stay."""
    place, metric = options.folder, options.metric
    if (options.keep_best is None) != (metric is None):
        raise ConfigurationError("Give --keep-best and --metric together: which states are best depends on the metric.")
    greater = options.greater_is_better or bool(greater_is_better(role_and_quantity(metric or "")[1]))
    retention = Retention(last=options.keep_last, best=options.keep_best, greater_is_better=greater)
    states = _states_in(place, at_least_one=False)
    if verify.looks_like_state(place):
        raise CheckpointError(f"{str(place)!r} is one training state. Give the folder that holds the states.")
    # States to keep must be valid, or they would take the place of valid ones.
    saved = [(one.folder, one.manifest) for one in states if "updates" in one.manifest.facts]
    complete = [one for one in saved if not verify.find_damage(*one)]
    values = judged_states(complete, metric_name=metric)
    if metric is not None and values and all(value is None for value in values.values()):
        known = ", ".join(sorted({record.name for record in read_metric_records(complete[-1][0])})) or "none"
        raise CheckpointError(
            f"No state in {str(place)!r} has a value of {metric!r} for its own model. Metrics there: {known}."
        )
    doomed = retention.states_to_delete(values)
    verdicts = {
        one.folder: "delete" if one.folder in doomed else "keep" if one.folder in values else "left alone"
        for one in states
    }
    size_bytes = _bytes(entry for folder, manifest in complete if folder in doomed for entry in manifest.files)
    shown = [one.values(verdict=verdicts[one.folder]) for one in states]
    outcome = Outcome({"states": shown, "deleted": len(doomed), "deleted_bytes": size_bytes})
    rows = [(one.folder.name, one.saved, one.fact("updates"), one.size, verdicts[one.folder]) for one in states]
    print_table(("name", "saved", "updates", "size", "verdict"), rows, numbers=("updates", "size"))
    if not doomed:
        print_line("Nothing to delete.")
        return outcome
    what = f"{len(doomed)} of {len(states)} training states, {format_bytes(size_bytes)}"
    if not (options.yes or _agrees_to(f"Delete {what}?", may_ask=not options.json)):
        print_line("Nothing was deleted.")
        return Outcome({}, exit_code=1)
    for folder in doomed:
        remove_state(folder)
    print_line(f"Deleted {what}.")
    return outcome


def _agrees_to(question: str, *, may_ask: bool) -> bool:
    try:
        if may_ask:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print(file=sys.stderr)
    raise ConfigurationError(f"{question} There is nobody to answer that. Pass --yes to delete without asking.")
