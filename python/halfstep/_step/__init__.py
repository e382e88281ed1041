"""The way of a step: from optimizer.step() to one call of the library."""
