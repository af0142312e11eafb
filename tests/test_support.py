"""The helpers of the tests keep their own promises."""

from pathlib import Path

import pytest
import torch

from tests.support.leftovers import fail_on_leftovers
from tests.support.processes import run_on_ranks


@pytest.mark.processes
def test_a_failing_script_shows_what_it_printed(tmp_path: Path) -> None:
    script = tmp_path / "unlucky.py"
    script.write_text("import sys; print('a word before'); print('the reason', file=sys.stderr); sys.exit(3)")
    # The first rank that fails ends the others, which may then be as far as their own failure, or not.
    codes = r"(\d|\d, \d|\d, SIGTERM|SIGTERM, \d)"
    with pytest.raises(AssertionError, match=rf"(?s)unlucky.py ended with exit code {codes}\n.*word before.*reason"):
        run_on_ranks(script, 2)


def test_a_process_group_left_behind_is_destroyed_and_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="process group"), fail_on_leftovers():
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert not torch.distributed.is_initialized()
