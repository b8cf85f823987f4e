"""A run: one configuration and one seed, in one folder, from the first step to the report, through any number of interruptions."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from gracecl import __version__, checkpoint, detectors, processes, streams
from gracecl.engine.allotment import Allotment
from gracecl.engine.cost import forward_flops
from gracecl.engine.engine import Engine
from gracecl.engine.live import Live
from gracecl.engine.loop import Callbacks, StopTraining
from gracecl.engine.recipe import Recipe, layout_of, name_flat_images, name_unfit_augmentation, named_device
from gracecl.errors import UserError
from gracecl.files import Written, as_name, check_format, make_folder, read_note, read_sealed, sealed, without_nul, write_text
from gracecl.images.augment import normalisation
from gracecl.lab import report
from gracecl.lab.report.runs import CHECKPOINT, RUN_FORMAT
from gracecl.lab.runs import remote
from gracecl.lab.runs.frozen import kept_features
from gracecl.lab.runs.limits import ALLOTTED, costs, measured
from gracecl.lab.runs.lock import locked
from gracecl.lab.runs.recorder import NoRecord, Recorder
from gracecl.lab.runs.trainer import Trainer
from gracecl.lab.runs.watch import Watch
from gracecl.machine import check_threads, forget_peak, peak_memory
from gracecl.nets import pixels
from gracecl.registry import spec
from gracecl.registry.objects import is_opaque
from gracecl.registry.options import LIMITS, NO_EFFECT_ON_RESULTS, Layout, RunOptions, run_name
from gracecl.registry.plugins import Code, Files, changed, digest_of, in_use
from gracecl.streams import Stream
from gracecl.streams.paced import paced

SECONDS_BETWEEN_CHECKPOINTS = 120.0
ALWAYS_WRITTEN = ("method", "net", "memory", "seed", "stream")
"""fields that every config.json has; an older one may lack others, which then have their defaults"""
LEFT_OUT = ("plugin_code", "tuned_on", *LIMITS)
"""fields that config.json has only where they are given"""
MEMORY = "memory"
"""the folder of the files of a memory on disk"""
STOPPED = "stopped"
"""the note in the folder of a run that a callback stopped: where, and why"""
COMMIT_VARIABLE = "GRACECL_COMMIT"
"""names the commit of code that was sent to a node without its repository"""
LATE_FILES = "plugin_files"
"""the entry of a checkpoint with the files that plugins loaded and their digest does not cover"""


@dataclass(frozen=True)
class RunConfig(RunOptions, Recipe):
    """A recipe, its stream, and how often to evaluate and save."""

    plugin_code: str | None = None
    """digest of the source of the run's plugins, which says what its names mean; None without any"""
    tuned_on: str | None = None
    """where a search chose options of the run, as its file of defaults says; None where no search is recorded"""

    def canonical(self) -> RunConfig:
        """Return the configuration with canonical expressions: `GRACE` becomes `grace(mose())`."""
        method = self.method if is_opaque(self.method) else repr(spec.parse_method(self.method))
        stream, boundaries = streams.from_anywhere(self.stream), detectors.canonical(self.boundaries)
        device, normalise = str(named_device(self.device)), pixels.meant(self.normalise, self.net)
        return replace(self, method=method, stream=stream, boundaries=boundaries, device=device, normalise=normalise)

    @property
    def title(self) -> str:
        return f"{self.method}, seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Return `<out>/<stream>/<method>/<hash>/<seed>`; the hash identifies the configuration without its seed."""
        return out / as_name(self.stream) / as_name(self.method) / run_name(asdict(self))


