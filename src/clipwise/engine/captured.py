"""A private step captured once and replayed: three CUDA graphs, and one look at the device between them.

    gather   forward, backward, clip: the bounded sum of a piece, to which that of earlier pieces is added
    release  noise, sum over the expected batch size, `.grad`
    update   the optimizer

A captured graph has constant shapes. So a drawn batch is cut into pieces of one size; the last is filled up
with repeated rows that weigh 0. Nothing is dropped, and nothing but that size is chosen here. Rows of another
shape or type than the captured ones (longer texts) are gathered eagerly.

What an eager step would ask the device in between (is an example not finite? does one cancel?) is put
aside (gradients/rare.py) and looked at once, after the last piece and before anything is charged or released:
if the answer is yes, the batch is gathered again eagerly. The key of a step goes to the device just
before its release. The host never waits otherwise, and prepares the release while the device gathers.

Legend: B examples of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipwise.engine import cuda_graphs, step
from clipwise.engine.context import StepContext
from clipwise.errors import StepError
from clipwise.kernels.noise import normals
from clipwise.noise.gaussian import key_words
from clipwise.noise.mechanism import noise_labels, noised_by_part
from clipwise.noise.release import Draw, in_order_of, laid_as
from clipwise.sampling.batch_structure import map_tensors, tensors_in
from clipwise.validation import step_inputs

if TYPE_CHECKING:
    from clipwise.sampling.loader import Piece

_SUM_TYPES = (torch.float32, torch.float64)


class Captured:
    """The three graphs, and the memory that they share.

    Attributes:
        bounds: the noise and the clips that the graphs were captured with.
    """

    def __init__(
        self, context: StepContext, loss: Callable[..., Tensor], size: int, batch: Sequence[Any]
    ) -> None:
        self._context, self._loss, self._size = context, loss, size
        self.bounds = bounds_of(context)
        self._is_coupled = context.strategy.is_coupled
        if self._is_coupled:
            self._size = count_of(batch)  # mini-sets are neither cut nor filled up
        parameters = list(context.parameters.values())
        self._device = parameters[0].device
        if any(p.device != self._device for p in parameters):
            raise RuntimeError("the parameters are on several devices")
        if not _is_all_tensors(batch):
            raise RuntimeError("the batch holds more than tensors")
        self._state = _state_of(context.model)
        first = torch.arange(self._size, device=self._device) % count_of(batch)
        self._inputs = map_tensors(lambda t: _rows(t, first), tuple(batch))
        self._real_B = torch.ones(self._size, dtype=torch.bool, device=self._device)
        # Of the piece gathered last and of those before it, in the first graph's memory.
        self._sums: list[Tensor] = []
        self._holds_any = False
        self._rare = torch.zeros((), dtype=torch.bool, device=self._device)
        # Numbers that the noise needs in memory, written once: the graph does not write them anew at every step.
        stds = [part.noise_std for part in context.parts]
        self._stds = torch.tensor(stds, dtype=torch.float64, device=self._device)
        L = context.clipper.divisor
        self._divisors = {t: torch.full((1,), L, dtype=t, device=self._device) for t in _SUM_TYPES}
        # The step and the piece of it that the sums as they are go on with; of piece 0 they are zeros.
        self._awaited: tuple[int, int] | None = None
        self._gather = cuda_graphs.capture(self._gather_piece, self._device)
        self._clear()
        self._prepare_keys()
        self._release_graph = cuda_graphs.capture(self._write_gradients, self._device)
        self._update = cuda_graphs.Update(
            context.optimizer, self._device, {hook.id for hook in context.step_hooks}
        )

    def _prepare_keys(self) -> None:
        """Memory for the keys of a step: a row for each draw, with the labels of eager steps."""
        by_name, labels = self._sums_by_name(), list[str]()
        self._first_keys = []  # of each part
        for number, part in enumerate(self._context.parts):
            self._first_keys.append(len(labels))
            labels += noise_labels(number, [by_name[name] for name in part.parameters])
        shape, pinned = (len(labels), 4), self._device.type == "cuda"
        self._labels = labels
        self._host_keys = [torch.zeros(shape, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._keys = torch.zeros(shape, dtype=torch.int64, device=self._device)

    def step(self, batch: Sequence[Any], piece: Piece) -> bool:
        """Gather a piece that the loader handed out; after the last one of a batch, release and update."""
        context = self._context
        context.in_step = True
        before = self._begin(piece)
        for rows, count in self._cut(batch, piece.size):
            self._add(rows, count)
        # The device is at work. What the host has to do for the release it does meanwhile.
        if bounds_of(context) != self.bounds:
            context.loader.reset()
            raise StepError(
                "Clips were changed between two pieces of a batch: change them between batches, when a step has "
                "returned True."
            )
        if _state_of(context.model) != self._state:
            raise StepError(
                "The model was changed after its step was captured (train() or eval(), requires_grad, a parameter "
                "or a buffer in another place): call private.compiled again."
            )
        step.begin(context, piece)  # the guards of an eager step; none of them waits for the device
        if piece.last:
            self._derive_keys()
            self._update.prepare()
        if bool(self._rare):
            self._gather_again(batch, piece.size, before)
        context.loader.consume()
        if not piece.last:
            self._awaited = context.made(), piece.index_in_batch + 1
            context.in_step = False
            return False
        with step.releasing(context):
            step.release(context, self._hand_over_keys, self._replay_release)
            step.update(context, step=self._update.run)
        return True

    # ----------------------------------------------------------------- gather

    def _begin(self, piece: Piece) -> list[Tensor] | None:
        """What was gathered of the piece's batch before it; None if nothing was.

        A piece that something else than this step came before, or that failed in the middle, cannot go on:
        examples in what was gathered could be counted twice.
        """
        context, awaited = self._context, self._awaited
        context.partial = None  # nor may an eager step go on with what it gathered
        self._awaited = None
        goes_on = awaited == context.which(piece)
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
        with self._context.clipper.putting_aside() as aside:
            losses = step_inputs.require_losses(self._loss(*self._inputs), self._size, self._is_coupled)
            real_B = None if self._is_coupled else self._real_B
            clipped = self._context.clipper.clipped_sum(losses, real_B)
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
        """Gather some rows of a batch, by the graph if they are as the captured ones and a mini-set is as large."""
        earlier = [t.clone() for t in self._sums] if self._holds_any else None
        if kinds_of(rows) == kinds_of(self._inputs) and (not self._is_coupled or count == self._size):
            self._fill(rows, count)
            self._gather.replay()
        else:
            torch._foreach_copy_(self._sums, self._by_itself(rows))
        if earlier is not None:
            torch._foreach_add_(self._sums, earlier)
        self._holds_any = True

    def _gather_again(self, batch: Sequence[Any], count: int, before: list[Tensor] | None) -> None:
        """Something rare happened: take this piece out again and gather it eagerly."""
        self._clear()
        if before is not None:
            torch._foreach_add_(self._sums, before)
        for rows, _ in self._cut(batch, count):
            torch._foreach_add_(self._sums, self._by_itself(rows))
        self._holds_any = True

    def _by_itself(self, rows: Sequence[Any]) -> list[Tensor]:
        """The bounded sum of these rows, as an eager step forms it."""
        found = self._in_order(step.clipped_rows(self._context, self._loss, rows, count_of(rows)))
        self._context.guard.before_step()  # by the pass that was just made
        return found

    def _cut(self, batch: Sequence[Any], count: int) -> Iterator[tuple[Sequence[Any], int]]:
        """A piece of a batch, in pieces that the graph takes; a mini-set as it is."""
        return pieces_of(batch, count, max(count, self._size) if self._is_coupled else self._size)

    def _in_order(self, clipped: Mapping[str, Tensor]) -> list[Tensor]:
        found = []
        for name, p in self._context.parameters.items():
            dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
            # (Sums of several mini-sets are formed in float64 whatever the parameters are.)
            found.append(in_order_of(p, clipped[name] if self._is_coupled else clipped[name].to(dtype)))
        return found

    def _clear(self) -> None:
        torch._foreach_zero_(self._sums)
        self._rare.zero_()
        self._holds_any = False

    def _sums_by_name(self) -> dict[str, Tensor]:
        return dict(zip(self._context.parameters, self._sums, strict=True))

    # ---------------------------------------------------------------- release

    def _derive_keys(self) -> None:
        """The keys of this step, in the one of two places that the last copy to the device did not read."""
        self._host_keys.reverse()
        for number, label in enumerate(self._labels):
            self._host_keys[0][number] = key_words(self._context.keys.key.derive(label))

    def _hand_over_keys(self) -> dict[str, Tensor]:
        """After the release was charged: the keys go to the device, for the noise that the release graph draws."""
        if not self._holds_any:  # nobody was drawn
            torch._foreach_zero_(self._sums)
        self._host_keys[1].zero_()  # the device has waited for its copy since: no reader is left
        self._keys.copy_(self._host_keys[0], non_blocking=True)
        return self._means

    def _replay_release(self, means: Mapping[str, Tensor]) -> None:
        """Draw, divide and write. `.grad` is the graph's own memory."""
        self._release_graph.replay()
        self._awaited, self._holds_any = (self._context.made(), 0), False
        for p, grad in zip(self._context.parameters.values(), self._gradients, strict=True):
            if p.grad is not grad:
                p.grad = grad

    def _write_gradients(self) -> None:
        """Noise, and the division: what the second graph holds."""
        context = self._context
        self._means = self._sums_by_name()
        noised_by_part(self._means, context.parts, context.clipper.divisor, self._draw_of)
        self._keys.zero_()  # they have served
        self._gradients = [laid_as(p, self._means[name]) for name, p in context.parameters.items()]
        for p, grad in zip(context.parameters.values(), self._gradients, strict=True):
            p.grad = grad
        context.weights.released.remember()

    def _draw_of(self, part: int, place: int, std: float, device: torch.device) -> Draw:
        """The draws of a part, with keys and numbers that are in the device's memory."""
        first, std_1 = self._first_keys[part], self._stds[part : part + 1]

        def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
            return normals(self._keys[first + bucket], size, std_1, dtype, None, onto, self._divisors[dtype])

        return draw


