"""The interfaces of other packages: `from halfstep.compat.PACKAGE import ...` in place of `from
PACKAGE import ...`."""
