"""Steps in advance: while the backward pass goes on, a thread steps each parameter whose gradient
has come. What it makes lies beside the present values until step() takes it, or steps anew."""

import threading
from ctypes import byref, c_uint64

import torch

from .._library import abi, calls
from .._library.abi import lib
from .._settings.options import bytes_of
from .._step.gather import Ready
from .._tensors import devices

#: so many steps in a row that are made again end the steps in advance for a while
MOST_REDONE = 3
#: steps of the first such while. Each further one is twice as long, until a result stands
FIRST_REST = 16


class _Result:
    """What a thread makes, or has made, of one parameter.

    engine, m   the engine and the member that it is made with
    weight      the copy of the new weight
    states      memory for the new states
    made_of     the copies of weight and gradient that it is made of, and the versions of the states
    call        the call that makes it
    whole       True once it is there
    """

    def __init__(self, engine, m, room, made_of, call):
        self.engine, self.m, self.made_of, self.call = engine, m, made_of, call
        self.weight, self.states = room
        self.whole = False


class Overlap:
    """Sends the parameters of an optimizer to the thread of its placement, and keeps the results.
    Nothing that can be read changes before step()."""

    def __init__(self, parts):
        self.groups, self.placement = parts.groups, parts.placement
        self.cache, self.gather = parts.cache, parts.gather
        #: steps that were made again
        self.redone = 0
        #: by parameter: the results of this step, and those that step() uses
        self.results, self.used = {}, {}
        #: by parameter: memory for a weight and for states; and the bytes of all of it
        self.rooms, self.taken = {}, 0
        #: by parameter: how many gradients have come, and how many came before the last step
        self.came, self.expected = {}, {}
        #: gradients of several GPUs come in a thread each
        self.lock = threading.Lock()
        #: the engine of this step's results. None: not known yet. False: there are none
        self.engine = None
        #: spoiled: a result was lost; before: steps that the handles had made again
        self.spoiled, self.before = False, 0
        #: in_a_row: steps made again without one that stood; rest: steps left without results;
        #: next_rest: the length of the next such while
        self.in_a_row, self.rest, self.next_rest = 0, 0, FIRST_REST

    # ---- In the backward pass --------------------------------------------------------------------

    def take(self, p):
        """Takes the gradient of a parameter, of which a copy is under way. Begins a step in advance
        if it is the last gradient before step(), as far as can be known."""
        if not self.groups.options.overlap:
            return
        self.came[p] = self.came.get(p, 0) + 1
        if self.came[p] != self.expected.get(p):
            return
        try:
            with self.lock:
                self._begin(p)
        except Exception:  # step() comes to the same point and raises it
            self.engine = False

    def _begin(self, p):
        if self.engine is None:
            self.engine = self._engine_now() or False
        engine, copy = self.engine, self.placement.copies.get(p)
        m = engine and engine.member(p)
        if not m or copy is None or copy.gradient is None or self.cache.stale(m):
            return
        grad = copy.gradient if copy.alone else p.grad
        if grad is None or not copy.is_of(grad):
            return  # step() brings it into the placements of its parameter
        found = self.gather.place(Ready(engine), m, p, grad)
        room = found and self._room(m, copy)
        if not room:
            return
        call = calls.one_tensor(m.index, *found, ahead=self._places(room))
        result = self.results[p] = _Result(engine, m, room, self._mark(m, copy), call)
        self.placement.send(self.make, result, copy)

    def _engine_now(self):
        options = self.groups.options
        if options.optimizer_accumulation or self.rest:
            return None
        options.check_mode(self.groups)
        return self.cache.fitting()

    def _room(self, m, copy):
        """Returns memory for the results of a member. Returns None if there is no room, or if the
        member cannot be stepped in advance."""
        size, room = c_uint64(), self.rooms.get(m.p)
        if lib.halfstep_ahead_bytes(m.handle, m.index, byref(size)):
            return None
        if (
            room is None
            or room[0].shape != copy.weight.shape
            or room[0].dtype != copy.weight.dtype
            or room[1].numel() != size.value
        ):
            self._leave(m.p)
            limit, needed = window(self.groups.options.overlap), size.value + copy.weight.nbytes
            if limit is not True and self.taken + needed > limit:
                return None
            self.taken += needed
            room = self.rooms[m.p] = (
                devices.pinned(copy.weight.shape, copy.weight.dtype),
                torch.empty(size.value, dtype=torch.uint8, device="cpu"),
            )
        return room

    def _leave(self, p):
        self.taken -= sum(tensor.nbytes for tensor in self.rooms.pop(p, ()))

    @staticmethod
    def _places(room):
        # torch aligns memory to 64 bytes, but gives none for no bytes.
        return abi.Ahead(room[0].data_ptr(), room[1].data_ptr() or room[0].data_ptr())

    @staticmethod
    def _mark(m, copy):
        return copy.weight, copy.gradient, m.state_versions()

    def make(self, result, copy):
        """Makes a result, in the thread."""
        if self.results.get(result.m.p) is not result:
            return
        try:
            self.placement.complete(copy)
            if copy.down is not None:
                devices.wait(copy.down)
            result.whole = calls.run(result.m.handle, result.call) == abi.OK
        except Exception:  # as in take()
            return

    def spoil(self, p):
        """Forgets the result of a parameter, whose weight or gradient is about to change here."""
        if self.results.pop(p, None) is not None:
            self.spoiled = True
            self.placement.settle()

    # ---- In step() -------------------------------------------------------------------------------

    def gather_results(self, engine):
        """Returns an array of the results that fit what is stepped now, or None if there are
        none."""
        if not self.results:
            return None
        self.before, found = self._count(engine), None
        for p, result in self.results.items():
            weight, gradient, versions = result.made_of
            copy = self.placement.copies.get(p)
            if not result.whole:
                continue
            if (
                result.engine is not engine
                or copy is None
                or copy.weight is not weight
                or copy.gradient is not gradient
                or result.m.state_versions() != versions
            ):
                self.spoiled = True
                continue
            found = (abi.Ahead * len(engine.members))() if found is None else found
            found[engine.index_of[p]] = self._places((result.weight, result.states))
            self.used[p] = result
        return found

    @staticmethod
    def _count(engine):
        return sum(
            int(lib.halfstep_redone_steps(part)) for part in engine.parts if not part.asynchronous
        )

    def judge(self, engine, done):
        """Notes what became of the results in a step. `done`: the step was not refused."""
        if not done:
            return
        if not self.results and not self.spoiled:
            self.rest = max(self.rest - 1, 0)
        elif self.spoiled or self._count(engine) != self.before:
            self.redone += 1
            self.in_a_row += 1
            if self.in_a_row >= MOST_REDONE or self.next_rest > FIRST_REST:
                self.in_a_row, self.rest = 0, self.next_rest
                self.next_rest *= 2
        else:
            self.in_a_row, self.next_rest = 0, FIRST_REST

    def swap(self, p):
        """Makes the new weight of a parameter the present one, after a step that used its result.
        A second call changes nothing."""
        copy, room = self.placement.copies[p], self.rooms.get(p)
        if p in self.used and copy.weight is not self.used[p].weight:
            copy.weight, self.rooms[p] = room[0], (copy.weight, room[1])

    def end(self):
        """Forgets the results after step()."""
        self.expected.update(self.came)
        self.drop()

    def drop(self):
        """Forgets gradients and results."""
        self.results, self.used, self.came = {}, {}, {}
        self.engine, self.spoiled = None, False

    def keep(self, known):
        """Forgets all parameters but those that are known."""
        for p in [p for p in self.rooms if p not in known]:
            self._leave(p)
        for held in (self.expected, self.came):
            for p in [p for p in held if p not in known]:
                del held[p]


def window(overlap):
    """Returns the option `overlap` as False, True or a number of bytes."""
    if isinstance(overlap, bool):
        return overlap
    found = bytes_of(overlap, "overlap")
    if not found:
        raise ValueError(
            f"halfstep: overlap={overlap!r} leaves no room for results; give True, or a size in"
            ' bytes above 0, such as "8G"'
        )
    return found
