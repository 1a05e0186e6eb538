"""A private step captured once and replayed: three CUDA graphs with a look in between.

    gather   forward, backward, clip: the bounded sum of a piece, to which that of earlier pieces is added
    release  noise, sum over the expected batch size, `.grad`
    update   the optimizer

A captured graph has constant shapes. So a drawn batch is cut into pieces of one size; the last is filled up
with repeated rows that weigh 0. Nothing is dropped, and nothing but that size is chosen here. Rows of another
shape or type than the captured ones (longer texts) are gathered by ordinary steps.

What an ordinary step would ask the device in between (is an example not finite? does one cancel?) is put
aside (gradients/rare.py) and looked at once, after the last piece and before anything is charged or released:
if the answer is yes, the batch is gathered again by ordinary steps. The key of a step goes to the device just
before its release. The host never waits otherwise, and prepares the release while the device gathers.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from clipwise.engine.memory_shortage import is_out_of_memory, with_smaller_pieces
from clipwise.errors import ConfigurationError, StepError
from clipwise.kernels.noise import normals
from clipwise.ledger import crash_points
from clipwise.noise.gaussian import key_words
from clipwise.noise.release import buckets, in_order_of, laid_as, noised, scales_of
from clipwise.sampling.batch_structure import arguments_of, map_tensors, tensors_in
from clipwise.validation import step_inputs
from clipwise.validation.arguments import whole
from clipwise.validation.marked import plain

if TYPE_CHECKING:
    from clipwise.engine.private import Private
    from clipwise.privacy import Part
    from clipwise.sampling.loader import Piece
    from clipwise.validation.replacement import Arrange

Loss = Callable[..., Tensor]

_ORDINARY_STEPS = 4  # the first ones look at the graph and at the losses, and check the rules
_SMALLEST = 2  # fewer examples tell nothing about each other
_LOOK_AGAIN_AFTER = 256  # then one ordinary step, with all of its checks
_ATTEMPTS = 3
_UPDATES_BEFORE = 3  # updates with the same settings, of which this one is captured
_LASTING = 32  # releases that bounds must last, or it does not pay to capture steps for them
_SUM_TYPES = (torch.float32, torch.float64)
_SPREADS = 3.0  # a Poisson draw is larger than its mean and so many standard deviations once in 700 times


class CaptureWarning(UserWarning):
    """A step cannot be captured: it runs as an ordinary one, and costs as much."""


class Graph(Protocol):
    """What was captured: the same work on the same memory, as often as it is asked for."""

    def replay(self) -> None:
        """Do it once more."""


class CompiledStep:
    """`step(*batch)`: what `private.step(loss(*batch))` does, in less time. Made by `private.compiled`."""

    def __init__(self, private: Private, loss: Loss, size: int | None = None) -> None:
        if not callable(loss):
            raise ConfigurationError(
                "loss must be a function from a batch to one loss an example, such as "
                "lambda x, y: F.cross_entropy(model(x), y, reduction='none')."
            )
        if private._clipper.needs_outputs:
            raise ConfigurationError(
                "private.compiled has no place for the model's outputs, which this strategy needs: call "
                "private.step(losses, outputs=outputs)."
            )
        self._private, self._loss = private, loss
        self._size = _piece_size(private) if size is None else whole("size", size, least=_SMALLEST)
        self._device = next(iter(private._parameters.values())).device
        is_tested = loss is private._loss or private._strategy.is_coupled  # elsewhere, or not at all
        self._test = None if is_tested else private._plan_test(loss)
        self._ordinary = 0
        self._replayed = 0
        self._attempts = 0
        self._largest = 0  # piece so far
        self._is_replaying = False
        self._captured: _Captured | None = None
        # Bounds would stay what they were, until steps are captured anew; and so would random numbers.
        clipper = private._clipper
        is_constant = clipper.is_capturable and clipper.lasts >= _LASTING and not clipper.draws
        # Secure noise is drawn by the host.
        is_constant = is_constant and not any(part.grid for part in private._parts)
        # Statistics follow the weights, and examples of several rows are not filled up.
        is_constant = is_constant and private._public_statistics is None and private.views == 1
        is_constant = is_constant and not any(p.is_complex() for p in private._parameters.values())
        is_constant = is_constant and private._penalty is None and private._watch is None
        self._stays_ordinary = not (is_constant and _can_capture(self._device))

    def __call__(self, *batch: Any) -> bool:
        """One step on the batch that `private.loader` handed out; returns whether the optimizer stepped."""
        private = self._private
        piece = private._require_open().awaited()
        step_inputs.require_rows(batch, piece.size * private.views)
        if self._test is not None and self._test.is_pending:
            self._test.examine(
                map_tensors(plain, batch),
                piece.size,
                private._which(piece),
                partial(self._arrangements, batch, piece),
            )
        batch = map_tensors(lambda t: t.to(self._device, non_blocking=True), batch)
        if piece.index_in_batch == 0:
            self._is_replaying = self._may_replay(batch)
        if self._captured is None or not self._is_replaying:
            self._ordinary += piece.size >= _SMALLEST
            self._largest = max(self._largest, piece.size)
            return self._ordinary_step(batch, piece)
        self._replayed += 1
        return self._captured.step(map_tensors(plain, batch), piece)

    def _arrangements(self, batch: tuple[Any, ...], piece: Piece) -> Sequence[Arrange]:
        """To collate the records anew, if the loss gets the batch as it was handed out."""
        handed = self._private._handed
        is_same = handed is not None and _is_equal(batch, arguments_of(handed))
        return self._private.loader.arrangements(piece) if is_same else ()

    def _ordinary_step(self, batch: Sequence[Any], piece: Piece) -> bool:
        """An ordinary step; in smaller pieces if memory is short."""
        private = self._private
        try:
            # Many models cannot run on zero rows, and an empty piece needs no losses.
            return private.step(self._loss(*batch) if piece.size else None)
        except (RuntimeError, MemoryError) as error:
            # A piece that is used up may have been charged. Mini-sets and random choices are of whole pieces.
            whole_piece = private._strategy.is_coupled or private._clipper.draws
            if not is_out_of_memory(error) or piece.consumed or piece.size < 2 or whole_piece:
                raise
        # Here the error is gone, and with it the tensors that its frames held.
        private._begin(piece)
        batch = map_tensors(plain, batch)
        clipped = with_smaller_pieces(partial(self._gathered, batch, piece.size), piece.size)
        return private._updated(private._gather(piece, clipped))

    def _gathered(self, batch: Sequence[Any], count: int, size: int) -> dict[str, Tensor]:
        """The bounded sum of a batch, `size` examples at a time."""
        private, total = self._private, dict[str, Tensor]()
        for rows, here in _pieces(batch, count * private.views, size * private.views):
            losses = private._over_views(self._loss(*rows), here // private.views)
            step_inputs.require_losses(losses, here // private.views)
            for name, found in private._clipper.clipped_sum(losses).items():
                total[name] = total[name] + found if name in total else found
        private._require_untouched()  # by the passes that were just made
        return total

    def _may_replay(self, batch: Sequence[Any]) -> bool:
        """At the beginning of a batch: whether it goes through the graphs, which are captured if it is time."""
        if self._captured is None:
            if self._ordinary >= _ORDINARY_STEPS and not self._stays_ordinary and self._is_examined():
                self._capture(map_tensors(plain, batch))
            return True
        # Other clips or noise than those of the graphs.
        if self._captured.bounds != _bounds_of(self._private):
            self._captured, self._ordinary, self._attempts = None, 0, 0
            return True
        if self._replayed < _LOOK_AGAIN_AFTER:
            return True
        self._replayed = 0
        self._private._clipper.look_again()
        return False

    def _is_examined(self) -> bool:
        """A replayed step is not probed for coupled examples: first every path to the inputs must have been."""
        probe = self._private._independence
        return probe is None or probe.is_settled

    def _capture(self, batch: Sequence[Any]) -> None:
        """Capture from now on, or say why not."""
        least = self._largest if self._private._strategy.is_coupled else 1
        if _count(batch) < least:
            return  # an empty draw, or a mini-set smaller than most: the next one will do
        self._attempts += 1
        try:
            self._captured = _Captured(self._private, self._loss, self._size, batch)
        except (RuntimeError, NotImplementedError) as error:
            if self._attempts < _ATTEMPTS:
                return
            self._stays_ordinary = True
            # (Torch's words may hold sizes of the batch.)
            reason = re.sub(r"\d+", "#", str(error).strip().partition("\n")[0])
            warnings.warn(
                f"This step cannot be captured in a CUDA graph, so it runs as an ordinary one: {reason}",
                CaptureWarning,
                stacklevel=3,
            )


class _Captured:
    """The three graphs, and the memory that they share."""

    def __init__(self, private: Private, loss: Loss, size: int, batch: Sequence[Any]) -> None:
        self._private, self._loss, self._size = private, loss, size
        self.bounds = _bounds_of(private)
        self._is_coupled = private._strategy.is_coupled
        if self._is_coupled:
            self._size = _count(batch)  # mini-sets are neither cut nor filled up
        self._names = list(private._parameters)
        parameters = list(private._parameters.values())
        self._device = parameters[0].device
        if any(p.device != self._device for p in parameters):
            raise RuntimeError("the parameters are on several devices")
        if not _is_all_tensors(batch):
            raise RuntimeError("the batch holds more than tensors")
        self._state = _state_of(private._model)
        first = torch.arange(self._size, device=self._device) % _count(batch)
        self._inputs = map_tensors(lambda t: _rows(t, first), tuple(batch))
        self._real_B = torch.ones(self._size, dtype=torch.bool, device=self._device)
        # Of the piece gathered last and of those before it, in the first graph's memory.
        self._sums: list[Tensor] = []
        self._holds_any = False
        self._rare = torch.zeros((), dtype=torch.bool, device=self._device)
        # Numbers that the noise needs in memory, written once: the graph does not write them anew at every step.
        stds = [part.noise_std for part in private._parts]
        self._stds = torch.tensor(stds, dtype=torch.float64, device=self._device)
        L = private._clipper.divisor
        self._divisors = {t: torch.full((1,), L, dtype=t, device=self._device) for t in _SUM_TYPES}
        # The step and the piece of it that the sums as they are go on with; of piece 0 they are zeros.
        self._awaited: tuple[int, int] | None = None
        self._gather = _captured(self._gather_piece, self._device)
        self._clear()
        self._labels = self._labels_of(private._parts)
        count = sum(map(len, self._labels))
        pinned = self._device.type == "cuda"
        self._host_keys = [torch.zeros(count, 4, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._keys = torch.zeros(count, 4, dtype=torch.int64, device=self._device)
        self._release_graph = _captured(self._write_gradients, self._device)
        own_hooks = {hook.id for hook in private._step_hooks}
        self._update = _Update(private.optimizer, self._device, own_hooks)

    def _labels_of(self, parts: Sequence[Part]) -> list[list[str]]:
        """Of the draws of each part, as ordinary steps have them (noising.py)."""
        by_name, found = dict(zip(self._names, self._sums, strict=True)), []
        for number, part in enumerate(parts):
            sums = [by_name[name] for name in part.parameters]
            drawn = range(len(buckets([t.numel() for t in sums])))
            found.append([f"noise/{number}/0/{bucket}" for bucket in drawn])
        return found

    def step(self, batch: Sequence[Any], piece: Piece) -> bool:
        """Gather a piece that the loader handed out; after the last one of a batch, release and update."""
        private = self._private
        private._in_step = True
        before = self._begin(piece)
        for rows, count in self._cut(batch, piece.size):
            self._add(rows, count)
        # The device is at work. What the host has to do for the release it does meanwhile.
        if _bounds_of(private) != self.bounds:
            private.loader.reset()
            raise StepError(
                "Clips were changed between two pieces of a batch: change them between batches, when a step has "
                "returned True."
            )
        if _state_of(private._model) != self._state:
            raise StepError(
                "The model was changed after its step was captured (train() or eval(), requires_grad, a parameter "
                "or a buffer in another place): call private.compiled again."
            )
        private._begin(piece)  # the guards of an ordinary step; none of them waits for the device
        if piece.last:
            self._prepare()
        if bool(self._rare):
            self._gather_again(batch, piece.size, before)
        private.loader.consume()
        if not piece.last:
            self._awaited = private._ledger.made(private._tag), piece.index_in_batch + 1
            private._in_step = False
            return False
        with private._releasing():
            self._release()
        return True

    def _begin(self, piece: Piece) -> list[Tensor] | None:
        """What was gathered of the piece's batch before it; None if nothing was.

        A piece that something else than this step came before, or that failed in the middle, cannot go on:
        who was in what was gathered could be counted twice.
        """
        private, awaited = self._private, self._awaited
        private._partial = None  # nor may an ordinary step go on with what it gathered
        self._awaited = None
        goes_on = awaited == (private._ledger.made(private._tag), piece.index_in_batch)
        if piece.index_in_batch == 0:
            if not goes_on:
                self._clear()
            return None
        if not goes_on:
            raise StepError(
                "The pieces of a batch must all go through one step, each of them once. Begin the batch anew, "
                "with a new iterator of private.loader."
            )
        # (If all before it were empty, the sums are still those of another batch.)
        return [t.clone() for t in self._sums] if self._holds_any else None

    def _gather_piece(self) -> None:
        """Forward, backward, clip: what the first graph holds."""
        with self._private._clipper.putting_aside() as aside:
            losses = step_inputs.require_losses(self._loss(*self._inputs), self._size, self._is_coupled)
            real_B = None if self._is_coupled else self._real_B
            clipped = self._private._clipper.clipped_sum(losses, real_B)
        self._sums = self._in_order(clipped)
        happened = aside.happened()
        if happened is not None:
            self._rare.logical_or_(happened)

    def _fill(self, rows: Sequence[Any], count: int) -> None:
        """Put rows into the graph's inputs; what is missing repeats them, and weighs nothing."""
        if count < self._size:
            again = torch.arange(self._size, device=self._device) % count
            rows = map_tensors(lambda t: _rows(t, again), rows)
        for own, given in zip(tensors_in(self._inputs), tensors_in(rows), strict=True):
            own.copy_(given.detach())
        self._real_B.fill_(True)
        self._real_B[count:] = False

    def _add(self, rows: Sequence[Any], count: int) -> None:
        """Gather some rows of a batch, by the graph if they are as the captured ones."""
        earlier = [t.clone() for t in self._sums] if self._holds_any else None
        if self._fits(rows, count):
            self._fill(rows, count)
            self._gather.replay()
        else:
            torch._foreach_copy_(self._sums, self._by_itself(rows))
        if earlier is not None:
            torch._foreach_add_(self._sums, earlier)
        self._holds_any = True

    def _gather_again(self, batch: Sequence[Any], count: int, before: list[Tensor] | None) -> None:
        """Something rare happened: take this piece out again and gather it by ordinary steps."""
        self._clear()
        if before is not None:
            torch._foreach_add_(self._sums, before)
        for rows, _ in self._cut(batch, count):
            torch._foreach_add_(self._sums, self._by_itself(rows))
        self._holds_any = True

    def _by_itself(self, rows: Sequence[Any]) -> list[Tensor]:
        """The bounded sum of these rows, as an ordinary step forms it."""
        losses = step_inputs.require_losses(self._loss(*rows), _count(rows), self._is_coupled)
        found = self._in_order(self._private._clipper.clipped_sum(losses))
        self._private._require_untouched()  # by the pass that was just made
        return found

    def _cut(self, batch: Sequence[Any], count: int) -> Iterator[tuple[Sequence[Any], int]]:
        """A piece of a batch, in pieces that the graph takes; a mini-set as it is."""
        return _pieces(batch, count, max(count, self._size) if self._is_coupled else self._size)

    def _in_order(self, clipped: Mapping[str, Tensor]) -> list[Tensor]:
        # (Sums of several mini-sets are formed in float64 whatever the parameters are.)
        return [
            in_order_of(p, clipped[name] if self._is_coupled else clipped[name].to(_sum_type(p)))
            for name, p in self._private._parameters.items()
        ]

    def _fits(self, rows: Sequence[Any], count: int) -> bool:
        """Whether these rows are as the captured ones, and a mini-set as large."""
        return _kinds(rows) == _kinds(self._inputs) and (not self._is_coupled or count == self._size)

    def _prepare(self) -> None:
        """The keys of this step, in the one of two places that the last copy to the device did not read."""
        self._host_keys.reverse()
        for number, label in enumerate(chain.from_iterable(self._labels)):
            self._host_keys[0][number] = key_words(self._private._key.derive(label))
        self._update.prepare()

    def _release(self) -> None:
        private = self._private
        private._charge()
        if not self._holds_any:  # nobody was drawn
            torch._foreach_zero_(self._sums)
        self._host_keys[1].zero_()  # the device has waited for its copy since: no reader is left
        self._keys.copy_(self._host_keys[0], non_blocking=True)
        # `.grad` is the graph's own memory. Whatever happens next, this key serves no second sum.
        private._advance()
        crash_points.reached("step.before-grad")
        self._release_graph.replay()
        self._awaited, self._holds_any = (private._ledger.made(private._tag), 0), False
        for p, grad in zip(private._parameters.values(), self._gradients, strict=True):
            if p.grad is not grad:
                p.grad = grad
        private._released.remember()
        private._learn(self._means)
        crash_points.reached("step.before-update")
        private._update(self._update.run)

    def _write_gradients(self) -> None:
        """Noise, and the division: what the second graph holds."""
        L, by_name = self._private._clipper.divisor, dict(zip(self._names, self._sums, strict=True))
        found: dict[str, Tensor] = {}
        first = 0
        for number, (part, labels) in enumerate(zip(self._private._parts, self._labels, strict=True)):
            draw = partial(
                self._draw, None if part.noise_std == 0 else self._stds[number : number + 1], first
            )
            sums = [by_name[name] for name in part.parameters]
            scales = scales_of(part, part.parameters)
            found.update(zip(part.parameters, noised(sums, draw, L, scales), strict=True))
            first += len(labels)
        self._keys.zero_()  # they have served
        self._means = found
        parameters = self._private._parameters
        self._gradients = [laid_as(p, found[name]) for name, p in parameters.items()]
        for p, grad in zip(parameters.values(), self._gradients, strict=True):
            p.grad = grad
        self._private._released.remember()

    def _draw(
        self,
        std_1: Tensor | None,
        first: int,
        bucket: int,
        size: int,
        dtype: torch.dtype,
        onto: Tensor | None,
        divisor: float,
    ) -> Tensor:
        if std_1 is None:
            nothing = torch.zeros(size, dtype=dtype, device=self._device)
            return nothing if onto is None else torch.div(onto, divisor, out=nothing.view_as(onto)).view(-1)
        return normals(self._keys[first + bucket], size, std_1, dtype, None, onto, self._divisors[dtype])

    def _clear(self) -> None:
        torch._foreach_zero_(self._sums)
        self._rare.zero_()
        self._holds_any = False