def pieces_of(batch: Sequence[Any], count: int, size: int) -> Iterator[tuple[Sequence[Any], int]]:
    """The rows of a batch, at most `size` at a time."""
    if count <= size:
        if count:
            yield batch, count
        return
    for start in range(0, count, size):
        end = min(start + size, count)
        yield map_tensors(lambda t, s=start, e=end: t[s:e] if t.dim() else t, batch), end - start  # type: ignore[misc]


def count_of(batch: Sequence[Any]) -> int:
    """How many examples: a batch has one row for each."""
    return next((len(t) for t in tensors_in(batch) if t.dim()), 0)


def kinds_of(value: Any) -> object:
    """The shape of a row, and its type, of each tensor, and where in the batch it is."""
    if isinstance(value, Tensor):
        return value.dim(), value.shape[1:], value.dtype
    if isinstance(value, Mapping):
        return [(key, kinds_of(member)) for key, member in value.items()]
    return [kinds_of(member) for member in value] if isinstance(value, (list, tuple)) else type(value)


def bounds_of(context: StepContext) -> tuple[object, ...]:
    """The noise, and what the strategy clips to: two sets of constants may have the same noise."""
    return context.parts, context.clipper.clips()


def _rows(t: Tensor, rows: Tensor) -> Tensor:
    """These rows of a tensor of the batch, without its history."""
    return t.detach()[rows] if t.dim() else t.detach().clone()


def _is_all_tensors(value: Any) -> bool:
    """Whether all of a batch is tensors, or None: anything else would stay what it was when it was captured."""
    if isinstance(value, (list, tuple, Mapping)):
        return all(map(_is_all_tensors, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, Tensor)


def _state_of(model: nn.Module) -> list[object]:
    """What a captured graph took for granted."""
    found: list[object] = []
    for module in model.modules():
        held = chain(module._parameters.values(), module._buffers.values())
        found.append(module.training)
        found.extend((t.data_ptr(), t.requires_grad) for t in held if t is not None)
    return found
