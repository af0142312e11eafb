"""``python -m pytorch_accelerated``: the command line, which inspects and cleans up training states and compares runs.

Folders may be damaged or come from others, so their contents are displayed, but never trusted or executed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pytorch_accelerated.checkpointing.layout import (
    MANIFEST_NAME,
    PREDICTIONS_FORMAT,
    SHARDS_FILE,
    FileEntry,
    Manifest,
)
from pytorch_accelerated.checkpointing.policy import Retention, judged_states, read_metric_records
from pytorch_accelerated.checkpointing.portable import save_portable
from pytorch_accelerated.checkpointing.publish import remove_state
from pytorch_accelerated.checkpointing.state_folder import part_names, read_state
from pytorch_accelerated.checkpointing.verify import (
    find_damage,
    looks_like_state,
    read_manifest,
    state_folders,
    tensors_of_file,
)
from pytorch_accelerated.errors import (
    CheckpointError,
    ConfigurationError,
    InvalidCheckpointError,
    PytorchAcceleratedError,
)
from pytorch_accelerated.progress.text import aligned, encodable, format_bytes, printable, show

_SHOWN_CHARACTERS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 0 for success, 1 for a negative result, 2 for an error."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PytorchAcceleratedError, OSError) as error:
        show(printable(f"error: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytorch_accelerated", description="Tools for training runs.")
    topics = parser.add_subparsers(metavar="TOPIC", required=True)
    checkpoints = topics.add_parser("checkpoints", help="inspect and clean up folders of training states")
    commands = checkpoints.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        command.add_argument("folder", type=Path, metavar="FOLDER", help="a training state, or a folder of several")
        command.set_defaults(run=run)
        return command

    add("list", _list, "list the training states, oldest first")
    add("verify", _verify, "read every byte and name each damaged file; exits with 0 only if there is none")
    add("show", _show, "show the contents of a training state, or of the newest of several")
    prune = add("prune", _prune, "delete training states, except those that any rule keeps, and the newest valid one")
    prune.add_argument("--keep-last", type=int, required=True, metavar="N", help="keep the N newest")
    prune.add_argument("--keep-best", type=int, metavar="K", help="keep the K with the best values of --metric")
    prune.add_argument("--metric", metavar="NAME", help="a name in the run history, such as eval_loss_epoch")
    prune.add_argument("--greater-is-better", action="store_true", help="the greatest values of --metric are the best")
    prune.add_argument("--yes", action="store_true", help="delete without asking")
    average = add("average", _average, "write the mean of the weights of the newest training states to a file")
    average.add_argument("--last", type=int, default=5, metavar="N", help="of how many; default: 5")
    average.add_argument("--output", type=Path, default=Path("average.pt"), metavar="FILE", help="the file to write")
    help = "write a page that shows runs side by side, the best first: curves, best values, and differing settings"
    compare = topics.add_parser("compare", help=help, description=f"W{help[1:]}.")
    compare.set_defaults(run=_compare)
    help_of_runs = "a page of ReportCallback, a folder of states, a Hugging Face output folder, or a folder of runs"
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=help_of_runs)
    compare.add_argument("--output", type=Path, default=Path("compare.html"), metavar="FILE", help="the page to write")
    return parser


class _Found(NamedTuple):
    """A training state found on disk. If its manifest cannot be read, that is empty, and `complaint` says why."""

    folder: Path
    manifest: Manifest = Manifest(-1, {}, ())
    complaint: str = ""

    @property
    def saved(self) -> str:
        """When its manifest was written, which is the last step of a save."""
        path = self.folder / MANIFEST_NAME
        seconds = (path if path.is_file() else self.folder).lstat().st_mtime
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

    @property
    def size(self) -> str:
        return "?" if self.complaint else _size(self.manifest.files)

    @property
    def epochs(self) -> str:
        """The finished epochs, with the part of the current one where that is known."""
        facts = self.manifest.facts
        rows = (facts.get("data", {}).get("train") or {}).get("rows")
        if not rows or "samples_in_epoch" not in facts:
            return self.fact("epochs")
        return f"{facts['epochs'] + facts['samples_in_epoch'] % rows / rows:.2f}".removesuffix(".00")

    def fact(self, name: str) -> str:
        """One of its facts as one line of limited length; ``?`` if unknown."""
        value = self.manifest.facts.get(name, "?")
        text = ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)
        shown = printable(text)
        return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."


def _print(text: str = "") -> None:
    """Print a line of text, which is never truncated. A closed pipe is an error, so that the command ends."""
    print(encodable(printable(text), sys.stdout), flush=True)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> None:
    """Print rows of text below a header; columns of `numbers` are right-aligned."""
    right = [place for place, title in enumerate(header) if title in numbers]
    for line in aligned([header, *([printable(cell) for cell in row] for row in rows)], right):
        _print(line)


def _size(files: Iterable[FileEntry]) -> str:
    return format_bytes(sum(entry.size_bytes for entry in files))


def _states_in(place: Path, *, at_least_one: bool = True) -> list[_Found]:
    """The training state at `place`, or all states in it: first those that cannot be read, then the others by age."""
    if not place.is_dir():
        raise CheckpointError(f"There is no folder {str(place)!r}.")
    states = []
    for folder in [place] if looks_like_state(place) else state_folders(place):
        try:
            states.append(_Found(folder, read_manifest(folder)))
        except InvalidCheckpointError as error:
            states.append(_Found(folder, complaint=str(error)))
    states = [one for one in states if PREDICTIONS_FORMAT not in one.manifest.facts]
    if at_least_one and not states:
        raise CheckpointError(f"There is no training state in {str(place)!r}.")
    return sorted(states, key=lambda one: one.manifest.serial)


def _list(options: argparse.Namespace) -> int:
    states = _states_in(options.folder, at_least_one=False)
    if not states:
        _print(f"No training states in {options.folder}.")
        return 0
    rows = [
        (one.folder.name, one.saved, one.fact("updates"), one.epochs, one.fact("ranks"), one.size)
        + ("damaged" if one.complaint else "ok",)
        for one in states
    ]
    numbers = ("updates", "epochs", "ranks", "size")
    _table(("name", "saved", *numbers, "manifest"), rows, numbers=numbers)
    return 0


def _verify(options: argparse.Namespace) -> int:
    states = _states_in(options.folder)
    number_damaged = 0
    for one in states:
        complaints = [one.complaint] if one.complaint else find_damage(one.folder, one.manifest)
        number_damaged += bool(complaints)
        _print(f"{'damaged' if complaints else 'ok':<7}  {one.folder.name}")
        for complaint in complaints:
            _print(f"         {complaint}")
    _print(f"{len(states) - number_damaged} of {len(states)} valid")
    return 1 if number_damaged else 0


def _show(options: argparse.Namespace) -> int:
    """Show the newest state. Checksums of files are not compared."""
    state = _states_in(options.folder)[-1]
    folder, manifest = state.folder, state.manifest
    if state.complaint:
        raise InvalidCheckpointError(state.complaint)
    facts = [("saved", state.saved), ("size", f"{state.size} in {len(manifest.files)} files")]
    facts += [
        (str(name), state.epochs if name == "epochs" else state.fact(name))
        for name, value in manifest.facts.items()
        if value != {}
    ]
    names = part_names(manifest)
    sizes = {name: [one for one in manifest.files if one.name.rpartition(".")[0] == name] for name in names}
    parts = [(name, f"{name}.safetensors", files) for name, files in sizes.items()]
    shards = filter(lambda entry: SHARDS_FILE.fullmatch(entry.name), manifest.files)
    parts += [(f"pieces in {entry.name}", entry.name, [entry]) for entry in shards]
    rows = [(name, str(len(tensors_of_file(folder / file))), _size(files)) for name, file, files in parts]
    latest = {record.name: record for record in read_metric_records(folder)} if "run" in names else {}
    metrics = [(record.name, repr(record.value), str(record.epoch), str(record.update)) for record in latest.values()]
    _print(str(folder))
    _print()
    _table(("fact", "value"), facts)
    _print()
    _table(("part", "tensors", "size"), rows, numbers=("tensors", "size"))
    if metrics:
        _print()
        _table(("metric", "last value", "epoch", "update"), metrics, numbers=("epoch", "update"))
    return 0


def _average(options: argparse.Namespace) -> int:
    """Write a file for `Trainer.load_checkpoint`. Integers are those of the newest state."""
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
    _print(f"Wrote the mean of {', '.join(one.folder.name for one in states)} to {options.output}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    """Delete all *valid* states that the rules do not keep. Damaged ones, and those that no run has saved, stay."""
    place, metric = options.folder, options.metric
    if (options.keep_best is None) != (metric is None):
        raise ConfigurationError("Give --keep-best and --metric together: which states are best depends on the metric.")
    retention = Retention(last=options.keep_last, best=options.keep_best, greater_is_better=options.greater_is_better)
    states = _states_in(place, at_least_one=False)
    if looks_like_state(place):
        raise CheckpointError(f"{str(place)!r} is one training state. Give the folder that holds the states.")
    # States to keep must be valid, or they would take the place of valid ones.
    saved = [(one.folder, one.manifest) for one in states if "updates" in one.manifest.facts]
    complete = [one for one in saved if not find_damage(*one)]
    values = judged_states(complete, metric_name=metric)
    if metric is not None and values and all(value is None for value in values.values()):
        known = ", ".join(sorted({record.name for record in read_metric_records(complete[-1][0])})) or "none"
        raise CheckpointError(
            f"No state in {str(place)!r} has a value of {metric!r} for its own model. Metrics there: {known}."
        )
    doomed = retention.states_to_delete(values)
    rows = [
        (one.folder.name, one.saved, one.fact("updates"), one.size)
        + ("delete" if one.folder in doomed else "keep" if one.folder in values else "left alone",)
        for one in states
    ]
    if not rows:
        _print("No training states here.")
        return 0
    _table(("name", "saved", "updates", "size", "verdict"), rows, numbers=("updates", "size"))
    if not doomed:
        _print("Nothing to delete.")
        return 0
    size = _size(entry for folder, manifest in complete if folder in doomed for entry in manifest.files)
    what = f"{len(doomed)} of {len(rows)} training states, {size}"
    if not (options.yes or _agrees_to(f"Delete {what}?")):
        _print("Nothing was deleted.")
        return 1
    for folder in doomed:
        remove_state(folder)
    _print(f"Deleted {what}.")
    return 0


def _agrees_to(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print(file=sys.stderr)
        raise ConfigurationError("There is no input to confirm it. Pass --yes to delete without asking.") from None


def _compare(options: argparse.Namespace) -> int:
    from pytorch_accelerated.report.reading import write_comparison

    write_comparison(options.runs, options.output)
    _print(f"Comparison: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
