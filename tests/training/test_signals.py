"""A signal ends a run where it can be saved, on all ranks, and it goes on from there as if it had never stopped."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import SignalExit
from tests.ranks.signalling import PLACES
from tests.support.forks import Outcome
from tests.support.processes import run_forked
from tests.support.reference import regression_data, tiny_trainer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals")
NUMBERS = {name: int(getattr(signal, name, 0)) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")}
RANKS = Path(__file__).parents[1] / "ranks"

Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """How each process of each case of the script ended."""
    output = run_forked(RANKS / "signalling.py", tmp_path_factory.mktemp("signals"))
    cases = json.loads(output.stdout.splitlines()[-1])
    return {name: [Outcome(**one) for one in found] for name, found in cases.items()}


def end_of(outcome: Outcome) -> str:
    """What all of a run's state came to, in its last line."""
    assert outcome.status == 0
    assert outcome.lines[-1].startswith("end model ")
    return outcome.lines[-1]


def without_paths(lines: list[str]) -> list[str]:
    return [re.sub(r"([ '])/\S+/", r"\1", line) for line in lines]


# Training


@pytest.mark.processes
@pytest.mark.parametrize("name", NUMBERS)
def test_a_signal_ends_training_after_the_update_and_the_process_with_its_status(outcomes: Outcomes, name: str):
    interrupted, *resumed = outcomes[name]
    assert interrupted.status == 128 + NUMBERS[name]
    error = "KeyboardInterrupt" if name == "SIGINT" else "SignalExit"
    assert without_paths(interrupted.lines)[1:] == [
        f"stopped after update 2: {name} came.",
        "on_training_run_end",
        "To continue: `train(..., resume_from='final')`",
        f"{error}: {name} has ended the run. It can be resumed from final.",
    ]
    assert all(end_of(one) == end_of(outcomes["undisturbed"][0]) for one in resumed)


@pytest.mark.processes
@pytest.mark.parametrize("case", PLACES)
def test_a_run_that_was_ended_anywhere_resumes_to_the_same_end(outcomes: Outcomes, case: str):
    _, _, updates, position = PLACES[case]
    interrupted, resumed = outcomes[case]
    assert interrupted.status == 143
    assert f"stopped after update {updates}: SIGTERM came." in interrupted.lines
    assert resumed.lines[0].endswith(position)
    assert end_of(resumed) == end_of(outcomes["undisturbed"][0])


@pytest.mark.processes
def test_a_user_callback_is_not_interrupted(outcomes: Outcomes):
    (slow,) = outcomes["in a user callback"]
    assert slow.status == 143
    assert slow.lines[:2] == ["done", "stopped after update 2: SIGTERM came."]
    (predicting,) = outcomes["in a prediction by a callback"]
    assert predicting.status == 143
    assert predicting.lines[:2] == ["9 predictions", "stopped after update 6: SIGTERM came."]


# The second signal


@pytest.mark.processes
@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_signal_ends_the_process_at_once_and_leaves_the_state_before_valid(outcomes: Outcomes, second: str):
    ended, resumed = outcomes[f"a second {second} during the save"]
    assert ended.status == 128 + NUMBERS[second]
    told = ["on_exception: KeyboardInterrupt", "KeyboardInterrupt: "] if second == "SIGINT" else []
    assert ended.lines[1:] == ["stopped after update 3: SIGTERM came.", *told]
    assert "step_2: epoch 1, after update 2" in resumed.lines[0]
    assert end_of(resumed) == end_of(outcomes["undisturbed"][0])


@pytest.mark.processes
def test_repeated_signals_of_launchers_and_schedulers_do_not_interrupt_a_save(outcomes: Outcomes):
    echo, resumed = outcomes["an echo"]
    assert echo.status == 143
    assert "still here" in echo.lines
    assert end_of(resumed) == end_of(outcomes["undisturbed"][0])
    (warned,) = outcomes["a SIGTERM after SIGUSR1"]
    assert warned.status == 138
    assert without_paths(warned.lines)[-1] == "SignalExit: SIGUSR1 has ended the run. It can be resumed from final."


@pytest.mark.processes
@pytest.mark.parametrize("name", NUMBERS)
def test_workers_outlive_a_signal_to_all_processes_so_that_the_update_can_be_finished(outcomes: Outcomes, name: str):
    interrupted, *resumed = outcomes[f"{name} to workers too"]
    assert interrupted.status == 128 + NUMBERS[name]
    assert f"stopped after update 1: {name} came." in interrupted.lines
    assert all(end_of(one) == end_of(outcomes["undisturbed with workers"][0]) for one in resumed)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("evaluate", ["stopped after update 12: SIGTERM came.", "on_evaluation_run_end"]),
        ("predict", ["on_exception: SignalExit"]),
    ],
)
def test_a_signal_ends_a_pass_before_the_next_batch(outcomes: Outcomes, where: str, said: list[str]):
    (ended,) = outcomes[f"in {where}"]
    assert ended.status == 143
    # The first line is of the training before it; nothing is left half written.
    assert ended.lines[1:] == [*said, "left: ['log_0']", "SignalExit: SIGTERM has ended the run."]


