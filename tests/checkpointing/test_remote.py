"""States behind a URL: in a real server that speaks S3's protocol, in memory, and in files."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import (
    CheckpointError,
    ConfigurationError,
    InvalidCheckpointError,
    MissingCheckpointError,
    MissingDependencyError,
)
from pytorch_accelerated.extras import object_storage as remote
from pytorch_accelerated.extras.object_storage import Store, default_local_folder
from pytorch_accelerated.states import layout
from pytorch_accelerated.states.verify import list_states, read_manifest
from tests.callbacks.runs import a_trainer, fit, values_of
from tests.chaos.size import some
from tests.support.object_storage import BUCKET, ObjectStorage, files_at, object_storage
from tests.support.processes import run_on_ranks
from tests.support.resuming import SaveAndStop, assert_same, everything, run

URL = "memory://run"


@pytest.fixture(scope="module")
def storage() -> Iterator[ObjectStorage]:
    with object_storage() as server:
        yield server


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that goes on, on a new machine of that name; the memory of the storage is empty at the start."""
    fsspec.filesystem("memory").store.clear()

    def move(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machines" / name))

    move("first")
    return move


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is done to the storage: the operations, with the names that they are given."""
    done: list[tuple[str, str]] = []
    for name in ("get", "put", "write", "delete"):
        operation = getattr(Store, name)

        def noted(*args: Any, name: str = name, work: Any = operation) -> Any:
            place = next(each for each in args[1:] if isinstance(each, str))
            if place != "owner.txt":
                done.append((name, place))
            return work(*args)

        monkeypatch.setattr(Store, name, noted)
    return done


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are repeated without long waits."""
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)  # with growing waits of its own


class At(TrainerCallback):
    """Calls functions at the end of some updates, by their number; waits for uploads before."""

    def __init__(self, **actions: Callable[[], None]) -> None:
        self.actions = actions

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        action = self.actions.get(f"after_{trainer.run_state.updates}")
        if action is not None:
            trainer.run_context.control.saves.writer.wait()  # it starts the upload
            for uploads in trainer.run_context.control.saves.uploads.values():
                assert uploads._round is not None
                uploads._round.result()
            action()


def saver(url: str = URL, **arguments: Any) -> SaveTrainingStateCallback:
    return SaveTrainingStateCallback(url, **{"save_every_n_steps": 2, **arguments})


def complete_at(url: str) -> set[str]:
    return {folder for folder, files in files_at(url).items() if layout.MANIFEST_NAME in files}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", ["memory://run", "file://{}/run/", f"s3://{BUCKET}/deep/run"])
def test_a_run_resumed_on_another_machine_equals_the_uninterrupted_one(place, background, storage, machine, tmp_path):
    url = f"{place.format(tmp_path)}{background}"
    whole = everything(*run(tmp_path))
    run(tmp_path, saver(url, background=background), SaveAndStop(tmp_path / "unused", 5))
    assert complete_at(url) == {"step_2", "step_4", "final"}
    assert [path.name for path in default_local_folder(url).iterdir()] == ["final"]
    machine("second")
    assert_same(everything(*run(tmp_path, process_seed=9, resume_from=url)), whole)
    machine("third")  # from one of the states, which is not the newest
    assert_same(everything(*run(tmp_path, process_seed=9, resume_from=f"{url}/step_4")), whole)
    (state,) = default_local_folder(f"{url}/step_4").iterdir()
    assert (state.name, read_manifest(state).facts["updates"]) == ("step_4", 4)


def test_states_are_kept_by_the_same_rules_as_in_a_local_folder(tmp_path, machine):
    rules: dict[str, Any] = {"max_checkpoints": 2, "keep_best": 2, "save_every_n_epochs": 1}
    for place in (tmp_path / "local", URL):
        fit(a_trainer(SaveTrainingStateCallback(place, **rules)), 4)
        machine("second")  # it knows the values of states that others have uploaded
        for epochs in (6, 7):
            fit(a_trainer(SaveTrainingStateCallback(place, **rules)), epochs, resume_from=place)
    local = {path.name for path, _ in list_states(tmp_path / "local")}
    assert {"epoch_7", "final"} < local
    assert {name.partition(".")[0] for name in files_at(URL)} == local


