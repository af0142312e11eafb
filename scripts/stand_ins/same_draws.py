"""Runs a script in which masks and crops follow from the data: `python same_draws.py script.py arguments`.

Two libraries draw random numbers in another order, so what a collator or a transform draws differs between them. Here
each draws from a generator that is seeded by what it gets, so that both train on the same.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(sys.argv[1]).resolve().parent)]

from tests.support import torchvision_on_cpu  # noqa: E402

torchvision_on_cpu.install()

import torchvision.transforms  # noqa: E402
import transformers  # noqa: E402


def seeded_by_argument(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, drawing from a generator that its first argument seeds."""

    def seeded(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        octets = data.numpy().tobytes() if isinstance(data, torch.Tensor) else data.tobytes()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sum(octets) * 31 + len(octets))
            return method(self, data, *args, **kwargs)

    return seeded


masking: Any = transformers.DataCollatorForLanguageModeling
masking.torch_mask_tokens = seeded_by_argument(masking.torch_mask_tokens)
for kind in (torchvision.transforms.RandomResizedCrop, torchvision.transforms.RandomHorizontalFlip):
    kind.forward = seeded_by_argument(kind.forward)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
