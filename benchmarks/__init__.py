"""What the library costs and saves: ``python -m benchmarks``. README.md explains it.

One thread, no GPU and no network, for all that is measured here and for every process it starts.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
