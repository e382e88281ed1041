"""Makes the objects that an optimizer consists of."""

from .._settings.groups import Groups
from .._settings.naming import Names
from .._states.inspection import Inspection
from .._states.residuals import Residuals
from .._states.saving import Saving
from .._states.store import StoreFile
from .cache import EngineCache
from .gather import Gather
from .release import Release
from .steps import Steps


class Parts:
    """One object for each concern of an optimizer. Each gets these parts when it is made, and
    takes those that it needs, so it knows only those above it. None keeps the whole, because an
    optimizer that is given up would then wait for Python's cycle collector with its memory.

    options       options, and what they mean
    groups        groups and states
    names         names, ids and recipes of parameters
    placement     where parameters are stepped
    residuals     residuals of weights, and who wrote these
    cache         the engine, and what came of its steps
    gather        addresses
    release       hooks that step in the backward pass
    steps         steps: of all parameters, and of one
    store         the file of the states; the engine's cache knows it if there is one
    inspection    what is stored
    saving        what is saved
    """

    def __init__(self, options, placement):
        """placement: a class."""
        self.options = options
        self.groups = Groups(self)
        self.names = Names(self)
        self.placement = placement(self)
        self.residuals = Residuals(self)
        self.cache = EngineCache(self)
        self.gather = Gather(self)
        self.release = Release(self)
        self.steps = Steps(self)
        self.store = StoreFile(self)
        self.inspection = Inspection(self)
        self.saving = Saving(self)
        self.placement.made(self)
