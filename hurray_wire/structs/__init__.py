"""The bytes: one declarative construct struct per table of the format, and what is derived from them.

`descriptor` and `frame` hold the declarations, `fused` turns a declaration into a fast `struct.Struct` with
paths and meanings. The only room that imports construct, and the only one that knows where a field lies;
whether its value is lawful is said in `rules`.
"""
