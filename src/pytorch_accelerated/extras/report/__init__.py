"""Pages that show a run, or several side by side."""
