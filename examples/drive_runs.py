"""Drive runs without a person: change a setting, train, keep the change if it is better. 20 rounds on digits.

The script that trains is another program. This one knows its settings, its exit code and its result.json, and nothing
else. Three of the rounds go wrong: one crashes, one diverges, and one hangs.

    python examples/drive_runs.py
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("digits_to_drive.py")
FIRST = {"lr": 3e-4, "width": 16, "batch_size": 64, "weight_decay": 0.0}
CHANGES = {
    "lr": lambda value, generator: round(value * generator.choice([0.3, 0.5, 2, 3]), 8),
    "width": lambda value, generator: max(4, int(value * generator.choice([0.5, 2, 4]))),
    "batch_size": lambda value, generator: min(256, max(8, int(value * generator.choice([0.5, 2])))),
    "weight_decay": lambda value, generator: generator.choice([0.0, 1e-3, 1e-2, 1e-1]),
}
MISTAKES = {6: {"outputs": 8}, 11: {"lr": 1e30}, 16: {"seconds_per_row": 1000.0}}


def changed(settings, number, generator):
    """The settings of a round: those kept so far, with another value for one of them."""
    if number == 1:
        return settings
    name = generator.choice(list(CHANGES))
    return {**settings, name: CHANGES[name](settings[name], generator), **MISTAKES.get(number, {})}


def run(settings, folder, num_updates, limits):
    """Train, and return how it ended ("finished", "stopped", "failed" or "hung") and the result, which may be None."""
    command = [sys.executable, str(SCRIPT), json.dumps(settings), "--folder", str(folder)]
    folder.mkdir(parents=True)
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, "--num-updates", str(num_updates)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be killed with all workers of its loaders
        )
        try:
            is_alive = wait_for(process, folder, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = result_in(folder)
    if not is_alive:
        return "hung", result
    # A script may also fail before its run begins, or after it has ended.
    return "failed" if result is None or process.returncode else result["status"], result


def wait_for(process, folder, limits):
    """Wait for the end of the process; False if it shows no sign of life for too long."""
    began = time.time()
    while process.poll() is None:
        result = result_in(folder)
        sign, limit = (began, limits["start"]) if result is None else (result["updated"], limits["update"])
        if time.time() - sign > limit:
            return False
        time.sleep(0.1)
    return True


def result_in(folder):
    path = folder / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def best_value(result):
    """The best value of a run that has ended well; smaller than any value for another one."""
    return result["best"]["value"] if result["status"] in ("finished", "stopped") and result["best"] else float("-inf")


def main(num_rounds, folder, num_updates, limits):
    generator = random.Random(0)
    kept, best, rounds = FIRST, float("-inf"), []
    for number in range(1, num_rounds + 1):
        settings = changed(kept, number, generator)
        ending, result = run(settings, folder / f"{number:02}", num_updates, limits)
        value = best_value(result) if ending in ("finished", "stopped") else float("-inf")
        is_better = value > best
        if is_better:
            kept, best = settings, value
        rounds.append({"number": number, "settings": settings, "ending": ending, "is_kept": is_better})
        why = f"accuracy {value:.4f}" if value > float("-inf") else (result or {"reason": ""})["reason"][:60]
        print(f"{number:5}  {'keep' if is_better else 'discard':7}  {ending:8}  {why}", flush=True)
    (folder / "rounds.json").write_text(json.dumps(rounds, indent=2))

    print("\nThe best runs")
    command = [sys.executable, "-m", "pytorch_accelerated", "runs", str(folder), "--json"]
    ranking = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)["runs"]
    ended = [each for each in ranking if each["status"] in ("finished", "stopped")]
    for each in ended[:5]:
        print(f"{each['name']:>5}  {each['best']['value']:.4f}  {result_in(Path(each['path']))['notes']}")
    print(f"\nKept: {kept}\nModel: {result_in(Path(ended[0]['path']))['files']['best model']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rounds", type=int, default=20)
    parser.add_argument("--num-updates", type=int, default=200, help="of each run")
    parser.add_argument("--folder", type=Path, default="outputs/driven", help="a new one")
    parser.add_argument("--seconds-to-start", type=float, default=120.0, help="until a run has a result.json")
    parser.add_argument("--seconds-to-update", type=float, default=30.0, help="between two changes of it")
    arguments = parser.parse_args()
    limits = {"start": arguments.seconds_to_start, "update": arguments.seconds_to_update}
    main(arguments.num_rounds, arguments.folder, arguments.num_updates, limits)
