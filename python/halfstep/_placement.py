"""Where parameters are stepped and their states are kept: beside the weights. offload.py and
streaming.py have other placements."""

import contextlib

from . import _devices
from ._members import Wanted
from ._parameters import check_gradient
from ._sharding import local


class Placement:
    """Steps every parameter on the device that it lies on, with states there."""

    def __init__(self, groups, names):
        self.groups, self.names = groups, names

    def describe(self, members):
        """Returns what handles are to know of some parameters, of each its group index, position,
        itself and the format of its gradient: a list of Wanted; and the hyper-parameters and
        choices of their groups by index."""
        ids = self.names.identities([p for _, _, p, _ in members])
        wanted = [
            Wanted(
                p,
                g,
                i,
                gradient,
                self.names.of(g, i),
                ids[p],
                self.names.recipe(g, i),
                self.home(p),
            )
            for g, i, p, gradient in members
        ]
        groups = {one.group: self.groups[one.group] for one in wanted}
        return wanted, {
            g: (self.groups.options.hypers(group), self.groups.options.choices(group))
            for g, group in groups.items()
        }

    # ---- Where -----------------------------------------------------------------------------------

    def home(self, p):
        """The device that a parameter is stepped on."""
        return _devices.of(local(p))

    def divide(self, wanted):
        """Returns what each handle has, as Engine takes it, of a list of Wanted."""
        found = {}
        for one in wanted:
            found.setdefault(one.home, []).append(one)
        return [(device, None, some) for device, some in found.items()]

    def check_device(self, p, name):
        """Raises ValueError if a parameter cannot be stepped because of where it lies."""
        _devices.check(local(p), name)

    def built(self, params):
        """Handles were made anew, and these are all parameters."""

    # ---- Weights and gradients of a step ---------------------------------------------------------

    def gradient_of(self, p):
        """The gradient that a parameter is to be stepped with, or None."""
        return p.grad

    def check_gradient(self, p, grad, name):
        """check_gradient() of what gradient_of() gave."""
        return check_gradient(p, grad, name)

    def bring(self, m, p, grad):
        """Weight and gradient of a member that is stepped elsewhere than it lies. What still has to
        come is there after arrive()."""
        raise NotImplementedError

    def arrive(self, members):
        """Waits until what bring() began is there."""

    def put_back(self, members):
        """Takes the weights of members back to where they lie."""

    # ---- Steps -----------------------------------------------------------------------------------

    def stepping(self):
        """A context around each call of step()."""
        return contextlib.nullcontext()

    def released(self, p, release):
        """The gradient of a parameter is complete in gradient release. Returns True if this object
        sees to its step, by release.step_sent() or later."""
        return False

    def stepped_in_release(self, params):
        """step() has stepped these in gradient release."""

    def settle(self):
        """Waits for steps that other threads of this process carry out."""

    def heard(self):
        """All that was submitted to a GPU is done. Waits for what follows it."""
