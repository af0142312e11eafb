"""Detects tests that leave a changed state for later ones."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed


@contextmanager
def fail_on_leftovers() -> Iterator[None]:
    """Clean up what the body left behind, and then fail because of it.

    Raises:
        AssertionError: if a setting of this library or of accelerate in the environment has changed, or a process group
            or a child process is left.
    """
    before = _settings_in_environment()
    yield
    after = _settings_in_environment()
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update(before)
    group_is_left = torch.distributed.is_initialized()
    if group_is_left:
        torch.distributed.destroy_process_group()
    children = multiprocessing.active_children()
    for child in children:
        child.kill()  # loader processes ignore gentler signals
        child.join()
    assert not changed, f"environment variables were left changed: {', '.join(changed)}"
    assert not group_is_left, "a process group was left behind: call torch.distributed.destroy_process_group()"
    assert not children, f"child processes were left behind: {children}"


def _settings_in_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "PT_ACC_"))}
