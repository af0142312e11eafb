"""The tools of a `Trainer`: what looks at a run before and after it, writes it in other forms, or checks it.

No run needs them. Each is imported from `extras/` when it is called first, so that a folder there can be taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pytorch_accelerated.facts.settings import check_positive_count
from pytorch_accelerated.loop import checks, preparing
from pytorch_accelerated.loop.hooks import TrainerHooks

if TYPE_CHECKING:
    from pytorch_accelerated.extras.looking import LearningRateTest, PreflightReport, Shown, TrainingSummary
    from pytorch_accelerated.extras.proving import Proof, Replay
    from pytorch_accelerated.loop.callback import Trainer
    from pytorch_accelerated.record.history import RunHistory


class TrainerTools(TrainerHooks):
    """The methods of `Trainer` that no run needs, in the order in which people need them."""

    def preflight(
        self, train_dataset: Any, num_epochs: int | None, eval_dataset: Any = None, **train_arguments: Any
    ) -> PreflightReport:
        """Rehearse a run before it is started: one update, one evaluation batch, metric names, save, reload, disk
        space.

        Takes the arguments of `train`. Callbacks that print or write files are left out. Afterwards everything that the
        trainer can see is restored. Must be called by all ranks.

        Returns:
            The findings; print them.

        Raises:
            Any error that the run would have raised.
        """
        from pytorch_accelerated.extras.looking.preflight import rehearse

        trainer = self._refuse_within_a_run("preflight", "Call it before `train`.")
        arguments = {"train_dataset": train_dataset, "num_epochs": num_epochs, "eval_dataset": eval_dataset}
        return rehearse(trainer, {**arguments, **train_arguments})

    def summary(
        self,
        train_dataset: Any = None,
        *,
        batch: Any = None,
        depth: int = 3,
        processes: int | None = None,
        **train_arguments: Any,
    ) -> TrainingSummary:
        """The model as it trains: modules, shapes, parameters, and memory and operations of one update.

        Makes one update, through `calculate_train_batch_loss` and all other hooks, and restores everything afterwards.
        Of the callbacks only those take part that declare `prepares_run`. Must be called by all ranks.

        Args:
            train_dataset: the training data; or
            batch: a batch as a loader would yield it.
            depth: levels of modules to list.
            processes: also compute what the run would be on that many: rows and updates, bytes sent, and memory of a
                rank with and without sharding.
            train_arguments: arguments of `train` that say how to update: batch size, accumulation, clipping, loaders.

        Returns:
            The findings for this rank; print them, or let a notebook show them.

        Raises:
            ArgumentTypeError, ConfigurationError: for invalid input.
            Any error that training would have raised.
        """
        from pytorch_accelerated.extras.looking.summary import summarise

        trainer = self._refuse_within_a_run("summary", "Call it before `train`.")
        if processes is not None:
            check_positive_count("processes", processes)
        return summarise(trainer, train_dataset, batch, depth=depth, processes=processes, arguments=train_arguments)

    def show_batch(self, train_dataset: Any, num_epochs: int | None = 1, **arguments: Any) -> Shown:
        """What the model sees: the first batch of a run as pictures, masks, texts and rows.

        The batch comes through the loader, workers and augmentation of the run, and equals its first batch to the bit,
        if the trainer has a `seed` or nothing draws random numbers meanwhile. What `calculate_train_batch_loss` gives
        the model instead of a part of the batch is shown as ``model input``. Computes one update, does not apply it,
        and restores everything afterwards. Must be called by all ranks.

        Pictures are floats or uint8 with 1, 3 or 4 channels, ``[N, C, H, W]`` or ``[N, H, W, C]``; masks are whole
        numbers ``[N, H, W]`` of the size of a picture; texts are strings; rows are ``[N]`` or ``[N, F]``. Of anything
        else the shape is shown.

        Args:
            train_dataset: the training data.
            num_epochs: of the run.
            arguments: further ones of `train`, and what to say of the batch:

                - `kinds`: "image", "mask", "text" or "row" by the place in the batch, such as ``{"[0]": "image"}``, for
                  what isn't recognised;
                - `class_names`: of targets that are class numbers;
                - `decode`: makes a text of a list of token numbers, such as ``tokenizer.decode``;
                - `samples`: how many to show, 12 by default.

        Returns:
            The samples of this rank: the last line of a notebook's cell shows them; elsewhere `print` or `plot` them.

        Raises:
            ConfigurationError: for a kind that doesn't exist, or a place that the batch doesn't have.
            Any error that the run would have raised.
        """
        from pytorch_accelerated.extras.looking.showing import show_batch

        trainer = self._refuse_within_a_run("show_batch", "Call it before `train`.")
        arguments |= {"train_dataset": train_dataset, "num_epochs": num_epochs}
        return show_batch(trainer, arguments)

    def find_lr(
        self,
        train_dataset: Any,
        *,
        min_lr: float = 1e-6,
        max_lr: float = 10.0,
        num_updates: int = 200,
        **train_arguments: Any,
    ) -> LearningRateTest:
        """Try growing learning rates, and suggest one: the range test of Smith (2015), arXiv 1506.01186.

        Trains for up to `num_updates` updates, with a rate that grows by a constant factor, and stops when the loss
        grows. Then everything is as before to the bit: model, optimizer, history and generators. Of the callbacks only
        those take part that declare `prepares_run`. Waits for the device once per update. Must be called by all ranks.

        Args:
            train_dataset: the training data.
            min_lr: the first rate.
            max_lr: the last rate. Parameter groups keep their ratios; the largest has this rate.
            num_updates: the number of updates, at least 20. They go through the data more than once if these are few.
            train_arguments: arguments of `train` that say how to update: batch size, accumulation, clipping, loaders.

        Returns:
            The suggestion, the losses and a `plot`.

        Raises:
            ArgumentTypeError, ConfigurationError: for invalid input, or an optimizer without learning rates.
        """
        from pytorch_accelerated.extras.looking.learning_rates import find_learning_rate

        trainer = self._refuse_within_a_run("find_lr", "Call it before `train`.")
        rates = {"min_lr": min_lr, "max_lr": max_lr, "num_updates": num_updates}
        return find_learning_rate(trainer, train_dataset, **rates, arguments=train_arguments)

    def rows_of(
        self, update: int, train_dataset: Any = None, num_epochs: int | None = None, **train_arguments: Any
    ) -> list[Any]:
        """The rows of the training dataset that an update uses, over all ranks, computed without a log.

        Must be called by all ranks; without arguments of `train` and without a sampler of your own, one alone may call
        it. Within a run it changes nothing.

        Args:
            update: its number, from 1, as `RunState.updates` counts.
            train_dataset: the training data of a run that need not exist; default: the last call of `train`.
            num_epochs: of that run.
            train_arguments: further arguments of `train`, those that say how to train: batch size, accumulation,
                loaders, `resume_from`. Nothing is trained.

        Returns:
            Indices in the dataset, in the order of the epoch; keys, if a sampler of your own yields others.

        Raises:
            ConfigurationError: if the run has no such update, if its order depends on a seed that is not known, or if
                the data is a stream.
        """
        from pytorch_accelerated.extras.looking.rehearsal import find_plan

        plan = find_plan(cast("Trainer", self), "rows_of", train_dataset, num_epochs, train_arguments)
        return plan.rows_of(update)

    def updates_of(
        self, row: int, train_dataset: Any = None, num_epochs: int | None = None, **train_arguments: Any
    ) -> list[int]:
        """The numbers of the updates that use a row of the training dataset, up to the planned end of the run.

        For the other arguments, and who must call it, see `rows_of`.

        Args:
            row: its index in the dataset.
        """
        from pytorch_accelerated.extras.looking.rehearsal import find_plan

        plan = find_plan(cast("Trainer", self), "updates_of", train_dataset, num_epochs, train_arguments)
        return plan.updates_of(row)

    def show_predictions(self, dataset: Any = None, **arguments: Any) -> Shown:
        """The first batch of an evaluation, with what the model predicts for each sample; otherwise as `show_batch`.

        Where loss function and shapes say that outputs are scores of classes, a prediction is the class with the
        highest one, also for each pixel; of one score, or one for each label, it is 1 or 0. Other outputs are shown as
        they are.

        Args:
            dataset: the data; default: the last evaluation dataset.
            arguments: further ones of `evaluate`, and what `show_batch` takes to say of the batch.
        """
        from pytorch_accelerated.extras.looking.showing import show_predictions

        trainer = self._refuse_within_a_run("show_predictions", "Call it when the run is over.")
        return show_predictions(trainer, {**arguments, "dataset": dataset})

    def export(
        self,
        path: str | Path,
        dataset: Any,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> Path:
        """Write the model in evaluation mode, in a form that needs neither its code nor this library. Must be called by
        all ranks; the first one writes.

        The inputs come from the first batch that `predict` would make of the data. The first dimension may have any
        size afterwards; a line has the sizes of the others. What the file computes is compared with what the model
        computes in `predict`; what a hook of yours does around it, such as a softmax, is not in the file, and a line
        says so. It says which run it comes from.

        Args:
            path: ``.onnx`` for ONNX, ``.pt2`` for `torch.export`, ``.safetensors`` for the weights alone. An existing
                file is replaced, as a whole.
            dataset: the data, at least two rows.
            dataloader_kwargs: override the library's defaults for evaluation.
            collate_fn: combines samples into a batch; default: the last one given.

        Returns:
            The path.

        Raises:
            ConfigurationError: for another ending, or a model that is sharded, or that the hook does not call.
            PytorchAcceleratedError: if it cannot be exported, or the file computes something else.
            MissingDependencyError: if ``onnxscript`` or ``onnxruntime`` is not installed.
        """
        from pytorch_accelerated.extras.exporting import export_model

        trainer = self._refuse_within_a_run("export", "Call it when the run is over.")
        loader = preparing.prediction_loader(dataset, 2, dataloader_kwargs, collate_fn or self.collate_fn)
        return export_model(trainer, Path(path), loader)

    def evaluate_states(self, folder: str | Path, *, follow: bool = True, **arguments: Any) -> None:
        """Evaluate the training states of a run that continues in another process, oldest first, each once. Must be
        called by all ranks.

        The trainer has the model, the loss function and the metrics of the run; it needs no optimizer. The results are
        files in ``evaluations`` in `folder`, which the run enters if it has an `EvaluateBesideCallback`. Started again
        after it was killed, it continues. States that the run deletes meanwhile are left out. Multiple processes may do
        this for one run, and share the states. Afterwards the trainer has the model of the last state.

        Args:
            folder: the folder of the states, on a disk that both see. It need not exist yet.
            follow: wait for further states until the run is over. A run without that callback, or stopped by a signal,
                never counts as over. False: evaluate the states that are there.
            arguments: for `evaluate`. With the batch size and the number of ranks of an evaluation in the run, the
                values are the same to the bit.

        Raises:
            ConfigurationError: without any dataset.
            InvalidCheckpointError: if a state is damaged, or belongs to another model.
        """
        from pytorch_accelerated.extras.beside import evaluate_states

        trainer = self._refuse_within_a_run("evaluate_states", "Call it in another process.")
        evaluate_states(trainer, Path(folder), follow=follow, **arguments)

    def replay(self, states: str | Path, update: int, *, debug: bool = False, **train_arguments: Any) -> Replay:
        """Go back to just before an update of a run that saved training states, and look at it: its rows and their
        losses, its batch, its gradient, and the weights before and after it.

        Trains from the nearest state before it, or from the beginning of the run if the trainer is new. The update is
        that of the run to the bit, if the run resumes exactly. Afterwards everything is as before: model, optimizer,
        history, generators, and what your objects keep. Callbacks that print or write files are left out. Must be
        called by all ranks.

        Args:
            states: the folder of the run's training states, or one of them.
            update: the number of the update, from 1.
            debug: stop in the debugger before the forward pass of each batch of the update, where `trainer`, `batch`
                and `rows` can be looked at.
            train_arguments: the arguments of `train`; default: as in the trainer's last `train`.

        Returns:
            What was found; print it.

        Raises:
            ConfigurationError: if no state is from before the update, or the run does not have that many updates.
        """
        from pytorch_accelerated.extras.proving.replay import replay

        trainer = self._refuse_within_a_run("replay", "Call it when the run is over.")
        return replay(trainer, states, update, debug, train_arguments)

    def branch(
        self,
        states: str | Path,
        update: int,
        into: str | Path,
        *,
        trunk: str | Callable[[], tuple[Any, Mapping[str, Any]]],
        **train_arguments: Any,
    ) -> RunHistory:
        """Train this run as a branch of another one: with its past up to an update, and what differs from there on.

        Weights, moments of the optimizer, history, order of rows and randomness are those of the trunk after the
        update, to the bit. Whatever this trainer and its arguments have otherwise than the trunk counts from the next
        update on: loss, model settings such as dropout, callbacks, clipping, `leave_out`, evaluation sets, settings of
        the optimizer, and the schedule, which stands where it would if the run had had it from the start. Without a
        difference, the run is the trunk's to the bit.

        The first state of the branch, ``branch_<update>`` in `into`, has the files of the trunk's state as hard links,
        so it takes no space, and stays if the trunk deletes its own. If the trunk has no state after that very update,
        it is trained there again from the nearest one before. All states of the branch say where it comes from. The
        same call continues a branch that was killed. Must be called by all ranks.

        Callbacks keep what they know, but not their files: the best model so far stays with the trunk, and the search
        for it starts again.

        Args:
            states: the folder of the training states of the trunk.
            update: the last one that both have in common, from 1.
            into: the folder of the branch. A `SaveTrainingStateCallback` of this trainer must save there.
            trunk: returns a new trainer and the arguments of `train` of the trunk, as its script makes them; or the
                place of such a function, such as ``"train.py:make_run"``.
            train_arguments: the arguments of `train` for this run.

        Returns:
            The history of the run, from the beginning of the trunk.

        Raises:
            ConfigurationError: if the trunk does not have that update, or what was changed would leave the runs
                without rows and randomness in common: the seed, or the number of rows of an update.
            InvalidCheckpointError: if the state of the trunk is damaged.
            Any error of `train`.
        """
        from pytorch_accelerated.extras.proving.branch import branch

        trainer = self._refuse_within_a_run("branch", "Call it when the run is over, or use another trainer.")
        return branch(trainer, states, update, into, trunk, train_arguments)

    def measure(
        self,
        states: str | Path,
        function: Callable[[Any], Any],
        *,
        name: str | None = None,
        every: int | None = None,
        updates: Collection[int] | None = None,
        event: str = "on_optimizer_step_end",
        processes: int = 1,
        factory: str | Callable[[], tuple[Any, Mapping[str, Any]]] | None = None,
        **train_arguments: Any,
    ) -> RunHistory:
        """Add a quantity to the history of a finished run that saved training states: the values are those that a
        callback would have recorded while it trained, to the bit.

        Trains again from the nearest states before the updates. If that doesn't give the losses, learning rates and
        gradient norms that the run has recorded, and at its end the weights that it has saved, it is an error, and
        nothing is written. Afterwards everything is as before, but for the file ``measured.json`` next to the states:
        `read_run_history`, ``compare`` and ``runs`` read it. Callbacks that print or write files are left out. Must be
        called by all ranks.

        Args:
            states: the folder of the run's training states.
            function: gets the trainer, and returns a number, or a dict of numbers by name. It is called on all ranks;
                what it returns on the first one counts. Model, loss function, gradients and the generators of torch,
                numpy and random are given back after each call, so that it may call `eval()` or `predict`, or draw.
            name: of a single number; default: the function's. A name that was measured before is measured again, and
                its earlier values go.
            every: the distance between the updates; default: each one.
            updates: instead, the numbers of the updates, from 1.
            event: "on_optimizer_step_end": after the update; or "on_optimizer_step_start": before it is applied, with
                its gradients, complete and before they are clipped.
            processes: how many to train in, each with a part of the updates.
            factory: makes the run again in new processes, see `prove`. It is needed if this trainer has trained, and no
                state is from before the first of the updates; and for a trainer of your own class in `processes`.
            train_arguments: the arguments of `train`; default: as in the trainer's last `train`.

        Returns:
            The history of the run, with the new values in their places.

        Raises:
            ArgumentTypeError, ConfigurationError: for invalid input, or a run that can't be trained again as it was.
        """
        from pytorch_accelerated.extras.proving.measure import Quantity, measure

        trainer = self._refuse_within_a_run("measure", "Call it when the run is over.")
        quantity = Quantity(function, name or str(getattr(function, "__name__", "measured")), event)
        chosen: dict[str, Any] = {"every": every, "updates": updates, "processes": processes, "factory": factory}
        return measure(trainer, states, quantity, given=train_arguments, **chosen)

    def prove(
        self,
        train_dataset: Any,
        updates: int = 20,
        *,
        factory: str | Callable[[], tuple[Any, Mapping[str, Any]]] | None = None,
        **train_arguments: Any,
    ) -> Proof:
        """Train a few updates uninterrupted, and again in every way that must give the same result; name what differs.

        They are trained again, resumed from a training state before each update, without workers and with two, in twice
        as many batches of half the size; and in new processes, killed within an update and resumed, and on two ranks.
        Afterwards everything is as before, but for files and what other libraries keep: model, optimizer, history,
        generators, hooks, and what your objects keep. Callbacks that print or write files are left out. Must be called
        in a single process.

        Args:
            train_dataset: the training data.
            updates: how many to train, in short epochs: two or more of them if the run has multiple epochs. Without
                `num_epochs` or `max_num_train_steps`, it is also the length of the run for schedules.
            factory: makes the run again in other processes: a function of a module or script, without arguments, that
                returns a new trainer and its arguments of `train`, or the place of one, such as
                ``"train.py:make_run"``. Without it, they get a copy of this trainer, if it is a plain `Trainer`.
            train_arguments: the other arguments of `train`.

        Returns:
            The verdicts; print them.

        Raises:
            ArgumentTypeError, ConfigurationError: for invalid input.
            Any error that training would have raised.
        """
        from pytorch_accelerated.extras.proving.prove import prove

        trainer = self._refuse_within_a_run("prove", "Call it before `train`.")
        return prove(trainer, train_dataset, updates, factory, train_arguments)

    def eject(self, path: str | Path, train_dataset: Any, **train_arguments: Any) -> Path:
        """Write the run as one readable PyTorch script without this library, which ends with the same bits.

        The script has a function `train`, to be called with the model, the loss function, the optimizer and the data
        that this trainer would get. Must be called before the trainer trains; on multiple ranks, by all, for a
        script that runs on as many.

        Args:
            path: the new file, whose name Python can import (`plain_run.py`). Missing folders are made.
            train_dataset: the training data.
            train_arguments: the other arguments of `train`.

        Raises:
            ConfigurationError: if the file exists or nothing can import it, or for the first part of the run that
                can't be written so.
        """
        from pytorch_accelerated.extras.ejecting.eject import eject

        trainer = self._refuse_within_a_run("eject", "Call it before `train`.")
        return eject(trainer, path, {**train_arguments, "train_dataset": train_dataset}, {})

    def _refuse_within_a_run(self, method: str, remedy: str) -> Trainer:
        """This trainer; an error within a run."""
        checks.refuse_within_a_run(self.run_context.control, method, remedy)
        return cast("Trainer", self)
