"""What scripts do with the public API. The same files run with either package.

Each public function of a module is a scenario. It returns what a script would see, as JSON: numbers, strings, lists,
and dicts whose keys become parts of the observation's name. Files go to the working directory, which is a new folder.
Nothing here may import from `src` or `tests` but `tests.differential.scenarios.common`.
"""
