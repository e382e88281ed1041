"""The interfaces of other packages. Import `from halfstep.compat.PACKAGE` instead of `from
PACKAGE`."""
