"""Makes a run that has the past of another one, its trunk, up to an update, and continues from there with a change.

The branch begins with the state of the trunk after that update: its files are hard links, so they take no space, and
stay when the trunk deletes its own. Rows and masks are functions of seed, epoch and position, so both have them in
common, and differ by the change only.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    SaveTrainingStateCallback,
    StopAtCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import ConfigurationError, StopTrainingError
from pytorch_accelerated.extras.looking.rehearsal import refuse
from pytorch_accelerated.extras.proving.diff import MakeRun, first_difference, records_of, short_pair
from pytorch_accelerated.extras.proving.factory import make_run
from pytorch_accelerated.extras.proving.rewind import (
    Until,
    check_update,
    nearest_state,
    refuse_shorter,
    states_in,
    trained_again,
)
from pytorch_accelerated.extras.proving.trace import digest
from pytorch_accelerated.ranks import Optimizers, kept
from pytorch_accelerated.schedulers import StatefulSchedulerBase
from pytorch_accelerated.states import Encoded, chunks, disk, dump_json, encode, publish, read_state, verify
from pytorch_accelerated.states.layout import Manifest, hidden_sibling
from pytorch_accelerated.utils import read_run_history

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer
    from pytorch_accelerated.tracking import RunHistory

NOT_TAKEN_BY_BRANCH = ("resume_from", "must_resume", "reset_run_history")


def branch(
    trainer: Trainer,
    states: str | Path,
    update: int,
    into: str | Path,
    trunk: str | MakeRun,
    given: Mapping[str, Any],
) -> RunHistory:
    """The branch of `Trainer.branch`. Must be called by all ranks."""
    refuse(given, NOT_TAKEN_BY_BRANCH, by="branch")
    states, into, ranks = disk.resolved(states), disk.resolved(into), trainer.run_context.parts.ranks
    check_update(update)
    _refuse_other_folders(trainer, into)
    if not ranks.do_on_first(lambda: _is_continued(states, update, into)):
        _begin(trainer, given, trunk, states, update, into)
    return trainer.train(**{**given, "resume_from": into, "must_resume": True})


def _refuse_other_folders(trainer: Trainer, into: Path) -> None:
    savers = [each for each in trainer.callback_handler if isinstance(each, SaveTrainingStateCallback)]
    elsewhere = [str(each.save_dir) for each in savers if disk.resolved(each.folder) != into]
    if elsewhere:
        raise ConfigurationError(
            f"The trainer saves its states to {elsewhere[0]}, but a branch is resumed from its own folder, and must "
            f"not replace states of its trunk. Make the trainer with `SaveTrainingStateCallback({str(into)!r})`."
        )


def _is_continued(states: Path, update: int, into: Path) -> bool:
    """Whether `into` has this branch already: a command that is killed is given again as it stands."""
    found = states_in(into) if into.is_dir() else []
    origins = [(each["trunk"], each["update"]) for _, facts in found for each in facts.get("branch_of", [])[-1:]]
    if len(origins) < len(found) or any(each != (str(states), update) for each in origins):
        raise ConfigurationError(
            f"{into} has states of another run, not only of a branch of {states} after update {update}. Give the "
            "branch a folder of its own."
        )
    return bool(found)


def _begin(
    trainer: Trainer, given: Mapping[str, Any], make: str | MakeRun, states: Path, update: int, into: Path
) -> None:
    """Write the first state of a branch. Must be called by all ranks."""
    ranks, final = trainer.run_context.parts.ranks, into / f"branch_{update}"
    if trainer.run_context.asked.number:
        raise ConfigurationError(
            "This trainer has trained, so its settings may not be those that it was made with. Make it again."
        )
    with kept() as before_trunk:
        before_trunk.generators()  # from which its script may draw, or seed them
        trunk, arguments = make_run(make) if isinstance(make, str) else make()
    writing, others = _told_apart_by_path(trainer), {each.state_key for each in _told_apart_by_path(trunk)}
    if twice := [each.state_key for each in writing if each.state_key in others]:
        raise ConfigurationError(
            f"{twice[0]} of the trunk writes there, too. Give the callback of the branch another path."
        )
    source = nearest_state(trunk, states, update + 1)
    # A save in the same place deletes the hidden folder of a process that has died.
    scratch = Path(ranks.from_first(str(hidden_sibling(final, "partial"))))
    try:
        if source is None or verify.read_manifest(source).facts["updates"] < update:
            source = _saved_at(update, scratch / "state", trunk, arguments, source, states)
        manifest = ranks.do_on_first(lambda: verify.verify(source))
        position = ranks.do_on_first(lambda: read_state(source, ["run"])[1]["run"]["run_state"])
        left_out, runs = arguments.get("leave_out"), ((trunk, arguments), (trainer, given))
        before, after = (_found_at_start(*run, position, left_out) for run in runs)
        _refuse_other_rows(trainer, manifest.facts["seed"], before, after)
        names = {**before.words, **after.words}
        texts = {name: (before.words.get(name, "none"), after.words.get(name, "none")) for name in names}
        changed = {name: short_pair(*pair) for name, pair in texts.items() if pair[0] != pair[1]}
        origin = {"trunk": str(states), "update": update, "changed": changed}
        facts = {**manifest.facts, "branch_of": [*manifest.facts.get("branch_of", []), origin]}

        parts, manifest = _with_settings(source, before, after), dataclasses.replace(manifest, facts=facts)
        ranks.do_on_first(lambda: _publish(source, final, manifest, parts))
    finally:
        if ranks.is_first:
            shutil.rmtree(scratch, ignore_errors=True)
    trainer.print(f"Branch of {states} after update {update}. Changed from here on:{'' if changed else ' nothing'}")
    for name, (old, new) in changed.items():
        trainer.print(f"  {name}: {old} -> {new}")


def _told_apart_by_path(trainer: Trainer) -> list[Any]:
    return [each for each in trainer.callback_handler if each.is_told_apart_by_path]


class _Save(TrainerCallback):
    """Saves the state after an update; files of `writing` callbacks go next to it, once they have their states."""

    def __init__(self, update: int, folder: Path, writing: list[Any]) -> None:
        self._update, self._folder, self._writing = update, folder, writing

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        for number, each in enumerate(self._writing):
            name = next(name for name in ("save_path", "save_dir", "path") if hasattr(each, name))
            setattr(each, name, self._folder.parent / str(number) / Path(getattr(each, name)).name)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self._update:
            trainer.save_training_state(self._folder)


def _saved_at(update: int, folder: Path, trunk: Trainer, arguments: Any, source: Path | None, states: Path) -> Path:
    """A state of the trunk after an update after which it saved none.

    Callbacks that have a state take part also where they write, such as an average of weights, or end the run. Those
    that save states don't.
    """
    writing = [each for each in _told_apart_by_path(trunk) if not isinstance(each, SaveTrainingStateCallback)]
    left_out = [each for each in writing if hasattr(each, "load_state_dict") and not each.takes_part_in_preflight]
    ending = [each for each in trunk.callback_handler if isinstance(each, EarlyStoppingCallback | StopAtCallback)]
    watching = _Save(update, folder, left_out), *left_out, *ending
    with trained_again(trunk, arguments, source, *watching, until=update, rolls_back=bool(source)):
        refuse_shorter(trunk, update)
        trunk.run_context.parts.ranks.do_on_first(lambda: _refuse_other_past(states, trunk.run_history))
    return folder


def _refuse_other_past(states: Path, again: RunHistory) -> None:
    """Refuse what the trunk has become by training it again, if that isn't what it has recorded."""
    found = first_difference(records_of(read_run_history(states)), records_of(again), "step")
    if found is not None:
        raise ConfigurationError(
            f"The trunk has recorded {found.name} {found.a!r} for update {found.update}, and training it again gives "
            f"{found.b!r}. Its code, its data, or what it ran on (ranks, device, versions) has changed since, or it "
            "doesn't resume exactly. `diff` and `prove` say more. Branch after an update with a training state."
        )


