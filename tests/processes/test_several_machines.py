"""What several machines need: one disk, a limit of waiting, and words when one of them is lost."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ConfigurationError
from tests.chaos.size import in_release, some
from tests.support.ending import kill_with_children
from tests.support.processes import REPOSITORY, TIME_LIMIT_SECONDS, run_on_ranks, start, start_on_ranks
from tests.support.states import find_state, read_manifest


@dataclass(frozen=True)
class Host:
    """A separate network that shares everything else with this machine.

    Attributes:
        name: the name of its network namespace.
        address: its address for the other host.
        interface: its end of the cable.
    """

    name: str
    address: str
    interface: str

    def start(self, script: Path, *args: object, env: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """Start `script` on this host without waiting for it. Its output goes to the file `log`."""
        command = ["ip", "netns", "exec", self.name, sys.executable, str(script), *map(str, args)]
        # Otherwise gloo uses the interface of the machine's name, which the namespaces lack.
        return start(command, env={"GLOO_SOCKET_IFNAME": self.interface, **env}, log=log)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that can reach each other, until the block ends. Skips the test if the machine doesn't allow it."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2), which makes network namespaces")
    token = f"{os.getpid() % 100_000}{secrets.token_hex(2)}"  # names of interfaces have at most 15 letters
    first, second = (Host(f"pa{token}{side}", f"10.213.77.{end}", f"pa{token}{side}") for side, end in ("a1", "b2"))
    try:
        try:
            for host in (first, second):
                _ip("netns", "add", host.name)
            peer = ("peer", "name", second.interface, "netns", second.name)
            _ip("link", "add", first.interface, "netns", first.name, "type", "veth", *peer)
            for host in (first, second):
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    _ip("-n", host.name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield first, second
    finally:
        for host in (first, second):  # with their ends of the cable
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True, encoding="utf-8")


RANKS = Path(__file__).parents[1] / "ranks"
# What torchrun needs besides: to hand on Slurm's warning, and to restart what has died on CPUs.
WITH_WARNING = "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
WITH_RESTARTS = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


@pytest.mark.processes
def test_machines_without_a_shared_disk_fail_at_the_first_save_and_at_a_resume(tmp_path: Path) -> None:
    for told in run_on_ranks(RANKS / "shared_disk.py", 2, tmp_path).stdout_of_ranks:
        said = json.loads(told.splitlines()[-1])
        saved = said["saved to disks of their own"]
        assert saved.startswith("CheckpointError: The machines of this run see different training states")
        assert "machine 0" in saved
        assert "newest is epoch_1, with serial number 1; machine 1" in saved
        assert "no state" in saved
        assert "shared disk" in saved
        assert said["in the background"].startswith("CheckpointError: The machines of this run see different")
        for resumed in ("resumed from disks of their own", "resumed where the other machine is the first"):
            assert "shared disk" in said[resumed]
        assert "rank 1 was not" in said["resumed on one rank"]
        assert said["afresh"] == "1 updates"
        assert said["resumed from a shared disk"] == "3 updates"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "seconds", "state", "cause"),
    [
        ("ends", 300, "step_2", "caused by RuntimeError"),
        # Far below torch's half an hour, far above what a busy machine needs to begin.
        pytest.param("hangs", 12, "step_2", "12000ms", marks=pytest.mark.slow),
        ("huggingface", 300, "checkpoint-2", "caused by RuntimeError"),
    ],
)
def test_a_lost_rank_is_an_error_that_names_update_and_newest_state(
    way: str, seconds: int, state: str, cause: str, tmp_path: Path
) -> None:
    told = run_on_ranks(RANKS / "lost_peer.py", 2, way, tmp_path, seconds).stdout_of_ranks[0]
    # A launcher may end the process before Python prints the exception: the run itself has to print the message.
    printed, caught = told.split("caught:")
    for text in (printed, caught):
        assert "Rank 0 of 2 lost another rank after update 3 (" in text
        assert f"The newest complete state is {tmp_path / 'states' / state}, from which the run resumes" in text
    assert cause in caught
    assert way == "huggingface" or "callbacks hear of a LostPeerError" in printed


@pytest.mark.processes
@pytest.mark.slow
def test_two_hosts_train_together(tmp_path: Path) -> None:
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    with two_hosts() as hosts:
        slurm = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "MASTER_ADDR": hosts[0].address}
        slurm |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
        running = [
            host.start(RANKS / "two_hosts.py", env={**slurm, "SLURM_PROCID": str(rank)}, log=logs[rank])
            for rank, host in enumerate(hosts)
        ]
        try:
            codes = [process.wait(timeout=TIME_LIMIT_SECONDS) for process in running]
        finally:
            for process in running:
                kill_with_children(process.pid)
                process.wait()
    told = [log.read_text() for log in logs]
    assert codes == [0, 0], told
    trained = [re.findall("^trained .*", text, re.MULTILINE) for text in told]
    assert trained[0] == trained[1] != []
    assert "trained 12 " in trained[0][0]


@in_release
@pytest.mark.processes
def test_a_run_that_torchrun_restarts_after_a_kill_ends_with_the_same_bits(tmp_path: Path) -> None:
    script, killed, log = RANKS / "dying.py", tmp_path / "killed", tmp_path / "log"
    whole = run_on_ranks(script, 2, tmp_path / "whole", "never", 0, 0).stdout_of_ranks[0].splitlines()[-1]
    options, env = ["--max-restarts", "2"], dict([WITH_RESTARTS.split("=")])
    launcher = start_on_ranks(script, 2, killed, "rank 1 killed", 5, 0, options=options, env=env, log=log)
    told = text_at_end(launcher, log)
    assert launcher.returncode == 0, told
    assert (killed / "died").exists(), told
    assert "The newest complete state is" in told
    assert whole in told


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "options"), some([("SIGUSR1", WITH_WARNING)], [("SIGTERM", ""), ("SIGUSR1", WITH_WARNING)])
)
def test_torchrun_that_is_warned_or_asked_to_end_lets_all_ranks_save(sent: str, options: str, tmp_path: Path) -> None:
    number = getattr(signal, sent)
    launcher = start_on_ranks(RANKS / "endless.py", 2, tmp_path, options=options.split(), log=tmp_path / "log")
    try:
        wait_for(lambda: len(list(tmp_path.glob("ready *"))) == 2, [launcher])
        launcher.send_signal(number)
    finally:
        log = text_at_end(launcher, tmp_path / "log")
    state = find_state(tmp_path)
    assert state is not None, log
    assert state.name == "final"
    updates = read_manifest(state).facts["updates"]
    left = {f"left {rank} {updates} {128 + number}" for rank in (0, 1)}
    assert {path.name for path in tmp_path.glob("left *")} == left, log


def test_the_page_tells_what_torchrun_needs() -> None:
    text = (REPOSITORY / "docs" / "how_to" / "several_machines.md").read_text(encoding="utf-8")
    assert WITH_WARNING in text
    assert WITH_RESTARTS in text


def wait_for(condition: Callable[[], bool], running: "list[subprocess.Popen[bytes]]") -> None:
    """Return when `condition` holds, or when it can't any more because a process has ended."""
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while not condition() and all(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(0.05)


def text_at_end(launcher: "subprocess.Popen[bytes]", log: Path) -> str:
    """What a launcher and its ranks have printed when they have ended, by themselves or not."""
    try:
        launcher.wait(timeout=TIME_LIMIT_SECONDS)
    finally:
        if launcher.poll() is None:
            kill_with_children(launcher.pid)
            launcher.wait()
    return log.read_text()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "10", True])
def test_a_limit_of_waiting_is_a_positive_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="`timeout` is"):
        Trainer(model := nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD(model.parameters()), timeout=timeout)
