"""Python imports this at its start in every process that the tests launch with this folder on its path."""

from tests.support import torchvision_on_cpu

torchvision_on_cpu.install()