class _Update:
    """The optimizer's step as a graph, while its settings stay what they were."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, own_hooks: Collection[int] = ()
    ) -> None:
        self._optimizer, self._device, self._own_hooks = optimizer, device, own_hooks
        self._graph: Graph | None = None
        self._settings: object = None
        self._same = 0

    def prepare(self) -> None:
        """Look at the settings, which are numbers in the graph: when one changes, the optimizer itself steps."""
        settings = _settings_of(self._optimizer)
        if settings != self._settings:
            self._graph, self._settings, self._same = None, settings, 0

    def run(self) -> None:
        """Update."""
        self._same += 1
        if self._same == _UPDATES_BEFORE and _is_capturable(self._optimizer, self._own_hooks):
            self._graph = self._capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._optimizer.step()

    def _capture(self) -> Graph | None:
        """None if the optimizer waits for the device (as with a tensor for a rate that it must read)."""
        try:
            return _captured(self._optimizer.step, self._device, warm=False)
        except RuntimeError:
            return None


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def _captured(act: Callable[[], Any], device: torch.device, warm: bool = True) -> Graph:
    """Capture a function. It runs twice beforehand, the second time where to wait for the device is an error."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(stream):
            if warm:
                act()  # compiles kernels and makes handles, which may wait
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    act()
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            act()
        return graph