@dataclass(frozen=True)
class Work:
    """A run to execute: its configuration, its folder, and where its data and plugins are."""

    config: RunConfig
    folder: Path
    data_root: str | Path | None = None
    plugins: tuple[str, ...] = ()
    """modules and files that register what the configuration names"""
    live: Live = field(default=Live(), repr=False)
    """objects that a program gave in place of expressions"""

    @classmethod
    def new(
        cls,
        config: RunConfig,
        out: Path,
        data_root: str | Path | None = None,
        plugins: tuple[str, ...] = (),
        live: Live | None = None,
    ) -> Work:
        """Place a configuration below `out`, where an earlier attempt may have begun it."""
        with in_use(plugins) as code:
            config = replace(config.canonical(), plugin_code=code.digest)
        work = cls(config, config.folder(without_nul(out)), data_root, code.names, live or Live())
        work.check_code()
        return work

    @classmethod
    def begun(cls, folder: Path, data_root: str | Path | None = None, plugins: tuple[str, ...] = ()) -> Work:
        """Read the run in a folder, with the data and plugins noted there unless others are given."""
        file = folder / "config.json"
        try:
            written = report.read_config(folder) if report.line_for(folder) else read_sealed(file)
            given = {known.name for known in fields(RunConfig)} & written.keys() | set(ALWAYS_WRITTEN)
            config = RunConfig(**{name: written[name] for name in given})
            report.check_folder_name(folder, asdict(config))
        except FileNotFoundError:
            raise UserError(report.without_config(folder)) from None
        except UserError as error:
            raise UserError(f"{error}; {report.remedy_for_config(folder)}") from None
        except (KeyError, TypeError):
            raise UserError(f"{file} is damaged: a setting is missing; {report.remedy_for_config(folder)}") from None
        check_format(written.get("format", 1), RUN_FORMAT, file, "leave this run as it is")
        place = data_root or read_note(folder / "data_root") or None
        return cls(config, folder, place, plugins or tuple(read_note(folder / "plugins").splitlines()))

    @property
    def finished(self) -> bool:
        return report.is_finished(self.folder)

    @property
    def stopped(self) -> str | None:
        """Where and why a callback stopped the run; None where none did, or it went on since."""
        return read_note(self.folder / STOPPED) or None

    @property
    def threads(self) -> int | None:
        """The number that the run was begun with and keeps; None before that."""
        number = self._begun_with("threads")
        return number if isinstance(number, int) else None

    def as_begun(self) -> RunConfig:
        """Return the configuration with the layout and the features that the run began with, whatever would be chosen here."""
        layout = self._begun_with("layout_used")
        if layout not in ("contiguous", "channels_last"):
            return self.config
        match self._begun_with("features_used"):
            case {"backend": str(backend)}:
                return replace(self.config, layout=layout, features="onnx" if backend.startswith("onnx") else "torch")
        return replace(self.config, layout=layout, features="off")

    @property
    def allotted(self) -> Allotment | None:
        """What the run gets under its budgets, as it was measured when the run began; None before that, or without budgets."""
        written = self._begun_with(ALLOTTED)
        return Allotment.of(written) if isinstance(written, dict) else None

    def _begun_with(self, name: str) -> Any:
        """Return a value that config.json recorded when the run began; None before that."""
        try:
            return read_sealed(self.folder / "config.json").get(name)
        except (OSError, UserError):
            return None

    def run(
        self,
        watch: Watch | None = None,
        threads: int | None = None,
        callbacks: Callbacks | None = None,
        patience: float = 0.0,
    ) -> Path:
        """Execute the run to its end, from the last checkpoint if there is one; `threads` applies to a run that begins.

        A callback may stop it earlier: then everything is saved, and the folder notes where and why (`stopped`). Where another
        process works in the folder, the run waits `patience` seconds for it to end.
        """
        if self.config.store.startswith("disk") and (url := remote.url_of(self.folder)):
            raise UserError(
                f"a memory on disk cannot lie at {url}, as its file changes in place; use --store ram, or a folder as --out"
            )
        with self._held(patience) as upload:
            if not self.finished:
                remedy = "continue it from Python: call gracecl.run as it was called, with {name}= and out="
                self.live.check(f"the run in {self.folder}", vars(self.config), remedy)
                try:
                    with self.own_code() as code:
                        _train(replace(self, plugins=code.names), code, watch or Watch(), threads, callbacks, upload)
                except SystemExit as end:  # of a plugin; it would pass for a run that came to its end
                    raise UserError(
                        f"the run's own code asked to end the program (SystemExit: {end.code}); what was saved before is intact"
                    ) from None
        processes.wait_for_all()
        return self.folder

    @contextmanager
    def _held(self, patience: float) -> Iterator[Callable[[], None]]:
        """Hold the folder, and yield what uploads it. The first process of a group does, before the others look into it."""
        if not processes.is_first():
            processes.wait_for_all()
            yield lambda: None
            return
        try:
            make_folder(self.folder)
        except OSError as error:
            raise UserError(f"cannot make the run's folder ({error}); choose another --out") from None
        with locked(self.folder, patience), remote.kept(self.folder, patience) as upload:
            for left in (*self.folder.rglob("*.part"), *self.folder.glob(".tmp*")):  # of a process that was killed while it wrote
                left.unlink()
            processes.wait_for_all()
            yield upload

    @contextmanager
    def own_code(self) -> Iterator[Code]:
        """Activate the run's plugins and no others, if they are still the code it began with."""
        self.check_code()
        with in_use(self.plugins) as code:
            yield code

    def check_code(self) -> None:
        """Refuse plugins that were changed since the run began, without executing them."""
        began_with, named = self.config.plugin_code, ", ".join(self.plugins)
        if named and began_with is None:
            raise UserError(
                f"the run in {self.folder} began without plugins, and {named} would be executed in it; "
                f"delete {self.folder / 'plugins'} if there is one, and leave --plugin out"
            )
        if began_with and not named:
            raise UserError(
                f"the run in {self.folder} began with plugins, and nothing says where they are; name them with --plugin"
            )
        another = changed(self.plugins, _late_files(self.folder)) if digest_of(self.plugins) == began_with else named
        if another:
            raise UserError(
                f"{another} is not what it was when the run in {self.folder} began; "
                "put the file back, or start a new run with 'gracecl run' in another --out"
            )


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run between two steps; everything is saved, and the text says how to continue."""

    def __init__(self, text: str, number: int | None = None) -> None:
        super().__init__(text)
        self.number = number
        """of the signal"""


def run(config: RunConfig, out: Path, data_root: str | Path | None = None, watch: Watch | None = None) -> Path:
    """Run a configuration to its end, continuing where an earlier attempt stopped, and return its folder."""
    return Work.new(config, out, data_root).run(watch)


def resume(folder: Path, data_root: str | Path | None = None, watch: Watch | None = None) -> Path:
    """Continue the run in a folder from its last checkpoint, or from the beginning if there is none."""
    return Work.begun(folder, data_root).run(watch)


def build(
    config: RunConfig,
    record: Path,
    data_root: str | Path | None = None,
    kept: Written | None = None,
    callbacks: Callbacks | None = None,
    live: Live | None = None,
    allotted: Allotment | None = None,
) -> Trainer:
    """Build the trainer of a configuration at its first step; `kept` is what a checkpoint counts on of an earlier
    record.
    """
    engine, stream = learner_and_stream(config, data_root, live, allotted, record.parent / MEMORY)
    name_unfit_augmentation(config.augment, engine.method, engine.net.inputs)
    name_flat_images(config.augment, engine.method, stream.batch(0).x)
    recorder = Recorder(record, kept) if processes.is_first() else NoRecord()
    try:
        return Trainer(engine, stream, recorder, config, callbacks)
    except UserError:
        recorder.close()
        raise


def learner_and_stream(
    config: RunConfig,
    data_root: str | Path | None = None,
    live: Live | None = None,
    allotted: Allotment | None = None,
    folder: Path | None = None,
) -> tuple[Engine, Stream]:
    """Build the engine of a configuration at its first step, and its stream, both on the engine's device.

    `allotted` is what the run gets under its budgets; left out, it is measured. `folder` is where a memory on disk
    lies.
    """
    if allotted is None:
        allotted = measured(config, live or Live(), lambda other, given: _without_limits(other, data_root, given)) or Allotment()
    memory = config.memory if allotted.memory is None else allotted.memory
    engine, stream = _without_limits(replace(config, memory=memory), data_root, live, folder)
    engine.updates_per_step, engine.fit_images = allotted.updates, allotted.fit_images
    return engine, stream if allotted.complexity is None else paced(stream, allotted.complexity)


def _without_limits(
    config: RunConfig, data_root: str | Path | None, live: Live | None, folder: Path | None = None
) -> tuple[Engine, Stream]:
    """Build the engine and the stream as if there were no budgets; on a frozen trunk, of features where they can be used."""
    live = live or Live()
    kept = kept_features(config, data_root, live)
    if kept is None:
        stream = streams.build(config.stream, config.seed, data_root)
        inputs = normalisation(pixels.meant(config.normalise, config.net), stream.data.inputs)
    else:
        stream, inputs = kept.stream, kept.net.inputs
        config, live = replace(config, augment="none"), replace(live, net=kept.net, augment=None)
    streams.check_evaluations(stream)
    stream = stream if config.eval_images is None else stream.tested_on(config.eval_images)
    data = stream.data
    engine = config.build(inputs, data.classes, live, folder)
    stream = engine.as_seen(stream.to(engine.device))
    stream = stream if config.steps is None else stream.cut(config.steps)
    if not np.isin(data.test_y, stream.labels(stream.order)).any():
        raise UserError(
            f"none of the test images is of a class that the {len(stream)} steps of the stream show; "
            "use more steps, or other test images"
        )
    return engine, stream


def _train(
    work: Work, code: Code, watch: Watch, threads: int | None, callbacks: Callbacks | None, upload: Callable[[], None]
) -> None:
    config, folder = work.config, work.folder
    saved = folder / CHECKPOINT
    state = load_checkpoint(saved, config) if saved.exists() else None
    begun = replace(work.as_begun(), layout=state["layout"]) if state else work.as_begun()
    forget_peak()
    kept = Written.of(state["record"]) if state else None
    allotted = Allotment.of(state[ALLOTTED]) if state and ALLOTTED in state else work.allotted
    if allotted is None:
        allotted = measured(begun, work.live, lambda other, given: _without_limits(other, work.data_root, given))
    trainer = build(begun, folder / "metrics.jsonl", work.data_root, kept, callbacks, work.live.copied(), allotted)
    if trainer.engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.engine.device)
    begun_with = state["threads"] if state else work.threads
    with closing(trainer.recorder), with_threads(begun_with or threads or torch.get_num_threads()):
        if state is not None:
            _restore(trainer, state, saved)
        per_image = forward_flops(trainer.engine)
        told = {} if allotted is None else {ALLOTTED: allotted.as_text()}
        shared = {"processes": processes.count()} if processes.count() > 1 else {}
        processes.wait_for_all()
        if processes.is_first():
            _write_config(work, trainer, {"forward_flops": per_image, **told, **shared})
            (folder / STOPPED).unlink(missing_ok=True)
        try:
            _finish(trainer, config, code, saved, watch, told, upload)
        except StopTraining as stop:
            why = f": {stop}" if str(stop) else ""
            if processes.is_first():
                write_text(folder / STOPPED, f"after step {trainer.at} of {len(trainer.stream)}{why}")
            return
        record = trainer.recorder.sync()
        _note_peak(trainer)
    if not processes.is_first():
        return
    timing = vars(trainer.timing) | {"steps": len(trainer.stream), "run": run_name(asdict(config))} | costs(trainer, per_image)
    checkpoint.write_atomically(folder / "timing.json", lambda beside: beside.write_text(sealed(timing)))
    report.write_run_report(folder, record)


def load_checkpoint(saved: Path, config: RunConfig) -> dict[str, Any]:
    """Load what `_finish` saved of a run with this configuration, and check every part."""
    state = checkpoint.load(saved)
    if not isinstance(state, dict) or "trainer" not in state:
        raise UserError(f"{saved} is not the checkpoint of a run; delete it to start this run anew")
    if "record" not in state:
        raise UserError(
            f"{saved} was written by an earlier version of gracecl, which did not note how far its record went; "
            "finish the run with the version that config.json names, or delete the checkpoint to start it anew"
        )
    readable = {
        "record": Written.of(state["record"]) is not None,
        "config": isinstance(state.get("config"), dict),
        "stream_hash": isinstance(state.get("stream_hash"), str),
        "threads": isinstance(state.get("threads"), int),
        "layout": state.get("layout") in get_args(Layout),
    }
    if wrong := [name for name, good in readable.items() if not good]:
        raise UserError(f"{saved} is damaged: its {wrong[0]} is not readable; delete it to start this run anew")
    _compare(config, state["config"], saved)
    return state


def _restore(trainer: Trainer, state: dict[str, Any], saved: Path) -> None:
    """Restore the trainer from a checkpoint."""
    if state["stream_hash"] != trainer.stream.hash:
        raise UserError(f"the data changed since {saved} was written, so the run cannot continue; start it anew in another --out")
    try:
        trainer.load_state_dict(state["trainer"])
        trainer.done  # noqa: B018 (a step that is no number fails here)
    except Exception as error:  # noqa: BLE001 (whatever another state may lead to)
        raise UserError(
            f"{saved} belongs to another configuration than its config.json ({type(error).__name__}: {error}); "
            "delete it to start this run anew"
        ) from None


def _compare(config: RunConfig, saved_with: dict[str, Any], saved: Path) -> None:
    """Refuse a checkpoint of another configuration."""
    now = asdict(config)
    for name, before in saved_with.items():
        if now.get(name) != before:
            raise UserError(
                f"{saved} was written with {name} {before!r}, and the configuration beside it has {now.get(name)!r}; "
                "put the old value back, or delete the checkpoint to start this run anew"
            )


def _late_files(folder: Path) -> Files:
    """Return files outside the digest that the run's plugins had loaded when it last saved."""
    match checkpoint.peek(folder / CHECKPOINT, LATE_FILES):
        case [*files] if all(isinstance(known, dict) for known in files):
            return files
    return []


