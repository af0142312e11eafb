"""Runs on several ranks: metrics by name are those of one process, also where a rank has no batch."""

from tests.chaos.size import some
from tests.support.named import SIZE, check

assert check(some((7,), (1, 7, 30, SIZE))) > 300
