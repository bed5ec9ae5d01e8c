"""Frames in other people's stores and plug-ins: one module each, which needs that package and no other does."""