def _finish(
    trainer: Trainer,
    config: RunConfig,
    code: Code,
    saved: Path,
    watch: Watch,
    told: dict[str, Any],
    upload: Callable[[], None],
) -> None:
    """Step to the end of the stream; save regularly, and when asked to stop. `told` goes into every checkpoint, and `upload` is
    called after each.
    """
    constant = {
        "config": {name: value for name, value in asdict(config).items() if name not in NO_EFFECT_ON_RESULTS},
        "stream_hash": trainer.stream.hash,
        "threads": torch.get_num_threads(),
        "layout": layout_of(trainer.engine.net),
        **told,
    }
    loaded_before = _late_files(saved.parent)

    def save() -> None:
        if not processes.is_first():
            trainer.engine.memories.send_images()
            return
        _note_peak(trainer)
        record = trainer.recorder.sync()._asdict()
        late = code.late_files(loaded_before)
        extra = {LATE_FILES: late} if late else {}
        with trainer.engine.memories.checkpointing():
            checkpoint.save(saved, {"trainer": trainer.state_dict(), "record": record, **constant, **extra})
        upload()

    def keep(ended: int) -> None:
        if config.snapshots and processes.is_first():
            write_snapshot(saved.parent, ended, config, trainer.engine.net)

    if trainer.at == 0:
        keep(0)
    last_save = time.monotonic()
    with stop_requests() as stopped, watch.following(trainer, config.title):
        while not trainer.done:
            step = trainer.at
            trainer.step()
            if trainer.at > step and trainer.stream.ends_task(step):  # before any checkpoint that would not come back to this step
                keep(int(np.count_nonzero(np.diff(trainer.stream.task_of_step[: step + 1]))) + 1)
            watch.advance()
            # All save together, so neither a signal nor a clock of one process decides for that one alone.
            stop, late = processes.any_says(bool(stopped), time.monotonic() - last_save > SECONDS_BETWEEN_CHECKPOINTS)
            if stop:
                save()
                fit = trainer.engine.unfinished_fit
                where = f"stopped after step {trainer.at} of {len(trainer.stream)}" + (f" and {fit}" if fit else "")
                raise Interrupted(f"{where}; continue with: {resume_command(saved.parent)}", *stopped[:1])
            if trainer.stopped and not trainer.done:
                save()
                raise trainer.stopped
            regular = trainer.at % config.checkpoint_every == 0 and trainer.engine.unfinished_fit is None
            if late or regular or trainer.done:
                save()
                last_save = time.monotonic()


