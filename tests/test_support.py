"""The helpers of the tests keep their own promises."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.dispositions import default_signals
from tests.support.ending import is_running
from tests.support.leftovers import fail_on_leftovers
from tests.support.processes import Output, run_forked, run_on_ranks, run_script, run_under_torchrun

SAY_WHERE = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
print(f"rank {dist.get_rank()} of {dist.get_world_size()} got {sys.argv[1:]}")
dist.destroy_process_group()
"""


def test_torchvision_reads_the_digits_as_mnist(mnist_root: Path) -> None:
    from sklearn.datasets import load_digits
    from torchvision.datasets import MNIST

    parts = [MNIST(mnist_root, train=is_train, download=False) for is_train in (True, False)]

    labels = torch.cat([part.targets for part in parts])
    images = torch.cat([part.data for part in parts])
    digits = load_digits()
    assert labels.tolist() == digits.target.tolist()
    assert images.shape == (len(digits.images), 28, 28)
    small_images = images[:, 2:-2:3, 2:-2:3]  # one of each nine equal pixels
    levels = (small_images * (16 / 255)).round()  # digits have 17 levels of grey, bytes have 256
    assert torch.equal(levels.double(), torch.tensor(digits.images))


@pytest.mark.processes
def test_a_child_process_can_import_torchvision_and_timm() -> None:
    run_script("import torchvision, timm; timm.create_model('resnet10t', num_classes=2)")


@pytest.mark.processes
@pytest.mark.parametrize(("run", "world_size"), [(run_on_ranks, 1), (run_on_ranks, 3), (run_under_torchrun, 3)])
def test_every_rank_runs_the_script(run: Callable[..., Output], world_size: int) -> None:
    output = run(SAY_WHERE, world_size, "--size", 3)
    assert output.stdout_of_ranks == tuple(
        f"rank {rank} of {world_size} got ['--size', '3']\n" for rank in range(world_size)
    )
    assert output.stdout == "".join(output.stdout_of_ranks)


@pytest.mark.processes
@pytest.mark.parametrize(
    "run",
    [run_script, partial(run_on_ranks, world_size=2), partial(run_under_torchrun, world_size=2)],
    ids=["alone", "on ranks", "under torchrun"],
)
def test_a_failing_script_shows_what_it_printed(run: Callable[..., object], tmp_path: Path) -> None:
    script = tmp_path / "unlucky.py"
    script.write_text("import sys; print('a word before'); print('the reason', file=sys.stderr); sys.exit(3)")
    # The first rank that fails ends the others, which may then be as far as their own failure, or not.
    codes = r"(\d|\d, \d|\d, SIGTERM|SIGTERM, \d)"
    with pytest.raises(AssertionError, match=rf"(?s)unlucky.py ended with exit code {codes}\n.*word before.*reason"):
        run(script)


HANG_WITH_A_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize("run", [run_script, run_forked], ids=["alone", "forked"])
def test_a_script_that_hangs_is_killed_with_its_children(run: Callable[..., Output], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not end within 5 seconds"):
        run(HANG_WITH_A_CHILD, tmp_path / "child", timeout_seconds=5)
    assert not is_running(int((tmp_path / "child").read_text()))


@pytest.mark.processes
def test_a_child_process_starts_without_the_settings_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    script = "import os; print([name in os.environ for name in ('RANK', 'ACCELERATE_MIXED_PRECISION', 'GIVEN')])"
    assert run_script(script, env={"GIVEN": "1"}).stdout == "[False, False, True]\n"


@pytest.mark.parametrize(("before", "after"), [(None, "3"), ("3", None), ("3", "4")])
def test_a_changed_setting_is_restored_and_reported(
    before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_limit(monkeypatch, before)
    with pytest.raises(AssertionError, match="PT_ACC_LIMIT_BATCHES"), fail_on_leftovers():
        _set_limit(monkeypatch, after)
    assert os.environ.get("PT_ACC_LIMIT_BATCHES") == before


def _set_limit(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("PT_ACC_LIMIT_BATCHES", raising=False)
    else:
        monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", value)


def test_a_process_group_left_behind_is_destroyed_and_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="process group"), fail_on_leftovers():
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert not torch.distributed.is_initialized()


WHAT_SIGNALS_DO = """
import signal
names = ("SIGINT", "SIGTERM", "SIGUSR1")
print([signal.getsignal(getattr(signal, name)) == signal.SIG_IGN for name in names])
print([int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())])
"""


@pytest.mark.processes
def test_scripts_get_signals_where_the_tests_were_started_without_any() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    with default_signals():  # and put back here what is changed below
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        assert run_script(WHAT_SIGNALS_DO).stdout == "[False, False, False]\n[]\n"
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 3
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(numbers)