def test_manifests_are_written_last_and_deleted_first_and_nothing_is_overwritten(operations):
    for epochs in (1, 2, 3):
        fit(a_trainer(saver(max_checkpoints=1)), epochs, resume_from=URL)
        (newest,) = complete_at(URL)
        assert newest.startswith("final")
        there: dict[str, set[str]] = {}
    for operation, name in operations:
        folder, _, file = name.partition("/")
        files = there.setdefault(folder, set())
        assert operation == "delete" or layout.MANIFEST_NAME not in files
        if operation == "delete":
            assert layout.MANIFEST_NAME in (file, *files) or not file
            files.difference_update([file] if file else list(files))
            assert file or layout.MANIFEST_NAME not in files
        elif operation != "get":
            files.add(file)
            assert (file == layout.MANIFEST_NAME) == (operation == "write")
    assert not [name for operation, name in operations if operation == "get"]  # the local state is the same


class SlowFollowUp(TrainerCallback):
    """Follows each save up slowly, and notes whether states were still to be uploaded afterwards."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        saves = trainer.run_context.control.saves

        def follow() -> None:
            time.sleep(0.3)
            self.seen.append(bool(saves.uploads))

        saves.writer.after_each.append(follow)


def test_what_follows_the_last_save_is_over_before_the_uploads_end() -> None:
    slow = SlowFollowUp()
    fit(a_trainer(saver(max_checkpoints=1), slow), 1)
    assert slow.seen == [True] * len(slow.seen) != []


def test_a_new_run_says_what_is_there_and_its_states_are_the_newer_ones(machine, capsys):
    fit(a_trainer(saver()), 2)
    files, root = fsspec.core.url_to_fs(URL)
    files.pipe_file(f"{root}/mine/notes.txt", b"not a state")
    files.pipe_file(f"{root}/step_99/model.json", b"killed while it was uploaded")
    machine("second")
    fit(a_trainer(saver(max_checkpoints=1, save_at_end=False)), 1)
    assert "memory://run has states of an earlier run, the last of them final: this run will" in capsys.readouterr().out
    assert files_at(URL).keys() == {"mine", "step_4"}
    machine("third")
    trainer = a_trainer()
    trainer.load_training_state(URL)
    assert trainer.run_state.updates == 4


def test_each_file_is_downloaded_once_and_what_is_damaged_or_incomplete_is_skipped(machine, operations):
    history = fit(a_trainer(saver(save_at_end=False)), 2)
    files, root = fsspec.core.url_to_fs(URL)
    files.pipe_file(f"{root}/step_10/model.safetensors", b"damaged")
    files.rm_file(f"{root}/step_8/manifest.json")
    files.pipe_file(f"{root}/step_6/manifest.json", b"damaged, too")
    machine("second")
    operations.clear()
    with pytest.warns(
        UserWarning, match=r"(?s)Resuming from step_4 .*step_6.*step_10 is damaged.*step_8 has no manifest"
    ):
        assert values_of(fit(a_trainer(), 2, resume_from=URL)) == values_of(history)
    got = [name for operation, name in operations if operation == "get" and name.startswith("step_4/")]
    assert len(got) == len(set(got)) == len(files.find(f"{root}/step_4")) - 1
    for name in ("step_2", "step_4"):
        files.rm_file(f"{root}/{name}/model.safetensors")
    machine("third")
    with pytest.raises(InvalidCheckpointError, match="holds training states, but no valid one"):
        fit(a_trainer(), resume_from=URL)
    machine("second")  # where one was downloaded
    with pytest.warns(UserWarning, match="skipped"):
        fit(a_trainer(), 2, resume_from=URL)
    for name in ("step_2", "step_4", "step_6", "step_10"):
        files.rm_file(f"{root}/{name}/manifest.json")
    machine("fourth")  # a run that was ended within its first upload has no state yet
    with pytest.warns(UserWarning, match="step_10 has no manifest: it was not uploaded completely"):
        assert values_of(fit(a_trainer(), 2, resume_from=URL)) == values_of(history)


def test_a_manifest_cannot_name_files_outside_of_its_state(machine):
    fit(a_trainer(saver(save_every_n_steps=None)), 1)
    manifest = read_manifest(default_local_folder(URL) / "final")
    entry = layout.FileEntry("../../outside.json", 1, "0")
    files, root = fsspec.core.url_to_fs(URL)
    files.pipe_file(
        f"{root}/final/manifest.json",
        layout.dump_manifest(layout.Manifest(9, manifest.facts, (*manifest.files, entry))),
    )
    machine("second")
    with pytest.raises(InvalidCheckpointError, match="lists '../../outside.json', which is outside of it"):
        fit(a_trainer(), resume_from=URL)


def test_a_network_that_breaks_and_heals_loses_nothing(storage, hasty, machine):
    url = f"s3://{BUCKET}/healing"
    with pytest.warns(UserWarning, match=r"(?s)owner.txt failed .*Nothing is lost.* The next save tries again"):
        fit(a_trainer(saver(url, storage_timeout=3), At(after_3=storage.stop, after_7=storage.start)), 2)
    assert complete_at(url) == {"step_2", "step_4", "step_6", "step_8", "step_10", "final"}


def test_a_network_that_stays_broken_is_an_error_at_the_end_and_the_run_is_not_lost(storage, hasty, machine):
    url = f"s3://{BUCKET}/broken"
    trainer = a_trainer(saver(url, storage_timeout=3), At(after_3=storage.stop))
    try:
        with pytest.warns(UserWarning, match="tries again"), pytest.raises(CheckpointError, match="Nothing") as caught:
            fit(trainer, 2)
    finally:
        storage.start()
    assert str(default_local_folder(url)) in str(caught.value)
    assert trainer.run_state.updates == 10
    assert complete_at(url) == {"step_2"}
    whole = values_of(fit(a_trainer(), 3))
    assert values_of(fit(a_trainer(saver(url)), 3, resume_from=url)) == whole  # from the local state, which is newer
    assert complete_at(url) >= {"step_2", "step_4", "step_10", "step_12", "final"}
    with pytest.raises(CheckpointError, match=r"listing it failed \(.*bucket does not exist"):
        fit(a_trainer(saver("s3://no-such-bucket/run")))


class Stalling(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]  # of the class of a plug-in
    """Transfers that move a byte now and then, or, while the event is not set, none."""

    store: dict[str, Any] = {}
    protocol = "stalling"
    moves = threading.Event()

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **kwargs: Any) -> None:
        for _ in range(6 if rpath.endswith("model.safetensors") else 0):
            self.moves.wait()
            time.sleep(0.1)
            callback.relative_update(1)
        super().put_file(lpath, rpath)


def test_a_stalled_storage_ends_and_a_slow_one_does_not(machine):
    fsspec.register_implementation("stalling", Stalling, clobber=True)
    url, moves = "stalling://run", Stalling.moves
    moves.set()
    fit(a_trainer(saver(url, save_every_n_steps=None, storage_timeout=0.4)), 1)
    assert complete_at(url) == {"final"}
    stalls = At(after_3=moves.clear)
    with (
        pytest.warns(UserWarning, match="no byte has moved for 0.4 seconds, the `storage_timeout`"),
        pytest.raises(CheckpointError, match=r"no byte has moved for .*Nothing is lost"),
    ):
        fit(a_trainer(saver(url, storage_timeout=0.4), stalls), 1)
    moves.set()


def test_two_machines_that_save_to_one_url_are_noticed_at_the_next_upload(machine):
    def go_on_another_machine() -> None:
        machine("second")
        fit(a_trainer(saver()), 1)
        uploaded.update(complete_at(URL))
        machine("first")

    uploaded: set[str] = set()
    with (
        pytest.warns(UserWarning, match="Another run saves to memory://run, too: Process .* on "),
        pytest.raises(CheckpointError, match=r"Another run saves.*this one uploads nothing more.* Nothing is lost"),
    ):
        fit(a_trainer(saver(save_every_n_steps=1), At(after_3=go_on_another_machine)), 2)
    assert complete_at(URL) == uploaded
    left = {path.name for path, _ in list_states(default_local_folder(URL))}
    assert left >= {*(f"step_{number}" for number in range(4, 11)), "final"}


def test_what_is_missing_or_wrong_is_an_error_that_says_so(tmp_path, monkeypatch, storage):
    resumed: dict[str, Any] = {"resume_from": "s3://other/run"}
    for arguments in ({}, resumed):
        with pytest.raises(MissingCheckpointError, match="s3://other/run.* Make the bucket, or check its name"):
            fit(a_trainer(*[] if arguments else [saver("s3://other/run")]), **arguments)
    with pytest.raises(ConfigurationError, match="`local_dir` is .*, but `save_dir` is local too"):
        SaveTrainingStateCallback("states", local_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="fsspec cannot reach what://run: Protocol not known: what"):
        fit(a_trainer(saver("what://run")))
    with pytest.raises(MissingCheckpointError, match="There is no training state memory://run/step_7"):
        fit(a_trainer(), resume_from=f"{URL}/step_7")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingDependencyError, match="pip install fsspec"):
        fit(a_trainer(saver()))


@pytest.mark.processes
@pytest.mark.parametrize("machines", some([2], [1, 2]))
def test_two_ranks_resume_from_one_state_which_each_machine_downloads_once(machines, storage, tmp_path):
    script = Path(__file__).parents[1] / "ranks" / "remote.py"
    run_on_ranks(script, 2, tmp_path, f"s3://{BUCKET}/{machines}", machines)
