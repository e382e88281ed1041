"""Makes the objects that an optimizer consists of."""

from .._settings.groups import Groups
from .._settings.naming import Names
from .._states.inspection import Inspection
from .._states.residuals import Residuals
from .._states.saving import Saving
from .._states.store import StoreFile
from .accumulation import Accumulation
from .cache import EngineCache
from .gather import Gather
from .refusals import Refusals
from .rounds import Release
from .steps import Steps
from .updates import Updates


class Parts:
    """One object for each concern of an optimizer. Each object knows only those above it.

    options       options, and what they mean
    groups        groups and states
    names         names, ids and recipes of parameters
    placement     where parameters are stepped
    residuals     residuals of weights, and who wrote these
    refusals      refused steps
    cache         the engine
    gather        addresses
    accumulation  micro-batches that went into the states
    updates       calls of the engine
    release       steps in the backward pass
    steps         step()
    store         the file of the states; the engine's cache knows it if there is one
    inspection    what is stored
    saving        what is saved
    """

    def __init__(self, options, placement):
        """placement: a class."""
        self.options = options
        self.groups = groups = Groups(options)
        self.names = names = Names(groups)
        self.placement = placement = placement(groups, names)
        self.residuals = residuals = Residuals(groups, names)
        self.refusals = refusals = Refusals(groups)
        self.cache = cache = EngineCache(groups, names, placement, residuals, refusals)
        self.gather = gather = Gather(groups, placement, cache)
        self.accumulation = accumulation = Accumulation(groups, placement, cache)
        self.updates = updates = Updates(
            groups, names, placement, residuals, refusals, cache, gather, accumulation
        )
        self.release = release = Release(groups, placement, cache, accumulation, updates)
        self.steps = Steps(
            groups, names, placement, residuals, cache, accumulation, updates, release
        )
        self.store = StoreFile(groups, names, placement, residuals, cache, accumulation, release)
        self.inspection = inspection = Inspection(groups, names, placement, residuals, cache)
        self.saving = Saving(groups, names, residuals, cache, accumulation, release, inspection)
