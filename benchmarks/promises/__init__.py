"""What people take for granted from a training library, tried on each of them: ``python -m benchmarks.promises``.

Every library does the same small work in processes of its own (`work`), each used as its documentation says
(`libraries`). `questions` says what is asked and compares what came out.
"""
