"""Facts about what runs: model, optimizer, versions, device, command line, commit."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.tracking.part_facts import part_facts

_PACKAGES = ("pytorch_accelerated", "torch", "accelerate", "numpy", "transformers", "timm", "torchvision")
_SECRET = re.compile("token|password|passwd|secret|api[-_]?key|credential", re.IGNORECASE)


def model_facts(model: nn.Module, optimizer: Any, loss_func: Any, scheduler: Any) -> dict[str, Any]:
    """What is trained, and by what."""
    parts = part_facts(model, loss_func=loss_func, optimizer=optimizer, scheduler=scheduler)
    facts = {"class": parts.model, "parameters": parts.parameters, "trainable_parameters": parts.trainable_parameters}
    facts |= {name: value for name, value in {"loss": parts.loss, "scheduler": parts.scheduler}.items() if value}
    if parts.groups:
        facts["optimizer"] = parts.optimizer
        for index, group in enumerate(parts.groups):
            settings = {name: value for name, value in group.items() if _is_plain(value)}
            if "initial_lr" in settings:  # a schedule has begun
                settings["lr"] = settings.pop("initial_lr")
            facts["optimizer_settings" if len(parts.groups) == 1 else f"optimizer_group_{index}"] = settings
    return facts


def environment_facts(device: torch.device, num_processes: int) -> dict[str, Any]:
    """Versions, device, host, command line and git commit. Values of options that look like secrets are left out."""
    versions = {name: getattr(sys.modules[name], "__version__", "?") for name in _PACKAGES if name in sys.modules}
    facts: dict[str, Any] = {"device": str(device)}
    if device.type == "cuda":
        facts["device"] = f"{torch.cuda.get_device_name(device)} ({device})"
        facts["cuda"] = torch.version.cuda
    facts |= {
        "processes": num_processes,
        "processor_cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name.replace("_", "-"): str(version) for name, version in versions.items()},
        "system": platform.platform(),
        "host": platform.node(),
        "command": "a notebook" if _is_kernel() else shlex.join(_without_secrets(sys.argv)),
        "folder": os.getcwd(),
    }
    commit = _git_commit()
    return facts if commit is None else {**facts, "git_commit": commit}


def _is_kernel() -> bool:
    """Whether the command line is that of a notebook's kernel, which says nothing about the notebook."""
    return Path(sys.argv[0]).name.endswith("kernel_launcher.py")


def _without_secrets(arguments: list[str]) -> list[str]:
    shown: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, _ = argument.partition("=")
        is_value = before.startswith("-") and "=" not in before and not argument.startswith("-")
        if is_value and _SECRET.search(before):
            shown.append("***")
        else:
            shown.append(f"{name}=***" if equals and _SECRET.search(name) else argument)
    return shown


def _git_commit() -> str | None:
    """The commit of the folder of the script or notebook, and whether files were changed since; None without one."""
    script = Path(sys.argv[0] or ".")
    folder = script.parent if script.is_file() and not _is_kernel() else Path()
    commands = (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, timeout=5, check=True).stdout
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + (" with changes" if changes.strip() else "")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
