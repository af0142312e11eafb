"""The way into a process that trains with DeepSpeed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from pytorch_accelerated.errors import ConfigurationError, LaunchError
from pytorch_accelerated.facts import require


@contextlib.contextmanager
def starting(plugin: Any) -> Iterator[Any]:
    """Context in which an `Accelerator` is made that trains with DeepSpeed. Afterwards, others can be made without it.

    Args:
        plugin: accelerate's `DeepSpeedPlugin`; None: the one that `accelerate launch` describes.

    Raises:
        ConfigurationError: if accelerate refuses the config.
        LaunchError: without a launcher.
        MissingDependencyError: without DeepSpeed.
    """
    require("deepspeed", needed_by="DeepSpeed, which this process is set up for,")
    if "LOCAL_RANK" not in os.environ:
        raise LaunchError(
            "DeepSpeed is asked for, but this process was started without a launcher, which it needs for a single "
            "process, too. Start it with: torchrun --nproc-per-node 1 your_script.py"
        )
    # accelerate asks these variables, which it sets itself, too; the second one would make it leave DeepSpeed out.
    before = {name: os.environ.pop(name, None) for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_CPU")}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    try:
        yield require("accelerate.utils", needed_by="DeepSpeed").DeepSpeedPlugin() if plugin is None else plugin
    except ValueError as error:
        raise ConfigurationError(f"accelerate refuses the config of DeepSpeed: {error}") from error
    finally:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
        os.environ.update({name: value for name, value in before.items() if value is not None})
