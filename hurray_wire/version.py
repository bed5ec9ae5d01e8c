"""The package's version; the wire's own versions stand in `tags`."""

__version__ = "0.1.0"
