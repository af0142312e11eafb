"""Numbers and durations as short text."""


def format_number(value: float) -> str:
    """A number with four significant digits, at most 10 characters wide below 1e100.

    >>> [format_number(value) for value in (0.123456, 1.0, 0.0, 12345.6, 1e-9, -123456789)]
    ['0.1235', '1.000', '0.000', '12346', '1.000e-09', '-1.235e+08']
    """
    size = abs(value)
    if size == 0 or 1e-3 <= size < 1000:
        return f"{value:#.4g}"
    if 1000 <= size < 1e7:
        return f"{value:.0f}"
    return f"{value:.3e}"


def format_rate(value: float) -> str:
    """How many a second: a whole number, unless it is small.

    >>> [format_rate(value) for value in (0.1234, 5.0, 121.4, 12345.6)]
    ['0.1234', '5.00', '121', '12346']
    """
    return f"{value:.0f}" if value >= 99.5 else f"{value:#.3g}" if value >= 1 else format_number(value)


def format_clock(seconds: float) -> str:
    """A running time, as on a clock.

    >>> [format_clock(seconds) for seconds in (7.9, 90, 3725)]
    ['00:07', '01:30', '1:02:05']
    """
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes:02}:{whole_seconds:02}"


def format_duration(seconds: float) -> str:
    """The duration of something finished.

    >>> [format_duration(seconds) for seconds in (0.0042, 7.94, 90, 3725)]
    ['4ms', '7.9s', '01:30', '1:02:05']
    """
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 59.95 else format_clock(round(seconds))


def format_count(count: int, word: str, words: str | None = None) -> str:
    """A count with its unit: `word`, or `words` for several.

    >>> [format_count(1, "update"), format_count(2, "update"), format_count(2, "batch", "batches")]
    ['1 update', '2 updates', '2 batches']
    """
    return f"{count} {word if count == 1 else words or word + 's'}"


def format_update_size(per_device: int, accumulated: int, processes: int) -> str:
    """The number of samples in an update, and how it comes about.

    >>> [format_update_size(8, 1, 1), format_update_size(8, 4, 2)]
    ['8 samples each', '64 samples each (8 x 4 accumulated x 2 processes)']
    """
    factors = [str(per_device)]
    if accumulated != 1:
        factors.append(f"{accumulated} accumulated")
    if processes != 1:
        factors.append(f"{processes} processes")
    product = f" ({' x '.join(factors)})" if len(factors) > 1 else ""
    return f"{format_count(per_device * accumulated * processes, 'sample')} each{product}"
