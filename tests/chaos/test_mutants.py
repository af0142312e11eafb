"""Every guard of the writer, the reader and the resumed run is one that some test would miss."""

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
POWER = "tests/checkpointing/test_power_loss.py"
DAMAGE = "tests/checkpointing/test_damage.py"
VERIFY = "tests/checkpointing/test_verify.py"
RESUME = "tests/training/test_resume.py"
BACKGROUND = "tests/checkpointing/test_background.py"
SHARDED = "tests/checkpointing/test_sharded.py"
WRITERS = "tests/checkpointing/test_run_folder.py"


# The file that is changed and the tests that must notice it; what is wrong, the code that is replaced, and by what.
TABLE = {
    ("states/publish.py", POWER): [
        ("files are not flushed", "flushes.append(flushing.submit(disk.flush, file))", "pass"),
        ("the names in a new state are not flushed", "disk.flush_folder(self.staging)", "pass"),
        ("the name of a new state is not flushed", "disk.flush_folder(self.final.parent)", "pass"),
    ],
    ("states/publish.py", CRASHES): [
        ("the state before is deleted first", "disk.move(self.final, replaced)", "remove_state(self.final)"),
        ("a refused replacement is not undone", "disk.move(replaced, self.final)", "pass"),
        ("a state is published before it is complete", "[dump_manifest(manifest)]", "[b'{']"),
        ("what dead processes left is not cleaned up", "            else:\n                _remove_tree(path)\n", ""),
    ],
    ("states/verify.py", DAMAGE): [
        ("links are followed", "path.lstat().st_mode", "path.stat().st_mode"),
        ("the oldest state is taken", "in reversed(states):", "in states:"),
        ("checksums are not compared", "if file.read(1) or digest.hexdigest() != entry.sha256:", "if file.read(1):"),
    ],
    ("states/verify.py", VERIFY): [
        ("a damaged state is taken", "            check(folder)\n        except", "            pass\n        except"),
    ],
    ("states/policy.py", "tests/checkpointing/test_policy.py"): [
        ("the newest state is deleted", "list(values)[-(self.last or 1) :]", "list(values)[-(self.last or 99) : -1]"),
    ],
    ("states/loading.py", RESUME): [
        ("generators are not restored", 'restore_generator_states(by_rank[ranks.index]["generators"])', "pass"),
        (
            "losses before the save are forgotten",
            'reports.losses.load_state_dict(by_rank[ranks.index]["losses"])',
            "pass",
        ),
        ("the schedule starts over", '        (parts.scheduler, contents["scheduler"]),\n', ""),
        ("callbacks start over", "states.append((type(callback).__name__, callback, state))", "pass"),
        ("the optimizer starts over", "load_optimizer_state(target, state)", "pass"),
    ],
    ("facts/seeding.py", "tests/seeding/test_seeding.py"): [
        ("numpy's generator is not restored", "    np.random.set_state((algorithm,", "    bool((algorithm,"),
    ],
    ("loop/training.py", RESUME): [
        ("the epoch begins again", "start=state.samples_in_epoch, batches_done=", "start=0, batches_done="),
    ],
    ("states/state_folder.py", BACKGROUND): [
        ("the background does not copy", "return copy.copy_(tensor, non_blocking=tensor.is_cuda)", "return tensor"),
        ("the background writes two states at once", "self.wait()\n        parts = {", "parts = {"),
    ],
    ("states/state_folder.py", SHARDED): [
        ("the pieces of ranks are not in the manifest", "[*shards, *others, *files]", "[*others, *files]"),
    ],
    ("states/state_folder.py", f"{SHARDED}::test_a_list_of_pieces_that_makes_no_sense_is_refused"): [
        ("pieces need not make up their tensor", "if any(missing.values()):", "if False:"),
    ],
    ("states/loading.py", SHARDED): [
        (
            "a rank's error while it reads its pieces stays its own",
            "ranks.do_on_all(\n        lambda: _read_run(parts, held, folder, without, skipped_weights, read)\n    )",
            "_read_run(parts, held, folder, without, skipped_weights, read)",
        ),
    ],
    ("states/run_folder.py", WRITERS): [
        ("a folder is locked for this process only", "fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    ],
}
MUTANTS = [pytest.param(*place, old, new, id=what) for place, changes in TABLE.items() for what, old, new in changes]


@pytest.mark.parametrize(("name", "tests", "old", "new"), MUTANTS)
def test_a_mutant_fits_the_source_in_one_place(name: str, tests: str, old: str, new: str):
    source = (REPOSITORY / PACKAGE / name).read_text()
    assert source.count(old) == 1, "the source has changed: bring the mutant up to date"


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
@pytest.mark.parametrize(("name", "tests", "old", "new"), MUTANTS)
def test_a_version_of_ours_that_is_wrong_is_caught(name: str, tests: str, old: str, new: str, mutable_repository: Path):
    file = mutable_repository / PACKAGE / name
    original = file.read_text()
    file.write_text(original.replace(old, new))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
        done = subprocess.run(command, cwd=mutable_repository, capture_output=True, text=True)
    finally:
        file.write_text(original)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output  # tests ran and failed; 0: nobody noticed; others: they could not run
    assert "ERROR collecting" not in output, output  # a fixture that fails has noticed; an import that fails has not
    record("mutants", {"tried and caught": len(MUTANTS)})
