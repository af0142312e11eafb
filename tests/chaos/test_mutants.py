"""Every guard of the writer, the reader and the resumed run is one that some test would miss."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.record import record
from tests.chaos.size import IS_RELEASE
from tests.support.processes import REPOSITORY

PACKAGE = "src/pytorch_accelerated"
CRASHES = "tests/checkpointing/test_crashes.py"
POWER = "tests/chaos/test_power_loss.py"
DAMAGE = "tests/chaos/test_damage.py"
VERIFY = "tests/checkpointing/test_verify.py"
RESUME = "tests/training/test_resume.py"
BACKGROUND = "tests/checkpointing/test_background.py"
SHARDED = "tests/models/test_sharded.py"
WRITERS = "tests/chaos/test_two_writers.py"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A wrong version of one file, and the tests that must notice it."""

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "files are not flushed",
        "checkpointing/publish.py",
        "            disk.flush(file)\n        return FileEntry(",
        "        return FileEntry(",
        POWER,
    ),
    Mutant(
        "the names in a new state are not flushed",
        "checkpointing/publish.py",
        "            disk.flush_folder(self.staging)\n",
        "",
        POWER,
    ),
    Mutant(
        "the name of a new state is not flushed",
        "checkpointing/publish.py",
        "            disk.flush_folder(self.final.parent)\n",
        "",
        POWER,
    ),
    Mutant(
        "the state before is deleted first",
        "checkpointing/publish.py",
        "            replaced = self._move_aside()\n",
        "            if (replaced := self._move_aside()) is not None:\n                _remove_tree(_hide(replaced))\n",
        CRASHES,
    ),
    Mutant(
        "a refused replacement is not undone",
        "checkpointing/publish.py",
        "                    disk.move(replaced, self.final)\n",
        "                    pass\n",
        CRASHES,
    ),
    Mutant(
        "a state is published before it is complete",
        "checkpointing/publish.py",
        "        self._write(MANIFEST_NAME, [manifest])\n        with explained(self.final):\n",
        "        self._write(MANIFEST_NAME, [manifest[:9]])\n        with explained(self.final):\n",
        CRASHES,
    ),
    Mutant(
        "what dead processes left is not cleaned up",
        "checkpointing/publish.py",
        "                _remove_tree(path)\n\n\n@contextlib",
        "                pass\n\n\n@contextlib",
        CRASHES,
    ),
    Mutant(
        "checksums are not compared",
        "checkpointing/verify.py",
        "    if not is_at_end or digest.hexdigest() != entry.sha256:",
        "    if not is_at_end:",
        DAMAGE,
    ),
    Mutant(
        "longer files are not noticed",
        "checkpointing/verify.py",
        "        if size_bytes != entry.size_bytes:",
        "        if size_bytes < entry.size_bytes:",
        VERIFY,
    ),
    Mutant(
        "links are followed",
        "checkpointing/verify.py",
        "        if not stat.S_ISREG(path.lstat().st_mode):",
        "        if not stat.S_ISREG(path.stat().st_mode):",
        VERIFY,
    ),
    Mutant(
        "the oldest state is taken",
        "checkpointing/verify.py",
        "in reversed(states):",
        "in states:",
        VERIFY,
    ),
    Mutant(
        "a damaged state is taken",
        "checkpointing/verify.py",
        "            check(folder)\n        except",
        "            pass\n        except",
        VERIFY,
    ),
    Mutant(
        "the newest state is deleted",
        "checkpointing/policy.py",
        "list(values)[-(self.last or 1) :]",
        "list(values)[len(values) - (self.last or 0) :]",
        "tests/checkpointing/test_policy.py",
    ),
    Mutant(
        "generators are not restored",
        "checkpointing/training_state.py",
        '        restore_generator_states(own["generators"])\n',
        "",
        RESUME,
    ),
    Mutant(
        "numpy's generator is not restored",
        "seeding.py",
        "    np.random.set_state((algorithm,",
        "    bool((algorithm,",
        "tests/test_seeding.py",
    ),
    Mutant(
        "losses before the save are forgotten",
        "checkpointing/training_state.py",
        '        run.losses.load_state_dict(own["losses"])\n',
        "",
        RESUME,
    ),
    Mutant(
        "the optimizer starts afresh",
        "checkpointing/loading.py",
        "            load_optimizer_state(optimizer, optimizer_state)\n",
        "            pass\n",
        RESUME,
    ),
    Mutant(
        "the schedule starts afresh",
        "checkpointing/training_state.py",
        '        found.append((type(scheduler).__name__, scheduler, parts["scheduler"]))\n',
        "        pass\n",
        RESUME,
    ),
    Mutant(
        "callbacks start afresh",
        "checkpointing/training_state.py",
        "        *((type(callback).__name__, callback, state) for callback, state in saved if state is not None),\n",
        "",
        RESUME,
    ),
    Mutant(
        "the epoch begins again",
        "training/run.py",
        "start=state.samples_in_epoch, batches_done=",
        "start=0, batches_done=",
        RESUME,
    ),
    Mutant(
        "the background does not copy",
        "checkpointing/state_folder.py",
        "        return copy.copy_(tensor, non_blocking=tensor.is_cuda)\n",
        "        return tensor\n",
        BACKGROUND,
    ),
    Mutant(
        "the background writes two states at once",
        "checkpointing/state_folder.py",
        "        self.wait()\n        parts = {",
        "        parts = {",
        BACKGROUND,
    ),
    Mutant(
        "a rank's error while it reads its pieces stays its own",
        "checkpointing/training_state.py",
        "ranks.do_on_all(lambda: _read_run(run, folder, skipped_weights, read))",
        "_read_run(run, folder, skipped_weights, read)",
        SHARDED,
    ),
    Mutant(
        "the pieces that ranks have written are not in the manifest",
        "checkpointing/state_folder.py",
        "    staged.commit(facts, [*shards, *others, *files])\n",
        "    staged.commit(facts, [*others, *files])\n",
        SHARDED,
    ),
    Mutant(
        "pieces need not make up their tensor",
        "checkpointing/sharded_files.py",
        "        if any(missing.values()):\n",
        "        if False:\n",
        SHARDED,
    ),
    Mutant(
        "a folder is locked for the runs of this process only",
        "checkpointing/run_folder.py",
        "                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "                pass\n",
        WRITERS,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_fits_the_source_in_one_place(mutant: Mutant):
    source = (REPOSITORY / PACKAGE / mutant.file).read_text()
    assert source.count(mutant.old) == 1, "the source has changed: bring the mutant up to date"


@pytest.fixture(scope="module")
def mutable_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the tests need."""
    copy = tmp_path_factory.mktemp("repository")
    for name in ("src", "tests"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    return copy


@pytest.mark.skipif(not IS_RELEASE, reason="only in `make chaos`")
@pytest.mark.processes
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_version_of_ours_that_is_wrong_is_caught(mutant: Mutant, mutable_repository: Path):
    file = mutable_repository / PACKAGE / mutant.file
    original = file.read_text()
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.tests]
        done = subprocess.run(command, cwd=mutable_repository, capture_output=True, text=True)
    finally:
        file.write_text(original)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output  # tests ran and failed; 0: nobody noticed; others: they could not run
    assert " error" not in done.stdout.splitlines()[-1], output
    record("mutants", {"tried and caught": len(MUTANTS)})
