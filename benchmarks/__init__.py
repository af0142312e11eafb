"""Benchmarks of the library's cost and savings: ``python -m benchmarks``. README.md explains them."""