def _note_peak(trainer: Trainer) -> None:
    """Note the run's peak memory so far, over resumes."""
    device = trainer.engine.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()
    trainer.timing.peak_bytes = max(trainer.timing.peak_bytes, peak)


def snapshot_file(folder: Path, ended: int) -> Path:
    """Return the file of the net after `ended` tasks; 0 is before the first step."""
    return folder / "snapshots" / f"{ended}.safetensors"


def write_snapshot(folder: Path, ended: int, config: RunConfig, net: nn.Module) -> None:
    """Save parameters and buffers by name, in one layout whatever the net's, so that equal nets give equal bytes."""
    file = snapshot_file(folder, ended)
    file.parent.mkdir(exist_ok=True)
    tensors = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in net.state_dict().items()}
    checkpoint.save_tensors(file, tensors, about_snapshot(config, ended))


def about_snapshot(config: RunConfig, ended: int) -> dict[str, Any]:
    """Return the header of a snapshot."""
    return {"run": run_name(asdict(config)), "ended": ended}


def resume_command(folder: Path) -> str:
    return f"gracecl resume {shlex.quote(str(folder))}"


def _write_config(work: Work, trainer: Trainer, told: dict[str, Any]) -> None:
    """Write config.json: what was asked for and what it became; `told` is what was measured."""
    engine = trainer.engine
    described: dict[str, Any] = {
        **{name: value for name, value in asdict(work.config).items() if value is not None or name not in LEFT_OUT},
        "stream_hash": trainer.stream.hash,
        "stream_steps": len(trainer.stream),
        "tasks": len(trainer.stream.marks),
        "classes": engine.net.classes,
        "layers": engine.net.layers,
        "parameters": sum(value.numel() for value in engine.net.parameters()),
        "rule": engine.chain.rule,
        "images_beyond_memory": engine.memories.beyond_budget,
        "format": RUN_FORMAT,
        "commit": commit(),
        "versions": {"gracecl": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "layout_used": layout_of(engine.net),
        **told,
    }
    if engine.net.of_images is not None:
        described["features_used"] = engine.net.of_images.made_by
    if work.data_root is not None:
        write_text(work.folder / "data_root", str(Path(work.data_root).resolve()))
    if work.plugins:
        write_text(work.folder / "plugins", "\n".join(work.plugins))
    text = sealed(described)
    checkpoint.write_atomically(work.folder / "config.json", lambda beside: beside.write_text(text, encoding="utf-8"))


def commit() -> str | None:
    """Return the commit of the running source tree, marked if it was changed since; None for an installed package."""
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE] or None

    def git(*arguments: str) -> str:
        options = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "timeout": 10, "check": True}
        return str(subprocess.run(["git", *arguments], **options).stdout.strip())  # type: ignore[call-overload]

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # the repository around an installed package is somebody else's
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def with_threads(number: int) -> Iterator[None]:
    """Set torch's threads for the block: sums are split among them, so a run keeps its number to keep its bits."""
    check_threads(number)
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM, SIGUSR2 and the end of the terminal fill the list instead of breaking off mid-step; another Ctrl-C does.

    SIGUSR2 is what SLURM sends before a job's time is over. What the process ignores (nohup) stays ignored. Another SIGTERM does
    not break off: whoever ends a whole group of processes sends one to each, and a parent may tell its children too.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    try:
        stopping = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2") if hasattr(signal, name)]
        heard = [number for number in stopping if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heard}
    except ValueError:  # not in the main thread, where signals are somebody else's affair
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
