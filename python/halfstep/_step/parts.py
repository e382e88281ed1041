"""Makes the objects that an optimizer consists of."""

from ._accumulation import Accumulation
from ._cache import EngineCache
from ._gather import Gather
from ._groups import Groups
from ._inspect import Inspection
from ._names import Names
from ._refusals import Refusals
from ._residuals import Residuals
from ._rounds import Release
from ._saving import Saving
from ._steps import Steps
from ._store import Store
from ._updates import Updates


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
        self.store = Store(groups, names, placement, residuals, cache, accumulation, release)
        self.inspection = inspection = Inspection(groups, names, placement, residuals, cache)
        self.saving = Saving(groups, names, residuals, cache, accumulation, release, inspection)
