"""The names of `extras.looking`, where version 1.0 had them."""

from pytorch_accelerated.extras.looking import *  # noqa: F403  # what it lists
