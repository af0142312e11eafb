"""Python imports this at its start in every process that the tests launch with this folder on its path."""

from tests.support import quick_disk, torchvision_on_cpu

quick_disk.install()
torchvision_on_cpu.install()
