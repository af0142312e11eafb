"""A terminal for the output of this process, and what a person would see on it."""

import fcntl
import os
import re
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


class Terminal:
    """A real pseudo-terminal. Wider than tall: nothing scrolls off it."""

    def __init__(self, columns: int) -> None:
        self._reading_end, writing_end = os.openpty()
        fcntl.ioctl(writing_end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        os.set_blocking(self._reading_end, False)
        self.file = os.fdopen(writing_end, "w", buffering=1, encoding="utf-8")
        self._bytes = b""

    @property
    def received(self) -> str:
        """Every character that was written so far."""
        self.file.flush()
        try:
            while chunk := os.read(self._reading_end, 65536):
                self._bytes += chunk
        except BlockingIOError:
            pass
        return self._bytes.decode()

    @property
    def screen(self) -> list[str]:
        """The visible lines, without empty ones at the end."""
        lines, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[A|.", self.received, flags=re.DOTALL):
            if token == "\x1b[A":
                row -= 1
            elif token == "\r":
                column = 0
            elif token == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            else:
                line = lines[row].ljust(column)
                lines[row] = line[:column] + token + line[column + 1 :]
                column += 1
        return "\n".join(line.rstrip() for line in lines).rstrip().splitlines()

    def close(self) -> None:
        self.file.close()
        os.close(self._reading_end)


@contextmanager
def in_a_terminal(columns: int = 100) -> Iterator[Terminal]:
    """Send Python's output and errors to a terminal of `columns` characters."""
    terminal = Terminal(columns)
    try:
        with redirect_stdout(terminal.file), redirect_stderr(terminal.file):
            yield terminal
    finally:
        terminal.close()
