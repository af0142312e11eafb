"""Pages that show a run, or several side by side. `callbacks/report.py` writes them during a run."""
