"""The C library, by ctypes."""