def _piece_size(private: Private) -> int:
    """How many examples a captured step takes: all of a constant batch, nearly always all of a random one."""
    given = private.loader.max_physical_batch_size
    L = private._scheme.expected_size
    rate = private._scheme.sample_rate
    spread = _SPREADS * math.sqrt(L * (1 - rate)) if private._scheme.has_random_size else 0.0
    wanted = max(_SMALLEST, math.ceil(L + spread))
    return wanted if given is None else min(wanted, max(_SMALLEST, given))


def _pieces(batch: Sequence[Any], count: int, size: int) -> Iterator[tuple[Sequence[Any], int]]:
    """The rows of a batch, at most `size` at a time."""
    if count <= size:
        if count:
            yield batch, count
        return
    for start in range(0, count, size):
        end = min(start + size, count)
        yield map_tensors(lambda t, s=start, e=end: t[s:e] if t.dim() else t, batch), end - start  # type: ignore[misc]


def _count(batch: Sequence[Any]) -> int:
    """How many examples: a batch has one row for each."""
    return next((len(t) for t in tensors_in(batch) if t.dim()), 0)


def _rows(t: Tensor, rows: Tensor) -> Tensor:
    """These rows of a tensor of the batch, without its history."""
    return t.detach()[rows] if t.dim() else t.detach().clone()


