"""What a placement decides: where parameters are stepped and where their states are. Here both are
beside the weights. host.py and streams.py have other placements."""

from .._ranks import ownership
from .._states.members import NOTHING, Wanted
from .._tensors import devices, matrices, sharding
from .._tensors.parameters import check_gradient
from .._tensors.sharding import stored


class Placement:
    """Steps every parameter on the device that it lies on, with states there.

    in_grad    True if gradient_of() a parameter that is stepped there is its `.grad`
    """

    in_grad = True

    def __init__(self, parts):
        self.groups, self.names = parts.groups, parts.names

    def made(self, parts):
        """Runs once all parts of the optimizer are made."""

    def describe(self, members):
        """Returns what handles are to know of some parameters, of each its group index, position,
        itself and the format of its gradient: a list of Wanted; and Options.values() of their
        groups by index."""
        names = self.names
        ids = names.identities([p for _, _, p, _ in members])
        how = [matrices.how_of(group) for group in self.groups]
        wanted = [
            Wanted(p, g, gradient, names.of(g, i), ids[p], names.recipe(g, i), self.home(p), how[g])
            for g, i, p, gradient in members
        ]
        groups = {one.group for one in wanted}
        return wanted, {g: self.groups.options.values(self.groups[g]) for g in groups}

    # ---- Where -----------------------------------------------------------------------------------

    def home(self, p):
        """Returns the device that a parameter is stepped on."""
        return devices.of(stored(p))

    def divide(self, wanted):
        """Returns what each handle has, as Engine takes it, of a list of Wanted."""
        found, gathered, owners = {}, [], self.groups.options.owners
        for one in wanted:
            if sharding.is_gathered(one.rule, one.p, one.how, owners):
                gathered.append(one)
            else:
                found.setdefault(one.home, []).append(one)
        places = {one.group for one in gathered}
        values = {g: self.groups.options.values(self.groups[g]) for g in places}
        return [(device, None, some) for device, some in found.items()] + ownership.divide(
            gathered, owners, values, self.kept
        )

    def kept(self, one):
        """Returns the device of the states of a Wanted that one rank steps for others."""
        return one.home

    def check_device(self, p, name):
        """Raises ValueError if a parameter cannot be stepped because of where it lies."""
        devices.check(stored(p), name)

    def hook(self):
        """Runs after parameters were added."""

    def built(self, params):
        """Runs after handles were made anew. `params` are all parameters."""

    # ---- Weights and gradients of a step ---------------------------------------------------------

    def gradient_of(self, p):
        """Returns the gradient to step a parameter with, or None."""
        return p.grad

    def check_gradient(self, p, grad, name):
        """Checks a gradient of gradient_of(), and returns its format."""
        return check_gradient(p, grad, name)

    def bring(self, m, p, grad):
        """Returns the weight and gradient of a member that is stepped on another device than its
        own. They may still be on their way until arrive()."""
        raise NotImplementedError

    def weight_here(self, m):
        """Returns the weight of a member in CPU memory, in memory order, for reading."""
        return devices.to_cpu(stored(m.p))

    def arrive(self, members):
        """Waits for the copies that bring() has begun."""

    def put_back(self, members):
        """Copies the weights of members back to their own device."""

    def gather_results(self, engine):
        """Returns the results of steps in advance, an array of Ahead, or None if there are none."""
        return None

    def judge(self, engine, done):
        """Notes what became of these results in a step. `done`: the step was not refused."""

    # ---- Steps -----------------------------------------------------------------------------------

    def stepping(self):
        """Returns a context around each call of step()."""
        return NOTHING

    def released(self, p, steps):
        """Runs when the gradient of a parameter is complete in gradient release. Returns True if
        this object makes the step itself, by steps.step_sent() or later."""
        return False

    def stepped_alone(self, p):
        """Runs after step_param() has stepped a parameter. Work that follows needs its weight."""

    def stepped_in_release(self, params):
        """Runs after step() has stepped these parameters in gradient release."""

    def settle(self):
        """Waits for steps in other threads of this process."""

    def doubt(self):
        """Runs when somebody may have written gradients without a trace."""

    def forget(self):
        """Forgets gradients that exist only here, because zero_grad() was called."""

    def heard(self):
        """Runs after all work that was submitted to a GPU is done. Waits for work that follows
        it."""
