"""Measuring gemmery: what is timed, how, and against whom. Nothing here is imported by `import gemmery`."""
