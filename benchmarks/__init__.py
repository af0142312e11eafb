"""What the library costs and saves: ``python -m benchmarks``. README.md explains it."""