class _AtStart(TrainerCallback):
    """Sees the settings that a run would have after some updates if nothing but its schedule changed them.

    Attributes:
        settings: of each group of the optimizer.
        schedule: the kind and the state of the scheduler.
        follows_metric: whether the schedule depends on a metric, so that its position isn't known.
        rows: the number of rows of an update.
        kinds: of the optimizers.
        words: what the run was given, by name.
    """

    def __init__(self, position: Mapping[str, Any], by_epoch: bool) -> None:
        self._epochs, self._steps = position["epochs"], position["updates"] - position["skipped_updates"]
        self._by_epoch = by_epoch

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        config, scheduler, model = trainer.run_config.to_dict(), trainer.scheduler, trainer.get_model()
        self.follows_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.rows = config.pop("train_total_batch_size")
        self._advance(trainer)
        self.settings = []  # one of its own: the contents of earlier ones are put back
        for group in trainer.run_context.parts.parameter_groups:
            plain = {name: value for name, value in group.items() if name != "params" and not callable(value)}
            self.settings.append(copy.deepcopy(plain))
        self.schedule = copy.deepcopy((type(scheduler).__name__, scheduler and scheduler.state_dict()))
        callbacks = [type(each).__name__ for each in trainer.callback_handler if not isinstance(each, _AtStart | Until)]
        optimizer = trainer.optimizer
        self.kinds = [type(each).__name__ for each in (optimizer if isinstance(optimizer, Optimizers) else [optimizer])]
        words = {"loss_func": trainer.loss_func, "callbacks": callbacks, "schedule": trainer.create_scheduler_fn}
        for path, each in model.named_modules():
            words[f"model.{path}"] = f"{type(each).__name__}({each.extra_repr()})"
        words |= {name: config[name] for name in config if name != "seed"}
        for number, group in enumerate(self.settings):
            words |= {f"{name} of group {number}": group[name] for name in group}
        self.words = {name: re.sub(r" at 0x[0-9a-f]+", "", str(each)) for name, each in words.items()}
        raise StopTrainingError("Its settings are known.")

    def _advance(self, trainer: Trainer) -> None:
        scheduler = trainer.scheduler
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*lr_scheduler.step.*", UserWarning)  # it misses the optimizer's steps
            if hasattr(scheduler, "step_update") and not isinstance(scheduler, StatefulSchedulerBase):  # timm's
                scheduler.step_update(num_updates=self._steps)
                scheduler.step(self._epochs)
                return
            for _ in range(self._epochs if self._by_epoch else self._steps):
                trainer.scheduler_step()


