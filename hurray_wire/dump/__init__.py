"""The command line `hurray-dump`: what a person runs to look into a blob, a stream or a damaged file.

The only room that prints, and that opens files for people. It decides nothing about the format: it drives the readers
of the rooms above by their stages, keeps going where they would stop, and says in words what they found.
"""

from hurray_wire.dump.cli import main

__all__ = ["main"]
