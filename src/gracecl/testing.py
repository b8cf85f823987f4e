"""The laws that every method, stream, memory and backbone obeys; public, so that you can check your own::

    from gracecl.testing import check_method
    check_method("my_method()")

Each law is a function that raises AssertionError with a sentence; `METHOD_LAWS` names those of methods, so that a test can run them
one by one. They use a toy problem that takes milliseconds: three tasks of two classes on images of 8 × 8 pixels, or on vectors or
dicts of tensors: `check_method("my_method()", kind="vectors")`.
Python leaves assertions out under -O; this module then cannot be imported.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gracecl import checkpoint, rng, streams
from gracecl.core import NO_TASK, Batch, StreamBatch, Taps, is_loss
from gracecl.data import Data, from_arrays
from gracecl.engine.engine import Engine, StepResult
from gracecl.engine.evaluate import evaluate, seen_scores
from gracecl.engine.live import Live
from gracecl.engine.recipe import Recipe
from gracecl.errors import UserError
from gracecl.inputs import Images, Inputs, Parts, same_rows
from gracecl.memory import Memory
from gracecl.nets import Backbone, TappedNet
from gracecl.registry.spec import parse_method
from gracecl.streams import Stream
from gracecl.streams.split import split

if not __debug__:
    raise UserError("gracecl.testing consists of assertions, which Python leaves out under -O and PYTHONOPTIMIZE; start it without")
TOY_NET = "mlp(width=12, depth=4, norm=True)"
TOY_TRANSFORMER = "vit(patch=4, dim=8, depth=4, heads=2)"
TOY_SHAPE = (1, 8, 8)
TOY_INPUTS = Images(TOY_SHAPE)
TOY_WORDS, TOY_LENGTH = 20, 7
TOY_VECTORS = Inputs((8,))
TOY_PARTS = Parts({"ids": Inputs((TOY_LENGTH,), torch.int64), "mask": Inputs((TOY_LENGTH,), torch.bool), "numbers": TOY_VECTORS})


ToyKind = Literal["images", "vectors", "parts"]
"""what the examples of the toy problem are: images, vectors of numbers, or dicts of ids, a mask and numbers"""
Samples = Callable[[np.ndarray], Any]
"""from labels to an example for each"""


class Toy(NamedTuple):
    """The toy problem for one kind of inputs."""

    inputs: Inputs
    patterns: Callable[[np.random.Generator, int], Samples]
    """gives each class a pattern of its own"""
    net: Callable[[], nn.Module] | None = None
    """None where nets by name take the inputs"""


def striped_images(generator: np.random.Generator, classes: int) -> Samples:
    """Make noisy stripes, a different pattern for each class."""
    pattern = generator.integers(60, 196, (classes, *TOY_SHAPE))

    def sample(labels: np.ndarray) -> Tensor:
        noise = generator.integers(-40, 41, (len(labels), *TOY_SHAPE))
        return torch.from_numpy((pattern[labels] + noise).astype(np.uint8))

    return sample


def scattered_vectors(generator: np.random.Generator, classes: int) -> Samples:
    """Make points around a centre for each class."""
    centre = generator.normal(size=(classes, *TOY_VECTORS.shape))
    return lambda labels: centre[labels] + generator.normal(scale=0.3, size=(len(labels), *TOY_VECTORS.shape))


def masked_words(generator: np.random.Generator, classes: int) -> Samples:
    """Make a phrase for each class, with words missing, and numbers beside it."""
    phrase, numbers = generator.integers(0, TOY_WORDS, (classes, TOY_LENGTH)), scattered_vectors(generator, classes)

    def sample(labels: np.ndarray) -> dict[str, np.ndarray]:
        mask = generator.random((len(labels), TOY_LENGTH)) < 0.8
        mask[:, 0] = True  # no phrase is empty
        return {"ids": phrase[labels], "mask": mask, "numbers": numbers(labels)}

    return sample


class PhraseNet(nn.Module):
    """A net for phrases with numbers beside them: the mean of the words that are there, then four blocks."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(TOY_WORDS, width), nn.Linear(TOY_VECTORS.shape[0], width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4))

    def forward(self, ids: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
        there = mask[..., None].to(numbers.dtype)
        h: Tensor = (self.words(ids) * there).sum(dim=1) / there.sum(dim=1) + self.numbers(numbers)
        for block in self.blocks:
            h = block(h)
        return h


TOYS: dict[str, Toy] = {
    "images": Toy(TOY_INPUTS, striped_images),
    "vectors": Toy(TOY_VECTORS, scattered_vectors),
    "parts": Toy(TOY_PARTS, masked_words, PhraseNet),
}


def toy(kind: ToyKind) -> Toy:
    if kind not in TOYS:
        raise UserError(f"kind is what the toy problem shows, one of {', '.join(TOYS)}, not {kind!r}")
    return TOYS[kind]


def toy_data(classes: int = 6, per_class: int = 9, *, kind: ToyKind = "images") -> Data:
    """Make noisy examples, a different pattern for each class."""
    sample = toy(kind).patterns(np.random.default_rng(0), classes)
    train_y, test_y = (np.repeat(np.arange(classes), count) for count in (per_class, 4))
    return from_arrays(sample(train_y), train_y, sample(test_y), test_y, name="toy", tasks=classes // 2)


def toy_stream(seed: int = 0, batch: int = 3, *, kind: ToyKind = "images") -> Stream:
    return split(toy_data(kind=kind), seed, tasks=3, batch=batch)


def in_order_of_arrival(stream: Stream) -> Stream:
    """The stream with its classes numbered as they come, which is how a learner numbers classes that nobody declared."""
    number = np.empty(stream.data.classes, np.int64)
    number[list(dict.fromkeys(stream.labels(stream.order).tolist()))] = np.arange(len(number))
    data = dataclasses.replace(stream.data, train_y=number[stream.data.train_y], test_y=number[stream.data.test_y])
    return dataclasses.replace(stream, data=data)


def as_seen(method: str, stream: Stream) -> Stream:
    """Return the stream in the order in which the method sees it."""
    order = parse_method(method).chain.traits.order
    return stream if order is None else order(stream)


def toy_net(method: str, net: str = TOY_NET) -> str:
    """Return the net, or a transformer for a method that needs one."""
    return TOY_TRANSFORMER if parse_method(method).chain.traits.attention else net


def toy_engine(
    method: str,
    *,
    memory: int = 12,
    taps: int | None = None,
    optimizer: str = "adam(lr=0.001)",
    net: str | None = None,
    classes: int = 6,
    kind: ToyKind = "images",
) -> Engine:
    """Build a small learner; `net` is for kinds of inputs that nets by name take."""
    recipe = Recipe(
        method=method, net=toy_net(method) if net is None else net, memory=memory, taps=taps, optimizer=optimizer, device="cpu"
    )
    return recipe.build(toy(kind).inputs, classes, Live(net=toy(kind).net))


def feed(engine: Engine, stream: Stream, until: int | None = None) -> list[StepResult | None]:
    """Learn from the engine's step on; tasks end where the stream says so."""
    outcomes = []
    for step in range(engine.progress.step, len(stream) if until is None else until):
        outcomes.append(engine.learn(stream.batch(step)))
    return outcomes


def fit_steps(engine: Engine, at_most: int) -> list[StepResult]:
    """Run the fit of a method that trains before evaluation; nothing for others."""
    engine.get_ready()
    outcomes: list[StepResult] = []
    while len(outcomes) < at_most and (fit := engine.unfinished_fit):
        outcomes.append(engine.step_fit(fit))
    return outcomes


def prepared(method: str, *, kind: ToyKind = "images", **options: Any) -> tuple[Engine, Stream]:
    """Return an engine in the middle of its second task."""
    engine, stream = toy_engine(method, kind=kind, **options), as_seen(method, toy_stream(kind=kind))
    feed(engine, stream, until=min(9, len(stream)))
    return engine, stream


# Laws of methods.


def expression_comes_back(method: str, *, kind: ToyKind = "images") -> None:
    """`parse(repr(m))` is m, whatever it learns from."""
    text = repr(parse_method(method))
    assert repr(parse_method(text)) == text, f"{method} writes itself as {text}, which reads back as {parse_method(text)!r}"


def losses_are_pure(method: str, *, kind: ToyKind = "images") -> None:
    """Calling `losses` twice gives the same table and moves nothing."""
    if parse_method(method).chain.traits.trains == "never":
        return
    engine, stream = prepared(method, kind=kind)
    batch, out = next_batch(engine, stream)
    with engine_untouched(engine, "losses"):
        first, second = engine.chain.losses(out, batch), engine.chain.losses(out, batch)
    assert first.keys() == second.keys(), f"losses of {method} gave the rows {list(first)} and then {list(second)}"
    for row in first:
        assert torch.equal(first[row], second[row]), f"the row '{row}' of {method} changed between two calls of losses"


def rows_are_per_layer_and_finite(method: str, *, kind: ToyKind = "images") -> None:
    """Every row is `[L]` and finite, with one tap and with four; at least one row is a loss. None, where no step is taken."""
    for taps in (1, 4):
        engine, stream = toy_engine(method, taps=taps, kind=kind), as_seen(method, toy_stream(kind=kind))
        outcomes = [outcome for outcome in feed(engine, stream) if outcome is not None]
        assert (engine.chain.traits.trains == "stream") == bool(outcomes), f"{method} says wrongly whether it trains on the stream"
        outcomes += fit_steps(engine, 20)
        assert (engine.chain.traits.trains != "never") == bool(outcomes), f"{method} says wrongly whether it makes steps"
        for outcome in outcomes:
            assert any(is_loss(row) for row in outcome.table), f"{method} gave no loss row"
            for row, value in outcome.table.items():
                assert value.shape == (taps,), f"the row '{row}' of {method} has the shape {list(value.shape)}, not [{taps}]"
                assert value.isfinite().all(), f"the row '{row}' of {method} became {value.tolist()}"


def resumes_exactly(
    method: str, net: str | None = None, stops: Iterable[int] | None = None, until: int | None = None, *, kind: ToyKind = "images"
) -> None:
    """Saved and loaded at any step (in a task, at its end, before the first), it goes on to the same bits; saving moves nothing."""
    stream = as_seen(method, toy_stream(kind=kind))
    stops = sorted(stops or {0, 1, len(stream) // 3, len(stream) // 2, len(stream) - 1})
    whole, outcomes = toy_engine(method, net=net, kind=kind), list[StepResult | None]()
    with tempfile.TemporaryDirectory() as folder:
        saved = {at: Path(folder) / str(at) for at in stops}
        for at, file in saved.items():
            outcomes += feed(whole, stream, at)
            checkpoint.save(file, whole.state_dict())
        outcomes += feed(whole, stream, until)
        for at, file in saved.items():
            second = toy_engine(method, net=net, kind=kind)
            second.load_state_dict(checkpoint.load(file))
            for step, outcome in enumerate(feed(second, stream, until), start=at):
                expected = outcomes[step]
                if expected is None or outcome is None:
                    assert expected is outcome, f"{method} resumed at step {at} decided differently on step {step}"
                else:
                    assert_same(outcome.table, expected.table, f"{method} resumed at step {at}, table of step {step}")
            assert_same(second.state_dict(), whole.state_dict(), f"{method} resumed at step {at}, final state")
        if fit_steps(whole, 5):
            checkpoint.save(Path(folder) / "state", whole.state_dict())
            second.load_state_dict(checkpoint.load(Path(folder) / "state"))
            for engine in (whole, second):
                fit_steps(engine, 5)
            assert_same(second.state_dict(), whole.state_dict(), f"{method} resumed in the middle of a fit")


def learns_without_memory(method: str, *, kind: ToyKind = "images") -> None:
    """A memory of no slots is an allowed, if poor, memory."""
    engine, stream = toy_engine(method, memory=0, kind=kind), as_seen(method, toy_stream(kind=kind))
    feed(engine, stream)
    evaluate(engine, stream.data.test_x, stream.data.test_y, stream.test_task)


def learns_single_images_and_single_classes(method: str, *, kind: ToyKind = "images") -> None:
    """Batches of one image, and batches of one class, give finite losses and predictions."""
    for batch in (1, 4):
        engine, data = toy_engine(method, kind=kind), toy_data(kind=kind)
        for step in range(6):
            label = step // 3
            rows = np.flatnonzero(data.train_y == label)[(step % 3) * batch : (step % 3) * batch + batch]
            task = label if engine.chain.traits.boundaries == "required" else NO_TASK
            outcome = engine.learn(StreamBatch(data.train_x[torch.from_numpy(rows)], data.train_y[rows], task=task))
            for row, value in (outcome.table if outcome else {}).items():
                assert value.isfinite().all(), (
                    f"the row '{row}' of {method} became {value.tolist()} on a batch of {batch} of one class"
                )
        result = evaluate(engine, data.test_x, data.test_y, np.zeros(len(data.test_y), np.int64))
        assert engine.chain.rule in result.accuracy, f"{method} names the rule '{engine.chain.rule}', which it does not have"


def class_numbers_do_not_matter(method: str, *, kind: ToyKind = "images") -> None:
    """With classes renumbered and the heads' columns moved accordingly, it keeps the same images and reaches the same losses."""
    number = np.array([4, 2, 5, 0, 3, 1])
    stream = toy_stream(kind=kind)
    data = dataclasses.replace(stream.data, train_y=number[stream.data.train_y], test_y=number[stream.data.test_y])
    renumbered = dataclasses.replace(stream, data=data)
    # Without BatchNorm and Adam, both of which magnify the rounding of sums taken in another order.
    net = toy_net(method, "mlp(width=12, depth=4)")
    one, two = (toy_engine(method, optimizer="sgd(lr=0.01)", net=net, kind=kind) for _ in range(2))
    with torch.no_grad():
        for head, moved in zip(one.net.classifier.parameters(), two.net.classifier.parameters(), strict=True):
            if head.shape[-1] == len(number):  # a learned scale has no columns
                moved[..., number] = head
    before, after = (
        [*feed(engine, engine.as_seen(kind)), *fit_steps(engine, 5)] for engine, kind in ((one, stream), (two, renumbered))
    )
    for name, store in one.memories.stores.items():
        kept = two.memories[name]
        same = np.array_equal(number[store.examples.labels], kept.examples.labels)
        assert same, f"{method} keeps images of other classes in '{name}' when classes are renumbered"
        assert torch.equal(store.images, kept.images), f"{method} keeps other images in '{name}' when classes are renumbered"
    for step, (mine, theirs) in enumerate(zip(before, after, strict=True)):
        assert (mine is None) == (theirs is None), f"{method} decides by class numbers whether to make step {step}"
        # Observations are left out: relative entropies magnify rounding where the layers agree.
        others = theirs.table if theirs else {}
        for row, value in mine.table.items() if mine else ():
            close = not is_loss(row) or torch.allclose(value, others[row], rtol=1e-2, atol=1e-3)
            assert close, f"the row '{row}' of {method} depends on how classes are numbered (step {step})"


def scoring_leaves_everything_untouched(method: str, *, kind: ToyKind = "images") -> None:
    """Planning a step, which may score images with the net, moves nothing, and planning again gives the same plan."""
    engine, stream = prepared(method, kind=kind)
    new = engine.meet(stream.batch(engine.progress.step))
    with engine_untouched(engine, "planning"):
        first, second = ({name: vars(rows) for name, rows in engine.plan(new).blocks.items()} for _ in range(2))
    assert_same(first, second, f"two plans of {method} for one step")


def evaluation_changes_nothing(method: str, *, kind: ToyKind = "images") -> None:
    """Evaluating in between leaves parameters, gradients, statistics, memories and every random stream as they were."""
    engine, stream = prepared(method, kind=kind)
    with engine_untouched(engine, "evaluation"):
        evaluate(engine, stream.data.test_x, stream.data.test_y, stream.test_task)


def grace_without_effect_is_the_method(method: str, *, kind: ToyKind = "images") -> None:
    """`grace(m)` with α = 1 and β = 0 makes the very same steps as m, if that makes any and is not feedback already."""
    if parse_method(method).chain.traits.trains == "never" or method.startswith("grace("):
        return
    plain, wrapped = (
        toy_engine(method, taps=4, kind=kind),
        toy_engine(f"grace({method}, beta=0, adaptive=False)", taps=4, kind=kind),
    )
    for engine in (plain, wrapped):
        feed(engine, engine.as_seen(toy_stream(kind=kind)), until=8)
        fit_steps(engine, 5)
    assert_same(wrapped.net.state_dict(), plain.net.state_dict(), f"grace({method}) without effect")
    if plain.fit is not None and wrapped.fit is not None:
        assert_same(wrapped.fit.net.state_dict(), plain.fit.net.state_dict(), f"the fit of grace({method}) without effect")


def says_whether_it_needs_tasks(method: str, *, kind: ToyKind = "images") -> None:
    """A method that does not require task marks works on a stream without them: it makes steps, if it ever does, and predicts."""
    if parse_method(method).chain.traits.boundaries == "required":
        return
    stream = as_seen(method, toy_stream(kind=kind))
    unmarked = dataclasses.replace(stream, task_of_step=np.full(len(stream), NO_TASK))
    engine = toy_engine(method, kind=kind)
    steps = [*feed(engine, unmarked), *fit_steps(engine, 1)]
    assert any(steps) or engine.chain.traits.trains == "never", f"{method} made no step on a stream without task marks"


def classes_may_arrive(method: str, *, kind: ToyKind = "images", **options: Any) -> None:
    """A head without any class grows as they come, with whatever has an axis over them, and resumes exactly across a growth."""
    stream = in_order_of_arrival(as_seen(method, toy_stream(seed=1, batch=6, kind=kind)))
    whole, states, outcomes = toy_engine(method, classes=0, kind=kind, **options), {}, list[StepResult | None]()
    until = len(stream) * 7 // 9  # a step into the third task
    for step in range(until):
        if step in (0, 3, 4):  # before a growth and after it
            states[step] = checkpoint_of(whole)
        outcomes += feed(whole, stream, step + 1)
        met = len(whole.progress.seen)
        assert whole.net.classes == met, f"{method} has room for {whole.net.classes} classes when {met} were met"
    for at, state in states.items():
        second = toy_engine(method, classes=0, kind=kind, **options)
        second.load_state_dict(state)
        for step, outcome in enumerate(feed(second, stream, until), start=at):
            table, expected = ({} if one is None else one.table for one in (outcome, outcomes[step]))
            assert_same(table, expected, f"{method} with classes that arrive, resumed at step {at}, table of step {step}")
        assert_same(
            second.state_dict(), whole.state_dict(), f"{method} with classes that arrive, resumed at step {at}, final state"
        )
    accuracy = evaluate(whole, stream.data.test_x, stream.data.test_y, stream.test_task).accuracy
    assert whole.chain.rule in accuracy, f"{method} with classes that arrive names a rule that it does not have"


def a_larger_head_is_the_same_where_traits_say_so(method: str, *, kind: ToyKind = "images") -> None:
    """A head declared larger gives the same predictions if `traits.met_only` says so."""
    if parse_method(method).chain.traits.met_only:
        same = not minds_a_larger_head(method, kind=kind)
        assert same, f"{method} says that it looks at classes met alone (met_only), and predicts otherwise with a larger head"


def minds_a_larger_head(method: str, *, kind: ToyKind = "images") -> bool:
    """Whether predictions are others where more classes are declared than come."""
    stream = in_order_of_arrival(as_seen(method, toy_stream(batch=6, kind=kind)))
    found = []
    for declared in (0, 3 * stream.data.classes):
        # Without BatchNorm and Adam, both of which magnify the rounding of products of another width.
        engine = toy_engine(method, optimizer="sgd(lr=0.05)", net=toy_net(method, "mlp(width=12, depth=4)"), classes=0, kind=kind)
        engine.grow(declared)
        feed(engine, stream)
        rule, net = engine.chain.rule, engine.ready_to_predict()
        parts = [seen_scores(engine.chain, out, engine.progress, rule)[0] for _, out in net.sweep(stream.data.test_x)]
        found.append(torch.cat(parts))
    return not torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


METHOD_LAWS: dict[str, Callable[..., None]] = {
    law.__name__: law
    for law in (
        expression_comes_back,
        losses_are_pure,
        rows_are_per_layer_and_finite,
        resumes_exactly,
        learns_without_memory,
        learns_single_images_and_single_classes,
        class_numbers_do_not_matter,
        scoring_leaves_everything_untouched,
        evaluation_changes_nothing,
        grace_without_effect_is_the_method,
        says_whether_it_needs_tasks,
        classes_may_arrive,
        a_larger_head_is_the_same_where_traits_say_so,
    )
}


def check_method(method: str, *, kind: ToyKind = "images") -> None:
    """Check all laws of methods, for the method alone and, unless it makes no steps, inside `grace(...)`.

    `kind` says what it learns from: "images", "vectors" `[B, 8]`, or "parts", dicts of ids, a mask and numbers.
    """
    if not isinstance(method, str):
        raise UserError(f"check_method takes an expression such as 'er()', not a {type(method).__name__}")
    for expression in (method, f"grace({method})") if parse_method(method).chain.traits.trains != "never" else (method,):
        for law in METHOD_LAWS.values():
            law(expression, kind=kind)


# Laws of the other nouns.


def check_stream(stream: Stream | str) -> None:
    """Batches can be asked for in any order and again, tasks are contiguous, evaluation marks lie inside, labels are the data's,
    and a run can be evaluated on it to its end. A stream may be given by its expression."""
    stream = streams.stream(stream)
    assert len(stream) > 0, "the stream is empty"
    for step in (len(stream) - 1, 0, len(stream) // 2, 0):
        one, two = stream.batch(step), stream.batch(step)
        assert torch.equal(one.x, two.x), f"batch {step} differs when asked for again"
        assert len(one.x) == len(one.labels) == len(one.sources) > 0, f"batch {step} is empty or uneven"
        labels = stream.labels(stream.order[one.sources])
        assert np.array_equal(one.labels, labels), f"labels of batch {step} are not those of its images"
    assert stream.ends[-1] == len(stream.order), "the batches do not cover the order"
    assert np.all(np.diff(stream.marks) > 0), "evaluation marks are not in order"
    try:
        streams.check_evaluations(stream)
    except UserError as error:
        raise AssertionError(str(error)) from None
    if stream.has_tasks:
        assert np.all(np.diff(stream.task_of_step) >= 0), "a task comes back after another"
    assert stream.hash == dataclasses.replace(stream).hash, "the hash is not a function of the content"


def check_memory(make: Callable[[int, Inputs], Memory], *, kind: ToyKind = "images") -> None:
    """Check that a memory of such inputs stays within capacity, keeps labels with their examples, draws distinct slots and
    restores exactly.
    """
    if not callable(make):
        raise UserError(f"check_memory takes a function (capacity, inputs) that makes a memory, not a {type(make).__name__}")
    data, inputs = toy_data(kind=kind), toy(kind).inputs
    memory = make(10, inputs)
    for step in range(0, len(data.train_y), 3):
        rows = slice(step, step + 3)
        memory.add(rng.generator("law", step), data.train_x[rows], data.train_y[rows], task=int(data.train_y[rows][0] // 2))
        slots = memory.draw(4, rng.generator("draw", step))
        assert len(memory) <= 10, "the memory grew over its capacity"
        assert len(set(slots.tolist())) == len(slots) == min(4, len(memory)), "a draw is not of distinct slots"
    for slot in range(len(memory)):
        matches = same_rows(data.train_x, memory.images[slot : slot + 1])[:, 0].numpy()
        assert memory.labels[slot] in data.train_y[matches], "a slot's label is not its image's"
    again = make(10, inputs)
    again.load_state_dict(memory.state_dict())
    for one, two in ((memory, again),):
        generator = rng.generator("after")
        more = (
            one.add(generator, data.train_x[:5], data.train_y[:5]),
            two.add(rng.generator("after"), data.train_x[:5], data.train_y[:5]),
        )
        assert np.array_equal(*more), "a restored memory keeps other images"
        draws = one.draw(5, rng.generator("last")), two.draw(5, rng.generator("last"))
        assert np.array_equal(*draws), "a restored memory draws other slots"


def check_backbone(make: Callable[[Any, int], Backbone], taps: int = 4, *, inputs: Inputs | None = None) -> None:
    """Check that features are `[L, B, D]` and finite, that gradients reach every parameter and the deepest tap
    uses the most.

    A net that takes something else than images of any size says what: `inputs=Inputs((8,))`. `make` gets its shape, which is ()
    for `Parts`.
    """
    if not callable(make):
        raise UserError(f"check_backbone takes a function (shape, taps) that makes a backbone, not a {type(make).__name__}")
    images = [Images(shape) for shape in ((3, 32, 32), (1, 28, 28), (3, 15, 15))]
    for taken in images if inputs is None else [inputs]:
        net = TappedNet(make(taken.shape, taps), 5, taken)
        out: Taps = net(taken.seen(2, lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert out.features.shape == (net.layers, 2, net.width), f"features have the shape {list(out.features.shape)}"
        assert out.logits.shape == (net.layers, 2, 5), f"logits have the shape {list(out.logits.shape)}"
        weights = [parameter for parameter in net.backbone.trunk_parameters() if parameter.requires_grad]
        reached = [
            sum(
                value is not None and bool(value.any())
                for value in torch.autograd.grad(tap.square().sum(), weights, retain_graph=True, allow_unused=True)
            )
            for tap in out.features
        ]
        assert reached == sorted(reached), f"taps depend on {reached} of the trunk's weights, so the deepest is not the last"
        (out.logits.square().sum() + out.embedding.square().sum()).backward()  # type: ignore[no-untyped-call]
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), f"no finite gradient reaches {name}"  # noqa: PT018


# Helpers.


def next_batch(engine: Engine, stream: Stream) -> tuple[Batch, Taps]:
    """Return the batch of the engine's next step (of a fit, if it trains in no other), and the net's output for it."""
    if engine.chain.traits.trains != "stream":
        engine.get_ready()
        fit = engine.unfinished_fit
        assert fit is not None, f"{engine.method!r} trains neither on the stream nor before evaluation"
        batch = engine.assemble_fit(fit)
        return batch, fit.net(batch.x)
    new = engine.meet(stream.batch(engine.progress.step))
    plan = engine.plan(new)
    assert plan, f"{engine.method!r} plans no update in the middle of the stream"
    batch = engine.assemble(plan, new)
    engine.update.prepare(batch)
    return batch, engine.update.forward(batch)


def checkpoint_of(engine: Engine) -> dict[str, Any]:
    """Write an engine's state to a file and read it back."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "state", engine.state_dict())
        return checkpoint.load(Path(folder) / "state")


class engine_untouched:
    """Check that a block leaves an engine's state, gradients and torch's random state unchanged."""

    def __init__(self, engine: Engine, what: str) -> None:
        self.engine, self.what = engine, what

    def __enter__(self) -> None:
        self.before = self._look()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            assert_same(self._look(), self.before, f"{self.what} of {self.engine.method!r}")

    def _look(self) -> dict[str, Any]:
        gradients = {name: value.grad.clone() for name, value in self.engine.net.named_parameters() if value.grad is not None}
        state = {
            "state": self.engine.state_dict(),
            "gradients": gradients,
            "random": torch.get_rng_state(),
            "mode": self.engine.net.training,
        }
        return dict(flatten(state))


def assert_same(one: Any, two: Any, what: str) -> None:
    """Assert that two nested states are equal to the bit; name the first difference."""
    left, right = dict(flatten(one)), dict(flatten(two))
    assert left.keys() == right.keys(), f"{what}: other entries: {sorted(left.keys() ^ right.keys())[:3]}"
    for name, value in left.items():
        other = right[name]
        same = torch.allclose(value, other, rtol=0, atol=0, equal_nan=True) if isinstance(value, Tensor) else value == other
        assert same, f"{what}: '{name}' differs"


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return the leaves of a nested state with their paths; tensors are copied."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from flatten(item, f"{name}/{number}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from flatten(vars(value), name)
    elif isinstance(value, (Tensor, np.ndarray)):
        yield name, torch.as_tensor(value).detach().clone()
    else:
        yield name, value