# Handlers


@pytest.mark.processes
def test_handlers_are_restored_however_a_run_ends(outcomes: Outcomes):
    (outcome,) = outcomes["handlers"]
    assert outcome.lines[0] == "during the run: [False, False, False, False]"
    endings = ["on_training_run_end", "on_training_run_end", "RuntimeError", "SignalExit", "KeyboardInterrupt"]
    restored = [number for number, line in enumerate(outcome.lines) if line == "restored: True"]
    assert [outcome.lines[number - 1] for number in restored] == endings


@pytest.mark.processes
def test_a_signal_that_the_user_handles_or_ignores_stays_the_users(outcomes: Outcomes):
    (before,) = outcomes["own handler"]
    assert before.status == 0
    assert before.lines == ["own handler of SIGUSR1", "on_training_run_end", "restored: True"]
    (meanwhile,) = outcomes["handler set during the run"]
    assert meanwhile.status == 0
    assert meanwhile.lines == ["on_training_run_end", "own handler"]


@pytest.mark.processes
def test_in_a_thread_no_handler_is_set(outcomes: Outcomes):
    (outcome,) = outcomes["in a thread"]
    assert outcome.status == 0
    assert outcome.lines == ["default: True", "on_training_run_end"]


@pytest.mark.processes
def test_a_process_that_user_code_has_forked_can_be_terminated(outcomes: Outcomes):
    (outcome,) = outcomes["a fork"]
    assert outcome.lines[0] == "helper: -15"


# Several ranks


@pytest.mark.processes
@pytest.mark.parametrize("case", ["in a hook", "", "in an evaluation"])
def test_when_one_rank_gets_a_signal_all_stop_after_the_same_update_and_resume_to_the_same_end(
    outcomes: Outcomes, case: str
):
    *interrupted, first, second = outcomes[f"one rank of two {case}".strip()]
    (stop,) = {line for outcome in interrupted for line in outcome.lines if line.startswith("stopped")}
    name = "SIGINT" if case == "in a hook" else "SIGTERM"
    match = re.fullmatch(rf"stopped after update (\d+): {name} came to rank 1 of 2\.", stop)
    assert match is not None
    # Ranks agree after each update where a hook of the user's may want to stop, else now and then: here within 4.
    assert int(match[1]) in {"in a hook": range(3, 4), "": range(4, 9), "in an evaluation": range(20, 21)}[case]
    assert [outcome.status for outcome in interrupted] == [128 + NUMBERS[name]] * 2
    assert [end_of(first), end_of(second)] == [end_of(rank) for rank in outcomes["undisturbed ranks"]]


@pytest.mark.processes
@pytest.mark.parametrize(("method", "ending"), [("evaluate", "on_evaluation_run_end"), ("predict", "SignalExit")])
def test_when_one_rank_gets_a_signal_all_leave_a_pass_before_the_same_round(
    outcomes: Outcomes, method: str, ending: str
):
    first, second = outcomes[f"one rank of two in {method}"]
    assert [first.status, second.status] == [143, 143]
    assert first.lines == second.lines
    *_, told, batches, error = first.lines
    assert told.endswith(ending)
    assert 2 <= int(batches.removeprefix("batches: ")) < 1000
    assert error == "SignalExit: SIGTERM has ended the run."


@pytest.mark.processes
def test_a_time_limit_ends_all_ranks_after_the_same_update_and_they_resume_to_the_same_end(outcomes: Outcomes):
    *stopped, first, second = outcomes["out of time"]
    for outcome in stopped:
        assert outcome.status == 0
        assert "stopped after update 3: `max_duration` (1000) is over." in outcome.lines
    assert [end_of(first), end_of(second)] == [end_of(rank) for rank in outcomes["undisturbed ranks"]]


# In this process


class Fails(TrainerCallback):
    """Fails in one event, and in what is fired because of that."""

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        raise RuntimeError("the first")

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        raise ValueError(f"the second, after {exception}")


def test_a_callback_that_fails_in_on_exception_does_not_hide_what_went_wrong_before():
    trainer = tiny_trainer(Fails)
    with (
        pytest.warns(UserWarning, match="failed in `on_exception` with ValueError: the second, after the first"),
        pytest.raises(RuntimeError, match="^the first"),
    ):
        trainer.train(regression_data(8), 1)
    trainer.callback_handler.clear_callbacks()
    trainer.train(regression_data(8), 1)  # and the trainer can be used again
    assert trainer.run_state.epochs == 1


def test_the_exception_of_a_signal_names_the_signal_and_is_not_one_that_a_script_would_swallow(tmp_path: Path):
    error = SignalExit(signal.SIGTERM, tmp_path)
    assert not isinstance(error, Exception)
    assert (error.code, error.signal_number, error.saved_to) == (143, 15, tmp_path)
    assert str(error) == f"SIGTERM has ended the run. It can be resumed from {tmp_path}."