def _found_at_start(trainer: Trainer, arguments: Any, position: Mapping[str, Any], left_out: Any) -> _AtStart:
    found = _AtStart(position, by_epoch=arguments.get("step_scheduler") == "epoch")
    # What the branch alone leaves out makes the trunk's part of the run no shorter.
    with trained_again(trainer, {**arguments, "leave_out": left_out}, None, found, until=1):
        found.words["leave_out"] = str(arguments.get("leave_out"))
        return copy.copy(found)  # afterwards it is as before, too


def _refuse_other_rows(trainer: Trainer, seed: int, before: _AtStart, after: _AtStart) -> None:
    """Refuse what would change more than was asked for: branch and trunk would have no rows and masks in common."""
    given = trainer.run_context.asked.given.seed
    if given not in (None, seed):
        raise ConfigurationError(
            f"The trunk has seed {seed}, this trainer {given}: with other rows and dropout masks, the runs would "
            "differ by chance, and not by a change only. Give the trainer the seed of the trunk, or None."
        )
    if before.rows != after.rows:
        raise ConfigurationError(
            f"An update of the trunk has {before.rows} rows, one of this run {after.rows}: the same update would have "
            "other rows in both. Keep batch size times accumulation, or train from the beginning."
        )
    if len(before.settings) != len(after.settings):
        raise ConfigurationError(
            f"The trunk's optimizer has {len(before.settings)} groups of parameters, this one {len(after.settings)}: "
            "its state belongs to the groups. Make the same ones; their settings may differ."
        )
    if before.kinds != after.kinds:
        raise ConfigurationError(
            f"The trunk's optimizer is {', '.join(before.kinds)}, this one {', '.join(after.kinds)}: the state of one "
            "means nothing to the other. Keep the kind, or train from the beginning."
        )


def _with_settings(source: Path, before: _AtStart, after: _AtStart) -> dict[str, Encoded]:
    """The parts of a state with the settings of the branch, where they are not those that the trunk was given.

    What the trunk has changed by itself, such as a rate that a callback has set, it has changed for the branch, too.
    """
    parts: dict[str, Encoded] = {}
    pairs = enumerate(zip(before.settings, after.settings, strict=True))
    changed = [(at, name, new[name]) for at, (old, new) in pairs for name in new if _differs(old.get(name), new[name])]
    if changed:
        structure = json.loads((source / "optimizer.json").read_bytes())
        for at, name, value in changed:
            encoded = encode(value, path=name)
            if encoded.tensors:
                raise ConfigurationError(
                    f"{name} of the optimizer is a tensor, which can't be changed in a state. Set it in a callback, in "
                    "`on_training_run_start`."
                )
            structure["param_groups"][at][name] = encoded.structure
        parts["optimizer"] = Encoded(structure, {})
    if _differs(before.schedule, after.schedule):
        if before.follows_metric or after.follows_metric:
            raise ConfigurationError(
                "The schedule was changed, and a ReduceLROnPlateau follows a metric: where it would stand is not "
                "known. Change the rate instead, or the attributes of `trainer.scheduler` in a callback."
            )
        parts["scheduler"] = encode(after.schedule[1], path="scheduler")
    return parts


def _differs(one: Any, other: Any) -> bool:
    return digest([one]) != digest([other])


def _publish(source: Path, final: Path, manifest: Manifest, changed: Mapping[str, Encoded]) -> None:
    """Write a state that has the files of another one, except for what changed in it. For one rank."""
    staged = publish.begin(final)
    try:
        files: dict[str, Any] = {f"{name}.json": [dump_json(part.structure)] for name, part in changed.items()}
        files |= {f"{name}.safetensors": chunks(part.tensors) for name, part in changed.items() if name == "scheduler"}
        for name in {each.name for each in manifest.files} - files.keys():
            try:
                os.link(source / name, staged.staging / name)
            except OSError:  # the disk has no links, or it is another disk
                shutil.copyfile(source / name, staged.staging / name)
        staged.commit(manifest.facts, [*staged.add_files(), *staged.write_files(files.items())])
    except BaseException:
        staged.abort()
        raise
