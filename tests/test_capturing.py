"""A run whose steps are captured and replayed gives what the ordinary run gives, or says why it is not captured."""

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import PrintProgressCallback, TrainerCallback
from pytorch_accelerated.capturing import BATCHES_BEFORE_ANOTHER_LAYOUT, MAX_GRAPHS, refuse_what_cannot_be_captured
from pytorch_accelerated.errors import ConfigurationError, HookOutputError, StopTrainingError
from pytorch_accelerated.run_history import RunHistory  # type: ignore[import-not-found]