def _kinds(value: Any) -> object:
    """The shape of a row, and its type, of each tensor, and where in the batch it is."""
    if isinstance(value, Tensor):
        return value.dim(), value.shape[1:], value.dtype
    if isinstance(value, Mapping):
        return [(key, _kinds(member)) for key, member in value.items()]
    return [_kinds(member) for member in value] if isinstance(value, (list, tuple)) else type(value)


def _is_equal(batch: Any, other: Any) -> bool:
    """Whether two batches hold the same values at the same places, perhaps on different devices."""
    pairs = zip(tensors_in(batch), tensors_in(other), strict=False)
    return _kinds(batch) == _kinds(other) and all(
        torch.equal(a.detach(), b.detach().to(a.device)) for a, b in pairs
    )


def _is_all_tensors(value: Any) -> bool:
    """Whether all of a batch is tensors, or None: anything else would stay what it was when it was captured."""
    if isinstance(value, (list, tuple, Mapping)):
        return all(map(_is_all_tensors, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, Tensor)


def _sum_type(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _bounds_of(private: Private) -> tuple[object, ...]:
    """The noise, and what the strategy clips to: two sets of constants may have the same noise."""
    return private._parts, private._clipper.clips()


def _state_of(model: nn.Module) -> list[object]:
    """What a captured graph took for granted."""
    found: list[object] = []
    for module in model.modules():
        held = chain(module._parameters.values(), module._buffers.values())
        found.append(module.training)
        found.extend((t.data_ptr(), t.requires_grad) for t in held if t is not None)
    return found


def _settings_of(optimizer: torch.optim.Optimizer) -> list[list[object]]:
    """All that a captured update took for granted: numbers, and where tensors are. (It reads those themselves.)"""
    groups = [
        [_place(value) for key, value in group.items() if key != "params"] for group in optimizer.param_groups
    ]
    states = [[_place(value) for value in state.values()] for state in optimizer.state.values()]
    return groups + states


def _place(value: object) -> object:
    return value.data_ptr() if isinstance(value, Tensor) else value


def _is_capturable(optimizer: torch.optim.Optimizer, own_hooks: Collection[int]) -> bool:
    """Plain SGD keeps nothing on the host; others say so themselves.

    Hooks would run once and no more. Those of the run have nothing to do when the run itself updates.
    """
    hooks: Any = optimizer
    if {*hooks._optimizer_step_pre_hooks, *hooks._optimizer_step_post_hooks} - {*own_hooks}:
        return False
    if type(optimizer) is torch.optim.SGD:
        return True
    return all(group.get("capturable", False) for group in optimizer.param_groups)
