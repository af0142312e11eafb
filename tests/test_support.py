"""The helpers of the tests keep their own promises."""

from pathlib import Path

import pytest
import torch

from tests.support.ending import is_running
from tests.support.leftovers import fail_on_leftovers
from tests.support.processes import run_forked, run_on_ranks


@pytest.mark.processes
def test_a_failing_script_shows_what_it_printed(tmp_path: Path) -> None:
    script = tmp_path / "unlucky.py"
    script.write_text("import sys; print('a word before'); print('the reason', file=sys.stderr); sys.exit(3)")
    # The first rank that fails ends the others, which may then be as far as their own failure, or not.
    codes = r"(\d|\d, \d|\d, SIGTERM|SIGTERM, \d)"
    with pytest.raises(AssertionError, match=rf"(?s)unlucky.py ended with exit code {codes}\n.*word before.*reason"):
        run_on_ranks(script, 2)


HANG_WITH_A_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


@pytest.mark.processes
def test_a_script_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not end within 3 seconds"):
        run_forked(HANG_WITH_A_CHILD, tmp_path / "child", timeout_seconds=3)
    assert not is_running(int((tmp_path / "child").read_text()))


@pytest.mark.processes
def test_a_child_process_starts_without_the_settings_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    script = "import os; print([name in os.environ for name in ('RANK', 'ACCELERATE_MIXED_PRECISION', 'GIVEN')])"
    assert run_forked(script, env={"GIVEN": "1"}).stdout == "[False, False, True]\n"


def test_a_process_group_left_behind_is_destroyed_and_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="process group"), fail_on_leftovers():
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert not torch.distributed.is_initialized()
