"""Measurements of gemmery: the timed calls, the protocol, and the peers. Nothing here is imported by `import
gemmery`.
"""
