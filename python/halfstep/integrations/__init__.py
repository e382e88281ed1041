"""Adapters to trainers, one module for each: docs/frameworks.md has the lines to write.

Importing this package imports no trainer. A module imports its trainer, or says what to install.
"""
